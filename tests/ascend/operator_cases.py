"""Torch functions whose results on a simulated card are compared with the CPU's; run as a program.

Each case is a function of a `Maker`, which makes equal tensors on either device. Prints one line for each difference.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch_npu

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Maker:
    """Tensors of one device and type; the same numbers on every device."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(5)

    def normal(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=self.generator) * scale).to(self.dtype).to(self.device)

    def positive(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) + 0.5).to(self.dtype).to(self.device)

    def unit(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) * 1.8 - 0.9).to(self.dtype).to(self.device)

    def integers(self, limit: int, *sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(limit, sizes, generator=self.generator).to(dtype).to(self.device)

    def booleans(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) < 0.5).to(self.device)

    def values(self, numbers: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)


Case = Callable[[Maker], Any]
CASES: dict[str, tuple[Case, tuple[torch.dtype, ...]]] = {}


def case(name: str, function: Case, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    assert name not in CASES, name
    CASES[name] = (function, dtypes)


def inplace(tensor: torch.Tensor, method: str, *arguments: Any, **named: Any) -> torch.Tensor:
    copy = tensor.clone()
    getattr(copy, method)(*arguments, **named)
    return copy


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of a weighted sum of it."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*leaves)
    weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result.dtype).to(result.device)
    (result * weight).sum().backward()
    return [result, *[leaf.grad for leaf in leaves if leaf.grad is not None]]


for name in (
    "abs neg sign sin cos tan sinh cosh tanh exp expm1 sigmoid erf erfc ceil floor round trunc frac relu "
    "sinc signbit isfinite isinf isneginf isposinf square exp2 logical_not asinh atan"
).split():
    case(name, lambda m, name=name: getattr(torch, name)(m.normal(4, 7)))
for name in "sqrt rsqrt log log2 log10 log1p reciprocal acosh".split():
    case(name, lambda m, name=name: getattr(torch, name)(m.positive(4, 7) + 1))
for name in "asin acos atanh erfinv".split():
    case(name, lambda m, name=name: getattr(torch, name)(m.unit(4, 7)))
for name in (
    "abs_ neg_ sin_ cos_ tanh_ exp_ expm1_ sigmoid_ erf_ ceil_ floor_ round_ trunc_ frac_ relu_ sqrt_ rsqrt_ log_ "
    "log2_ log1p_ reciprocal_"
).split():
    case(name, lambda m, name=name: inplace(m.positive(4, 7), name))
for name in "silu mish hardswish hardsigmoid selu softplus leaky_relu elu logsigmoid hardtanh gelu".split():
    case(f"{name} and gradient", lambda m, name=name: gradients(getattr(F, name), m.normal(4, 7)))
# torch_npu has one gelu for both formulas, and the simulated operator computes the default one; they are 5e-4 apart.
case("gelu tanh", lambda m: gradients(lambda x: F.gelu(x, approximate="tanh"), m.normal(4, 7)), HALVES)
case("sigmoid gradient", lambda m: gradients(torch.sigmoid, m.normal(4, 7)))
case("tanh gradient", lambda m: gradients(torch.tanh, m.normal(4, 7)))
case("relu gradient", lambda m: gradients(torch.relu, m.normal(4, 7)))
case("glu", lambda m: gradients(lambda x: F.glu(x, -1), m.normal(4, 8)))
case("clamp", lambda m: torch.clamp(m.normal(4, 7), -0.5, 0.5))
case("clamp min", lambda m: torch.clamp(m.normal(4, 7), min=0.1))
case("clamp max", lambda m: torch.clamp(m.normal(4, 7), max=0.1))
case("clamp tensors", lambda m: torch.clamp(m.normal(4, 7), m.unit(7) - 1, m.unit(7) + 1))
case("nan_to_num", lambda m: torch.nan_to_num(m.normal(3, 3) / m.values([0.0, 1.0, 2.0], m.dtype)))
case("cast", lambda m: [m.normal(5).to(t) for t in (torch.float32, torch.bfloat16, torch.float16, torch.int32)])

for name in "add sub mul maximum minimum atan2 logical_and logical_or logical_xor eq ne lt le gt ge".split():
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
case("complex", lambda m: torch.view_as_real(torch.polar(m.positive(3), m.normal(3)) * torch.complex(m.normal(3), m.normal(3))), (torch.float32,))

