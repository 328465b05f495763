"""bfloat16 on the wire, float32 sums, float32 masters."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from twin import DIM, VOCAB, SmallModel, next_token_loss, part_of, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy

BF16_SUM_F32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def rank_gradients(plain: nn.Module, step: int, size: int) -> list[dict[str, torch.Tensor]]:
    """Each rank's own bfloat16 gradients, computed in this process."""
    found = []
    for rank in range(size):
        plain.zero_grad()
        next_token_loss(plain, tokens_for(step, rank)).backward()
        found.append({name: p.grad.clone() for name, p in plain.named_parameters()})
    return found


def pair(policy: MixedPrecisionPolicy, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    plain = SmallModel().to(policy.param_dtype)
    torch.manual_seed(0)
    return FSDP(SmallModel(), mixed_precision=policy, **options), plain


@pytest.mark.parametrize(("cap", "communicator"), [(None, "auto"), (0.0005, "auto"), (None, "c10d")])
@on_ranks(1, 2, 3, 4)
def test_bfloat16_gradients_are_summed_in_float32(cap: float | None, communicator: str) -> None:
    """Bit for bit (float(g0) + float(g1) + …) / N of the ranks' bfloat16 gradients.

    Against the exact sum in float64, that is within N * 2^-24 of the sum of magnitudes, 2^16 times finer than bfloat16.
    """
    model, plain = pair(BF16_SUM_F32, bucket_cap_mb=cap, communicator=communicator)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(0)
    float_model = SmallModel()
    float_optimizer = torch.optim.AdamW(float_model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(model, tokens_for(step, rank)).backward()
        gradients = rank_gradients(plain, step, size)
        averages = {}
        for name, p in float_model.named_parameters():
            total = gradients[0][name].float()
            for other in gradients[1:]:
                total = total + other[name].float()
            averages[name] = p.grad = total / size
        for param in model._fsdp_state.params:
            got, want = param.sharded.grad, part_of(param, averages[param.name])
            assert got.dtype == torch.float32 and param.sharded.dtype == torch.float32
            assert torch.equal(got, want), (param.name, (got - want).abs().max())
            exact = sum(g[param.name].double() for g in gradients) / size
            magnitudes = sum(g[param.name].double().abs() for g in gradients) / size
            error = (got.double() - part_of(param, exact)).abs()
            assert (error <= size * 2**-24 * part_of(param, magnitudes) + 1e-30).all(), param.name
        optimizer.step()
        float_optimizer.step()
        with torch.no_grad():
            for (_, p), (_, q) in zip(plain.named_parameters(), float_model.named_parameters(), strict=True):
                p.copy_(q)  # float32 master, rounded to bfloat16 for compute
        for param in model._fsdp_state.params:
            assert torch.equal(param.sharded.detach(), part_of(param, dict(float_model.named_parameters())[param.name]))


@on_ranks(2, 3)
def test_reduce_dtype_bfloat16_rounds_the_sum_once() -> None:
    """The default reduce_dtype is param_dtype: the sum is rounded to it once; the gradient has the master dtype."""
    model, plain = pair(MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    size = dist.get_world_size()
    next_token_loss(model, tokens_for(0, dist.get_rank())).backward()
    gradients = rank_gradients(plain, 0, size)
    for param in model._fsdp_state.params:
        want = (sum(g[param.name].float() for g in gradients) / size).bfloat16().float()
        assert torch.equal(param.sharded.grad, part_of(param, want)), param.name


@on_ranks(2)
def test_float32_parameters_with_bfloat16_reduction() -> None:
    """Gradients are rounded to bfloat16 for the wire, and their sum is rounded to it: twice 2^-9 of the magnitudes."""
    model, plain = pair(MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.bfloat16))
    next_token_loss(model, tokens_for(0, dist.get_rank())).backward()
    gradients = rank_gradients(plain, 0, 2)
    for param in model._fsdp_state.params:
        want = (sum(g[param.name].bfloat16().float() for g in gradients) / 2).bfloat16().float()
        assert torch.equal(param.sharded.grad, part_of(param, want)), param.name


class Inspect(nn.Module):
    """Notes the dtypes that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("offset", torch.linspace(0, 1, DIM) / 3)
        self.register_buffer("count", torch.arange(DIM))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.seen = {
            "input": x.dtype,
            "ids": ids.dtype,
            "weight": self.linear.weight.dtype,
            "buffer": self.offset.dtype,
        }
        return self.linear(x.to(self.linear.weight.dtype)).float() + self.offset.float() + self.count


class InspectModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Inspect()])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x, ids)


@pytest.mark.parametrize("cast", [True, False])
@on_ranks(2)
def test_dtypes_of_inputs_outputs_and_buffers(cast: bool) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, buffer_dtype=torch.float16, output_dtype=torch.float64, cast_forward_inputs=cast
    )
    original = InspectModel().state_dict()
    model = FSDP(InspectModel(), mixed_precision=policy)
    inner = model.layers[0]
    output = model(torch.ones(3, DIM), torch.arange(3))
    assert output.dtype == torch.float64
    assert inner.seen == {
        "input": torch.bfloat16 if cast else torch.float32,
        "ids": torch.int64,
        "weight": torch.bfloat16,
        "buffer": torch.float16,
    }
    assert inner.count.dtype == torch.int64
    state = model.state_dict()
    assert {key: value.dtype for key, value in state.items()} == {key: value.dtype for key, value in original.items()}
    # float16 holds 11 bits, so a buffer in [0, 1/3] moved by at most 2^-13.
    assert (state["layers.0.offset"] - original["layers.0.offset"]).abs().max() <= 2**-13
    output.sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    model.load_state_dict(original)
    assert inner.offset.dtype == torch.float16 and torch.equal(inner.offset, original["layers.0.offset"].half())


@on_ranks(2)
def test_integer_parameters_and_embeddings_keep_their_dtype() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(VOCAB).flip(0), requires_grad=False)
            self.embed = nn.Embedding(VOCAB, DIM)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            assert self.table.dtype == torch.int64 and self.embed.weight.dtype == torch.bfloat16
            return self.embed(self.table[tokens])

    torch.manual_seed(0)
    plain = Lookup()
    torch.manual_seed(0)
    model = FSDP(Lookup(), mixed_precision=BF16_SUM_F32)
    got = model(tokens_for(0, 0))
    assert torch.equal(got, F.embedding(plain.table[tokens_for(0, 0)], plain.embed.weight.bfloat16()))


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("policy", [BF16_SUM_F32, MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
@on_ranks(1, 2, 3)
def test_accumulated_gradients_have_the_master_dtype(policy: MixedPrecisionPolicy, no_sync: bool) -> None:
    """Two micro-batches, then an update by each kind of optimizer, twice: no dtype mismatch anywhere.

    Reduced apart, a gradient is the float32 sum of the two averages. Kept unreduced, each rank adds its own two up
    first and rounds the sum to bfloat16 for the wire: 2^-8 of the magnitudes, and another 2^-8 where the sum over ranks
    is rounded too.
    """
    model, plain = pair(policy)
    rank, size = dist.get_rank(), dist.get_world_size()
    for foreach in (True, False):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, foreach=foreach)
        optimizer.zero_grad()
        with model.no_sync() if no_sync else contextlib.nullcontext():
            next_token_loss(model, tokens_for(0, rank)).backward()
        next_token_loss(model, tokens_for(1, rank)).backward()
        micro = [rank_gradients(plain, step, size) for step in (0, 1)]
        for param in model._fsdp_state.params:
            got = param.sharded.grad
            assert got.dtype == param.sharded.dtype == torch.float32
            exact = sum(g[param.name].double() for gradients in micro for g in gradients) / size
            magnitude = sum(g[param.name].double().abs() for gradients in micro for g in gradients) / size
            error = (got.detach().double() - part_of(param, exact)).abs()
            allowed = 2**-7 if no_sync or policy.reduce_dtype is None else size * 2**-23
            assert (error <= allowed * part_of(param, magnitude) + 1e-30).all(), param.name
        optimizer.step()
        assert all(s["momentum_buffer"].dtype == torch.float32 for s in optimizer.state.values())
