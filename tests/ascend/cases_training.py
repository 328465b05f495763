"""Cases: what training uses: losses, norms, lists of tensors, optimizers, fused operators."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import torch_npu
from operator_maker import Case, Maker, case, gradients, words

case("softmax", lambda m: gradients(lambda x: F.softmax(x, -1), m.normal(4, 9)))
case("softmax in fp32", lambda m: F.softmax(m.normal(4, 9), -1, dtype=torch.float32))
case("log_softmax", lambda m: gradients(lambda x: F.log_softmax(x, 1), m.normal(4, 9)))
case(
    "cross_entropy",
    lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6)), m.normal(6, 9)),
    (torch.float32,),
)
case(
    "cross_entropy in fp32", lambda m: gradients(lambda x: F.cross_entropy(x.float(), m.integers(9, 6)), m.normal(6, 9))
)
case(
    "cross_entropy ignoring",
    lambda m: gradients(lambda x: F.cross_entropy(x, m.values([1, -100, 2, 8, -100, 0])), m.normal(6, 9)),
    (torch.float32,),
)
case(
    "cross_entropy sum",
    lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), reduction="sum"), m.normal(6, 9)),
    (torch.float32,),
)
case(
    "cross_entropy none",
    lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), reduction="none"), m.normal(6, 9)),
    (torch.float32,),
)
case(
    "cross_entropy smoothed",
    lambda m: gradients(lambda x: F.cross_entropy(x, m.integers(9, 6), label_smoothing=0.1), m.normal(6, 9)),
    (torch.float32,),
)
case("mse_loss", lambda m: gradients(F.mse_loss, m.normal(4, 5), m.normal(4, 5)))
case("l1_loss", lambda m: gradients(F.l1_loss, m.normal(4, 5), m.normal(4, 5)))
case("smooth_l1_loss", lambda m: gradients(lambda a, b: F.smooth_l1_loss(a, b), m.normal(4, 5), m.normal(4, 5)))
case(
    "bce_with_logits",
    lambda m: gradients(lambda a: F.binary_cross_entropy_with_logits(a, m.booleans(4, 5).to(m.dtype)), m.normal(4, 5)),
)
case(
    "kl_div",
    lambda m: gradients(lambda a: F.kl_div(a, F.softmax(m.normal(4, 5), 1), reduction="batchmean"), m.normal(4, 5)),
)

case(
    "layer_norm",
    lambda m: gradients(lambda x, w, b: F.layer_norm(x, (9,), w, b), m.normal(3, 4, 9), m.positive(9), m.normal(9)),
)
case("layer_norm without weights", lambda m: gradients(lambda x: F.layer_norm(x, (9,)), m.normal(3, 4, 9)))
case("rms_norm", lambda m: gradients(lambda x, w: F.rms_norm(x, (9,), w, 1e-5), m.normal(3, 4, 9), m.positive(9)))
case(
    "group_norm",
    lambda m: gradients(lambda x, w, b: F.group_norm(x, 2, w, b), m.normal(3, 4, 5), m.positive(4), m.normal(4)),
    (torch.float32,),
)
case(
    "batch_norm",
    lambda m: F.batch_norm(m.normal(8, 4), m.values([0.0] * 4), m.values([1.0] * 4), m.positive(4), m.normal(4), True),
    (torch.float32,),
)

for name in words("abs neg sqrt exp reciprocal sigmoid sin cos tanh log"):
    case(f"foreach {name}", lambda m, name=name: getattr(torch, f"_foreach_{name}")([m.positive(3), m.positive(2, 4)]))
for name in words("add sub mul div"):
    case(
        f"foreach {name}",
        lambda m, name=name: [
            *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], [m.positive(3), m.positive(2, 4)]),
            *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], 2.5),
            *getattr(torch, f"_foreach_{name}")([m.normal(3), m.normal(2, 4)], [2.5, 0.5]),
        ],
    )


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
case(
    "foreach round",
    lambda m: [
        t
        for f in ("ceil", "floor", "round", "trunc", "frac")
        for t in getattr(torch, f"_foreach_{f}")([m.normal(9) * 3])
    ],
)


def foreach_copy(m: Maker) -> list[torch.Tensor]:
    target = [torch.zeros(3, dtype=m.dtype, device=m.device), torch.zeros(2, 4, dtype=torch.float32, device=m.device)]
    torch._foreach_copy_(target, [m.normal(3), m.normal(2, 4)])
    return target


case("foreach copy", foreach_copy)


def grouped_mm(m: Maker) -> torch.Tensor:
    ends = m.values([3, 8], torch.int32)
    return F.grouped_mm(m.normal(8, 16), m.normal(2, 16, 8), offs=ends)


case("grouped_mm", grouped_mm, (torch.bfloat16,))


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


# Operators that only torch_npu has: on the CPU, what they are documented to compute.


def rms_norm_fused(m: Maker) -> list[torch.Tensor]:
    def compute(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        if m.device == "npu":
            return torch_npu.npu_rms_norm(x, gamma, epsilon=1e-5)[0]
        return F.rms_norm(x.float(), gamma.shape, gamma.float(), 1e-5).to(x.dtype)

    result, dx, dgamma = gradients(compute, m.normal(3, 4, 9), m.positive(9))
    return [result, dx, dgamma.float()]


def swiglu_fused(m: Maker) -> list[torch.Tensor]:
    def compute(x: torch.Tensor) -> torch.Tensor:
        if m.device == "npu":
            return torch_npu.npu_swiglu(x, dim=-1)
        gate, up = x.float().chunk(2, -1)
        return (F.silu(gate) * up).to(x.dtype)

    return gradients(compute, m.normal(3, 4, 10))


def rotary_fused(mode: str) -> Case:
    def turned(x: torch.Tensor) -> torch.Tensor:
        if mode == "half":
            a, b = x.chunk(2, -1)
            return torch.cat([-b, a], -1)
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)

    def whole(m: Maker) -> list[torch.Tensor]:
        def compute(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            if m.device == "npu":
                return torch_npu.npu_rotary_mul(x, cos, sin, mode)
            return (x.float() * cos.float() + turned(x.float()) * sin.float()).to(x.dtype)

        x, cos, sin = m.normal(2, 6, 3, 64), m.unit(1, 6, 1, 64), m.unit(1, 6, 1, 64)
        if mode != "half":
            return [compute(x, cos, sin)]
        result, dx, *_ = gradients(compute, x, cos, sin)
        return [result, dx]

    return whole


def experts_fused(m: Maker) -> list[torch.Tensor]:
    """Tokens to experts, through a matrix for each expert, and back, weighted."""
    tokens, copies, experts, width = 7, 2, 4, 6
    x, w = m.normal(tokens, width), m.normal(experts, width, 5)
    chosen = torch.rand(tokens, experts, generator=m.generator).argsort(1)[:, :copies]
    weights = m.positive(tokens, copies)
    if m.device == "cpu":
        each = torch.einsum("th,tkho->tko", x.float(), w.float()[chosen]).to(x.dtype)
        return [(each.float() * weights.float().unsqueeze(2)).sum(1).to(x.dtype)]
    ends = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0)
    sorted_x, place = torch_npu.npu_moe_token_permute(x, chosen.int().npu())
    (product,) = torch_npu.npu_grouped_matmul(
        [sorted_x], [w], group_list=ends.npu(), split_item=3, group_type=0, group_list_type=0
    )
    return [torch_npu.npu_moe_token_unpermute(product, place, weights)]


def permute_gradient(m: Maker) -> list[torch.Tensor]:
    chosen = torch.tensor([[1, 0], [2, 1], [0, 2]])

    def compute(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if m.device == "cpu":
            return (x * 2).unsqueeze(1).mul(weights.unsqueeze(2)).sum(1)
        sorted_x, place = torch_npu.npu_moe_token_permute(x, chosen.int().npu())
        return torch_npu.npu_moe_token_unpermute(sorted_x * 2, place, weights)

    return gradients(compute, m.normal(3, 4), m.positive(3, 2))


def routing(m: Maker) -> list[torch.Tensor]:
    x = m.normal(5, 8)
    if m.device == "cpu":
        values, experts = F.softmax(x.float(), -1).topk(2)
        return [values.to(x.dtype), experts.int()]
    values, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(x, None, 2)
    return [values, experts]


case("npu_rms_norm", rms_norm_fused)
case("npu_swiglu", swiglu_fused)
case("npu_rotary_mul half", rotary_fused("half"))
case("npu_rotary_mul interleave", rotary_fused("interleave"))
case("experts", experts_fused)
case("experts gradient", permute_gradient, (torch.float32,))
case("npu_moe_gating_top_k_softmax", routing, (torch.float32,))