case("sum", lambda m: [(x := m.normal(4, 5, 6)).sum(), x.sum(1), x.sum((0, 2), keepdim=True), x.sum(dtype=torch.float32)])
case("mean", lambda m: [(x := m.normal(4, 5, 6)).mean(), x.mean(1), x.mean((0, 2), keepdim=True)])
case("prod", lambda m: [m.positive(6).prod(), m.positive(3, 4).prod(1)])
case("extremes", lambda m: [(x := m.normal(4, 5)).max(), x.min(), x.amax(1), x.amin((0, 1)), *x.max(1), *x.min(0)], (torch.float32,))
case("argmax", lambda m: [(x := m.normal(4, 5)).argmax(), x.argmax(1), x.argmin(0, keepdim=True)], (torch.float32,))
case("var and std", lambda m: [(x := m.normal(4, 9)).var(), x.std(1), x.var(0, correction=0), x.std(), *torch.var_mean(x, 1)])
case("norm", lambda m: [(x := m.normal(4, 9)).norm(), torch.linalg.vector_norm(x, dim=1), x.norm(p=1), x.norm(dim=0)])
case("logsumexp", lambda m: torch.logsumexp(m.normal(4, 9), 1))
case("cumsum", lambda m: [m.normal(4, 9).cumsum(1), m.integers(9, 7).cumsum(0)])
case("cumprod", lambda m: m.positive(4, 5).cumprod(1))
case("any all", lambda m: [m.booleans(3, 4).any(1), m.booleans(3, 4).all(0), m.normal(3).isnan().any()])
case("median", lambda m: [m.normal(7).median(), *m.normal(4, 7).median(1)], (torch.float32,))

case("matmul", lambda m: [m.normal(5, 6) @ m.normal(6, 7), m.normal(2, 5, 6) @ m.normal(6, 7), m.normal(2, 3, 5, 6) @ m.normal(2, 3, 6, 4), m.normal(5, 6) @ m.normal(6)])
case("matmul of transposed", lambda m: [m.normal(6, 5).t() @ m.normal(7, 6).t(), torch.bmm(m.normal(2, 5, 6), m.normal(2, 7, 6).transpose(1, 2))])
case("addmm", lambda m: [torch.addmm(m.normal(7), m.normal(5, 6), m.normal(6, 7)), torch.addmm(m.normal(5, 7), m.normal(5, 6), m.normal(6, 7), beta=0.5, alpha=2)])
case("baddbmm", lambda m: torch.baddbmm(m.normal(2, 5, 4), m.normal(2, 5, 3), m.normal(2, 3, 4), beta=0.5, alpha=2))
case("addmv", lambda m: torch.addmv(m.normal(5), m.normal(5, 3), m.normal(3), beta=0.5, alpha=2))
case("linear", lambda m: gradients(F.linear, m.normal(2, 5, 6), m.normal(7, 6), m.normal(7)))
case("linear without bias", lambda m: gradients(F.linear, m.normal(2, 5, 6), m.normal(7, 6)))
case("einsum", lambda m: torch.einsum("bij,bjk->bik", m.normal(2, 3, 4), m.normal(2, 4, 5)))
case("outer and dot", lambda m: [torch.outer(m.normal(3), m.normal(4)), torch.dot(m.normal(5), m.normal(5))], (torch.float32,))

case("softmax", lambda m: gradients(lambda x: F.softmax(x, -1), m.normal(4, 9)))
case("softmax in fp32", lambda m: F.softmax(m.normal(4, 9), -1, dtype=torch.float32))
case("log_softmax", lambda m: gradients(lambda x: F.log_softmax(x, 1), m.normal(4, 9)))
case("cross_entropy", lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6)), m.normal(6, 9)), (torch.float32,))
case("cross_entropy in fp32", lambda m: gradients(lambda x: F.cross_entropy(x.float(), m.integers(9, 6)), m.normal(6, 9)))
case("cross_entropy ignoring", lambda m: gradients(lambda x: F.cross_entropy(x, m.values([1, -100, 2, 8, -100, 0])), m.normal(6, 9)), (torch.float32,))
case("cross_entropy sum", lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), reduction="sum"), m.normal(6, 9)), (torch.float32,))
case("cross_entropy none", lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), reduction="none"), m.normal(6, 9)), (torch.float32,))
case("cross_entropy smoothed", lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), label_smoothing=0.1), m.normal(6, 9)), (torch.float32,))
case("mse_loss", lambda m: gradients(F.mse_loss, m.normal(4, 5), m.normal(4, 5)))
case("l1_loss", lambda m: gradients(F.l1_loss, m.normal(4, 5), m.normal(4, 5)))
case("smooth_l1_loss", lambda m: gradients(lambda a, b: F.smooth_l1_loss(a, b), m.normal(4, 5), m.normal(4, 5)))
case("bce_with_logits", lambda m: gradients(lambda a: F.binary_cross_entropy_with_logits(a, m.booleans(4, 5).to(m.dtype)), m.normal(4, 5)))
case("kl_div", lambda m: gradients(lambda a: F.kl_div(a, F.softmax(m.normal(4, 5), 1), reduction="batchmean"), m.normal(4, 5)))

