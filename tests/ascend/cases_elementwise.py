"""Cases: functions of elements, reductions and products of matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from operator_maker import HALVES, case, gradients, inplace, words

for name in words(
    "abs neg sign sin cos tan sinh cosh tanh exp expm1 sigmoid erf erfc ceil floor round trunc frac relu "
    "sinc signbit isfinite isinf isneginf isposinf square exp2 logical_not asinh atan"
):
    case(name, lambda m, name=name: getattr(torch, name)(m.normal(4, 7)))
for name in words("sqrt rsqrt log log2 log10 log1p reciprocal acosh"):
    case(name, lambda m, name=name: getattr(torch, name)(m.positive(4, 7) + 1))
for name in words("asin acos atanh erfinv"):
    case(name, lambda m, name=name: getattr(torch, name)(m.unit(4, 7)))
for name in words(
    "abs_ neg_ sin_ cos_ tanh_ exp_ expm1_ sigmoid_ erf_ ceil_ floor_ round_ trunc_ frac_ relu_ sqrt_ rsqrt_ log_ "
    "log2_ log1p_ reciprocal_"
):
    case(name, lambda m, name=name: inplace(m.positive(4, 7), name))
for name in words("silu mish hardswish hardsigmoid selu softplus leaky_relu elu celu logsigmoid hardtanh gelu"):
    case(f"{name} and gradient", lambda m, name=name: gradients(getattr(F, name), m.normal(4, 7)))
# torch_npu has one gelu for both formulas, and the simulated operator computes the default one; they are 5e-4 apart.
case("gelu tanh", lambda m: gradients(lambda x: F.gelu(x, approximate="tanh"), m.normal(4, 7)), HALVES)
case("sigmoid gradient", lambda m: gradients(torch.sigmoid, m.normal(4, 7)))
case("tanh gradient", lambda m: gradients(torch.tanh, m.normal(4, 7)))
case("relu gradient", lambda m: gradients(torch.relu, m.normal(4, 7)))
case("glu", lambda m: gradients(lambda x: F.glu(x, -1), m.normal(4, 8)))
case("shrink", lambda m: [F.hardshrink(m.normal(9)), F.softshrink(m.normal(9))])
case("logit", lambda m: torch.logit(m.positive(5) / 2, 1e-3))
case("decimals", lambda m: torch.round(m.normal(9), decimals=1), (torch.float32,))
case("clamp", lambda m: torch.clamp(m.normal(4, 7), -0.5, 0.5))
case("clamp min", lambda m: torch.clamp(m.normal(4, 7), min=0.1))
case("clamp max", lambda m: torch.clamp(m.normal(4, 7), max=0.1))
case("clamp tensors", lambda m: torch.clamp(m.normal(4, 7), m.unit(7) - 1, m.unit(7) + 1))
case("nan_to_num", lambda m: torch.nan_to_num(m.normal(3, 3) / m.values([0.0, 1.0, 2.0], m.dtype)))
case("cast", lambda m: [m.normal(5).to(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.int32)])

for name in words("add sub mul maximum minimum atan2 logical_and logical_or logical_xor eq ne lt le gt ge"):
    case(name, lambda m, name=name: getattr(torch, name)(m.normal(4, 7), m.normal(7)))
case("div", lambda m: torch.div(m.normal(4, 7), m.positive(7)))
case("div floor", lambda m: torch.div(m.normal(4, 7) * 8, m.positive(7), rounding_mode="floor"), (torch.float32,))
case("div trunc", lambda m: torch.div(m.normal(4, 7) * 8, m.positive(7), rounding_mode="trunc"), (torch.float32,))
case("floor divide integers", lambda m: m.integers(100, 6) // m.values([3, 4, 5, 6, 7, 8]), (torch.float32,))
case("remainder", lambda m: torch.remainder(m.normal(4, 7) * 8, m.positive(7)), (torch.float32,))
case("fmod", lambda m: torch.fmod(m.normal(4, 7) * 8, m.positive(7)), (torch.float32,))
case("pow", lambda m: [m.positive(5) ** 2.5, m.positive(5) ** m.positive(5), 2.0 ** m.normal(5)])
case("alpha", lambda m: torch.add(m.normal(4), m.normal(4), alpha=0.5))
case("types mixed", lambda m: m.normal(4) + m.normal(4).float())
case("scalars", lambda m: [m.normal(5) * 3, m.normal(5) + 1, 1 - m.normal(5), m.normal(5) / 3, 2 / m.positive(5)])
case("scalar comparisons", lambda m: [(x := m.normal(9)) > 0, x >= 0, x < 0, x <= 0, x == 0, x != 0])
case("integers", lambda m: [(x := m.integers(50, 8)) + x, x * 3, x - 7, x % 5, x & 6, x | 6, x ^ 6, ~x, x // 3])
case("int32", lambda m: [(x := m.integers(50, 8, dtype=torch.int32)) + x, x * 3, x > 20, x.sum(), x.max(), x.float()])
case("booleans", lambda m: [(x := m.booleans(9)) & ~x, x | x, x ^ x, x.any(), x.all(), x.sum()])
case("in place", lambda m: inplace(inplace(m.normal(4, 7), "add_", m.normal(7), alpha=2), "mul_", m.normal(7)))
case("in place scalars", lambda m: inplace(inplace(inplace(m.normal(4), "add_", 2), "mul_", 3), "div_", 7))
case("addcmul", lambda m: torch.addcmul(m.normal(4), m.normal(4), m.normal(4), value=0.3))
case("addcdiv", lambda m: torch.addcdiv(m.normal(4), m.normal(4), m.positive(4), value=0.3))
case("lerp", lambda m: [torch.lerp(m.normal(4), m.normal(4), 0.3), torch.lerp(m.normal(4), m.normal(4), m.unit(4))])
case("where", lambda m: torch.where(m.booleans(4, 7), m.normal(4, 7), m.normal(7)))
case("masked_fill", lambda m: m.normal(4, 7).masked_fill(m.booleans(4, 7), -3.0))
case(
    "complex",
    lambda m: torch.view_as_real(torch.polar(m.positive(3), m.normal(3)) * torch.complex(m.normal(3), m.normal(3))),
    (torch.float32,),
)

case(
    "sum", lambda m: [(x := m.normal(4, 5, 6)).sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.sum(dtype=torch.float32)]
)
case("mean", lambda m: [(x := m.normal(4, 5, 6)).mean(), x.mean(1), x.mean((0, 2), keepdim=True)])
case("prod", lambda m: [m.positive(6).prod(), m.positive(3, 4).prod(1)])
case(
    "extremes",
    lambda m: [(x := m.normal(4, 5)).max(), x.min(), x.amax(1), x.amin((0, 1)), *x.max(1), *x.min(0)],
    (torch.float32,),
)
case("argmax", lambda m: [(x := m.normal(4, 5)).argmax(), x.argmax(1), x.argmin(0, keepdim=True)], (torch.float32,))
case(
    "var and std",
    lambda m: [(x := m.normal(4, 9)).var(), x.std(1), x.var(0, correction=0), x.std(), *torch.var_mean(x, 1)],
)
case("norm", lambda m: [(x := m.normal(4, 9)).norm(), torch.linalg.vector_norm(x, dim=1), x.norm(p=1), x.norm(dim=0)])
case("logsumexp", lambda m: torch.logsumexp(m.normal(4, 9), 1))
case("cumsum", lambda m: [m.normal(4, 9).cumsum(1), m.integers(9, 7).cumsum(0)])
case("cumprod", lambda m: m.positive(4, 5).cumprod(1))
case("any all", lambda m: [m.booleans(3, 4).any(1), m.booleans(3, 4).all(0), m.normal(3).isnan().any()])
case("median", lambda m: [m.normal(7).median(), *m.normal(4, 7).median(1)], (torch.float32,))

case(
    "matmul",
    lambda m: [
        m.normal(5, 6) @ m.normal(6, 7),
        m.normal(2, 5, 6) @ m.normal(6, 7),
        m.normal(2, 3, 5, 6) @ m.normal(2, 3, 6, 4),
        m.normal(5, 6) @ m.normal(6),
    ],
)
case(
    "matmul of transposed",
    lambda m: [
        m.normal(6, 5).t() @ m.normal(7, 6).t(),
        torch.bmm(m.normal(2, 5, 6), m.normal(2, 7, 6).transpose(1, 2)),
    ],
)
case(
    "addmm",
    lambda m: [
        torch.addmm(m.normal(7), m.normal(5, 6), m.normal(6, 7)),
        torch.addmm(m.normal(5, 7), m.normal(5, 6), m.normal(6, 7), beta=0.5, alpha=2),
    ],
)
case("baddbmm", lambda m: torch.baddbmm(m.normal(2, 5, 4), m.normal(2, 5, 3), m.normal(2, 3, 4), beta=0.5, alpha=2))
case("addmv", lambda m: torch.addmv(m.normal(5), m.normal(5, 3), m.normal(3), beta=0.5, alpha=2))
case("linear", lambda m: gradients(F.linear, m.normal(2, 5, 6), m.normal(7, 6), m.normal(7)))
case("linear without bias", lambda m: gradients(F.linear, m.normal(2, 5, 6), m.normal(7, 6)))
case("einsum", lambda m: torch.einsum("bij,bjk->bik", m.normal(2, 3, 4), m.normal(2, 4, 5)))
case(
    "outer and dot",
    lambda m: [torch.outer(m.normal(3), m.normal(4)), torch.dot(m.normal(5), m.normal(5))],
    (torch.float32,),
)
case("cdist", lambda m: torch.cdist(m.normal(4, 3), m.normal(5, 3)), (torch.float32,))
case(
    "inverse and cholesky",
    lambda m: [torch.inverse(x := m.unit(3, 3) + 3 * torch.eye(3, device=m.device)), torch.linalg.cholesky(x @ x.t())],
    (torch.float32,),
)