case("layer_norm", lambda m: gradients(lambda x, w, b: F.layer_norm(x, (9,), w, b), m.normal(3, 4, 9), m.positive(9), m.normal(9)))
case("layer_norm without weights", lambda m: gradients(lambda x: F.layer_norm(x, (9,)), m.normal(3, 4, 9)))
case("rms_norm", lambda m: gradients(lambda x, w: F.rms_norm(x, (9,), w, 1e-5), m.normal(3, 4, 9), m.positive(9)))
case("group_norm", lambda m: gradients(lambda x, w, b: F.group_norm(x, 2, w, b), m.normal(3, 4, 5), m.positive(4), m.normal(4)), (torch.float32,))
case("batch_norm", lambda m: F.batch_norm(m.normal(8, 4), m.values([0.0] * 4), m.values([1.0] * 4), m.positive(4), m.normal(4), True), (torch.float32,))

case("embedding", lambda m: gradients(lambda w: F.embedding(m.integers(10, 3, 4), w), m.normal(10, 6)))
case("embedding with padding", lambda m: gradients(lambda w: F.embedding(m.integers(10, 3, 4), w, padding_idx=2), m.normal(10, 6)))
case("index", lambda m: [(x := m.normal(4, 5, 6))[m.values([0, 3])], x[:, m.values([0, 3])], x[m.values([0, 3]), :, m.values([1, 2])], x[1], x[..., 2:4], x[m.values([[0], [1]]), m.values([1, 2])]])
case("index by mask", lambda m: [(x := m.normal(4, 5))[m.booleans(4, 5)], x[m.booleans(4)], torch.masked_select(x, m.booleans(4, 5))])
case("index gradient", lambda m: gradients(lambda x: x[m.values([0, 3, 0])], m.normal(4, 5)))
case("index_put", lambda m: [inplace(m.normal(4, 5), "index_put_", (m.values([0, 2]),), m.normal(2, 5)), inplace(m.normal(4, 5), "index_put_", (m.values([0, 0]),), m.normal(2, 5), accumulate=True)])
case("assignment", lambda m: [inplace(m.normal(4, 5), "__setitem__", 1, 2.5), inplace(m.normal(4, 5), "__setitem__", (slice(None), m.values([0, 2])), m.normal(4, 2)), inplace(m.normal(4, 5), "__setitem__", m.booleans(4, 5), 0.5)])
case("index_select", lambda m: gradients(lambda x: x.index_select(1, m.values([0, 3, 0])), m.normal(4, 5)))
case("index_add", lambda m: m.normal(4, 5).index_add(0, m.values([0, 2, 0]), m.normal(3, 5), alpha=2))
case("index_copy", lambda m: m.normal(4, 5).index_copy(0, m.values([2, 0]), m.normal(2, 5)))
case("index_fill", lambda m: m.normal(4, 5).index_fill(1, m.values([2, 0]), 1.5))
case("gather", lambda m: gradients(lambda x: x.gather(1, m.integers(5, 4, 3)), m.normal(4, 5)))
case("scatter", lambda m: [m.normal(4, 5).scatter(1, m.values([[0, 1], [2, 3], [4, 0], [1, 2]]), m.normal(4, 2)), m.normal(4, 5).scatter(1, m.values([[0], [2], [4], [1]]), 2.5)])
case("scatter_add", lambda m: m.normal(4, 5).scatter_add(1, m.integers(5, 4, 3), m.normal(4, 3)))
case("scatter_reduce", lambda m: [m.normal(6).scatter_reduce(0, m.integers(6, 9), m.normal(9), r) for r in ("sum", "amax", "amin")], (torch.float32,))
case("take", lambda m: torch.take(m.normal(4, 5), m.integers(20, 3)))
case("nonzero", lambda m: [torch.nonzero(m.booleans(4, 5)), *torch.nonzero(m.booleans(4, 5), as_tuple=True)], (torch.float32,))
case("masked_scatter", lambda m: m.normal(4, 5).masked_scatter(m.booleans(4, 5), m.normal(20)))

case("cat and stack", lambda m: [torch.cat([m.normal(2, 3), m.normal(4, 3)]), torch.cat([m.normal(2, 3), m.normal(2, 1)], 1), torch.stack([m.normal(2, 3), m.normal(2, 3)], 1)])
case("split", lambda m: [*torch.split(m.normal(7, 3), [2, 5]), *m.normal(7, 3).chunk(3), *torch.split_with_sizes_copy(m.normal(7), [3, 4])])
case("chunk_cat", lambda m: torch._chunk_cat([m.normal(5, 3), m.normal(4)], 0, 2))
case("copy strided", lambda m: [m.normal(4, 5).t().contiguous(), m.normal(4, 6)[:, ::2].clone(), inplace(m.normal(4, 6), "copy_", m.normal(6))])
case("views", lambda m: [m.normal(4, 6).view(2, 2, 6).permute(2, 0, 1).reshape(-1), m.normal(1, 5).expand(3, 5) + 1])
case("flip roll repeat", lambda m: [(x := m.normal(3, 4)).flip(0), x.flip((0, 1)), x.roll(1, 0), x.repeat(2, 3), torch.tile(x, (2,))])
case("repeat_interleave", lambda m: [(x := m.normal(3, 4)).repeat_interleave(2, 1), x.repeat_interleave(2), x.repeat_interleave(m.values([1, 0, 2]), 0)])
case("tril triu", lambda m: [(x := m.normal(4, 5)).tril(), x.triu(1), x.tril(-1), inplace(x, "triu_")])
case("pad", lambda m: F.pad(m.normal(3, 4), (1, 2, 0, 1), value=2.5))
case("diag", lambda m: [torch.diag(m.normal(4)), torch.diagonal(m.normal(4, 4)).clone()])
case("unfold gradient", lambda m: gradients(lambda x: x.unfold(0, 3, 2), m.normal(9)), (torch.float32,))

case("arange", lambda m: [torch.arange(7, device=m.device), torch.arange(1, 2, 0.25, device=m.device), torch.arange(9, 1, -3, device=m.device), torch.arange(5, dtype=m.dtype, device=m.device)])
case("fills", lambda m: [torch.zeros(3, dtype=m.dtype, device=m.device), torch.ones(3, dtype=m.dtype, device=m.device), torch.full((2, 3), 1.5, dtype=m.dtype, device=m.device), torch.eye(3, 4, device=m.device), torch.linspace(0, 1, 5, device=m.device), inplace(m.normal(3), "fill_", 2), inplace(m.normal(3), "zero_"), torch.ones_like(m.normal(2)), torch.full((2,), math.inf, device=m.device)])
case("one_hot", lambda m: F.one_hot(m.integers(5, 4), 5), (torch.float32,))

case("sort", lambda m: [*m.normal(4, 9).sort(1), *m.normal(9).sort(descending=True), m.normal(9).argsort(), *torch.sort(m.integers(5, 12), stable=True)], (torch.float32,))
case("topk", lambda m: [*m.normal(4, 9).topk(3), *m.normal(9).topk(2, largest=False)], (torch.float32,))
case("unique", lambda m: [m.integers(5, 12).unique(), *m.integers(5, 12).unique(return_inverse=True, return_counts=True), *torch.unique_consecutive(m.values([1, 1, 2, 2, 1]), return_counts=True)], (torch.float32,))
case("searchsorted", lambda m: [torch.searchsorted(m.values([1.0, 3.0, 5.0]), m.values([0.5, 3.0, 9.0])), torch.bucketize(m.values([0.5, 3.0]), m.values([1.0, 3.0]), right=True)], (torch.float32,))
case("histc bincount", lambda m: [torch.histc(m.values([1.0, 2.0, 1.0]), 4, 0, 3), torch.bincount(m.values([0, 1, 3, 1]))], (torch.float32,))
case("isin", lambda m: torch.isin(m.values([1, 2, 3]), 2), (torch.float32,))

for name in "abs neg sqrt exp reciprocal sigmoid sin cos tanh log".split():
    case(f"foreach {name}", lambda m, name=name: getattr(torch, f"_foreach_{name}")([m.positive(3), m.positive(2, 4)]))
for name in "add sub mul div".split():
    case(f"foreach {name}", lambda m, name=name: [
        *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], [m.positive(3), m.positive(2, 4)]),
        *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], 2.5),
        *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], [2.5, 0.5]),
    ])


def foreach_inplace(m: Maker) -> list[torch.Tensor]:
    a = [m.normal(3), m.normal(2, 4)]
    b = [m.positive(3), m.positive(2, 4)]
    torch._foreach_add_(a, b, alpha=0.5)
    torch._foreach_mul_(a, 1.25)
    torch._foreach_lerp_(a, b, 0.25)
    torch._foreach_addcmul_(a, a, b, value=0.5)
    torch._foreach_addcdiv_(a, a, b, value=-0.5)
    torch._foreach_sub_(a, 0.25)
    torch._foreach_div_(a, [2.0, 4.0])
    torch._foreach_maximum_(a, 0.0)
    return a


case("foreach in place", foreach_inplace)
case("foreach norm", lambda m: torch._foreach_norm([m.normal(30), m.normal(2, 4)]))
case("foreach pow", lambda m: torch._foreach_pow([m.positive(3), m.positive(2)], 1.5))
case("foreach round", lambda m: [t for f in ("ceil", "floor", "round", "trunc", "frac") for t in getattr(torch, f"_foreach_{f}")([m.normal(9) * 3])])


def foreach_copy(m: Maker) -> list[torch.Tensor]:
    target = [torch.zeros(3, dtype=m.dtype, device=m.device), torch.zeros(2, 4, dtype=torch.float32, device=m.device)]
    torch._foreach_copy_(target, [m.normal(3), m.normal(2, 4)])
    return target


case("foreach copy", foreach_copy)


def attention(m: Maker) -> list[torch.Tensor]:
    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        return F.softmax(scores.masked_fill(mask, -math.inf), -1) @ v

    return gradients(plain, m.normal(2, 3, 5, 8), m.normal(2, 3, 5, 8), m.normal(2, 3, 5, 8))


case("plain attention", attention)


def grad_scaler(m: Maker) -> list[torch.Tensor]:
    grads = [m.normal(3), m.normal(2, 2)]
    found = m.values([0.0])
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, m.values([0.5]))
    bad = [m.values([math.inf, 1.0])]
    torch._amp_foreach_non_finite_check_and_unscale_(bad, found, m.values([0.5]))
    scale, growth = m.values([8.0]), m.values([3], torch.int32)
    torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 4)
    return [*grads, found, scale, growth]


case("grad scaler", grad_scaler, (torch.float32,))


def optimizer(kind: str) -> Case:
    def steps(m: Maker) -> list[torch.Tensor]:
        name, _, way = kind.partition(" ")
        parameters = [torch.nn.Parameter(m.normal(5, 3)), torch.nn.Parameter(m.normal(7))]
        named = {"foreach": way == "foreach", "fused": way == "fused"} if way else {}
        made = getattr(torch.optim, name)(parameters, lr=0.05, weight_decay=0.1, **named)
        for _ in range(3):
            for p in parameters:
                p.grad = m.normal(*p.shape)
            made.step()
        return [p.detach() for p in parameters]

    return steps


for kind in ("AdamW", "AdamW foreach", "AdamW fused", "AdamW for", "Adam foreach", "SGD", "SGD foreach"):
    case(f"optimizer {kind}", optimizer(kind), (torch.float32,))


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def compare(name: str, dtype: torch.dtype, function: Case) -> str | None:
    expected = flat(function(Maker("cpu", dtype)))
    try:
        got = flat(function(Maker("npu", dtype)))
        got = [t.cpu() for t in got]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {tuple(a.shape)} {a.dtype}, on the CPU {tuple(b.shape)} {b.dtype}"
        # Halves: the CPU rounds in places where a card, and the simulated one, keeps fp32.
        tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 2e-5)
        a, b = (t.to(torch.float64) if not t.is_complex() else t for t in (a, b))
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"result {i}: differs by {(a - b).abs().max().item():.3g}"
    return None


def main() -> int:
    assert torch_npu.npu.is_available()
    selected = sys.argv[1:]
    failures = 0
    compared = 0
    for name, (function, dtypes) in CASES.items():
        if selected and name not in selected:
            continue
        for dtype in dtypes:
            compared += 1
            problem = compare(name, dtype, function)
            if problem is not None:
                failures += 1
                print(f"{name} ({dtype}): {problem}", flush=True)
    print(f"{compared} compared, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
