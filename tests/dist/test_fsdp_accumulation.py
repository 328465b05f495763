"""Gradient accumulation: reduced in every micro-batch, kept unreduced, and mixtures."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from twin import SmallModel, Twin, next_token_loss, part_of, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy


@pytest.mark.parametrize("cap", [None, 0.0005])
@on_ranks(1, 2, 3, 4)
def test_two_micro_batches_reduced_each(cap: float | None) -> None:
    """(a0 + a1 + …) / N + (b0 + b1 + …) / N, bit for bit."""
    twin = Twin(SmallModel, bucket_cap_mb=cap)
    for step in range(2):
        twin.model.zero_grad()
        for micro in (2 * step, 2 * step + 1):
            next_token_loss(twin.model, tokens_for(micro, twin.rank)).backward()
        twin.plain_backward([2 * step, 2 * step + 1])
        twin.check_gradients()


# Micro-batches of a step: "n" inside no_sync, "s" reduced.
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("pattern", ["nns", "snsns"])
@on_ranks(1, 2, 3)
def test_no_sync_equals_the_sum(pattern: str, communicator: str) -> None:
    """Unreduced gradients are added per rank, then averaged: ((a0 + b0) + (a1 + b1) + …) / N; reduced ones are added
    to that.
    """
    twin = Twin(SmallModel, communicator=communicator)
    for step in range(2):
        twin.model.zero_grad()
        total = {name: torch.zeros_like(p) for name, p in twin.plain.named_parameters()}
        held = [{name: torch.zeros_like(p) for name, p in twin.plain.named_parameters()} for _ in range(twin.size)]
        for i, kind in enumerate(pattern):
            micro = 10 * step + i
            with twin.model.no_sync() if kind == "n" else nullcontext():
                next_token_loss(twin.model, tokens_for(micro, twin.rank)).backward()
            for rank in range(twin.size):
                twin.plain.zero_grad()
                next_token_loss(twin.plain, tokens_for(micro, rank)).backward()
                for name, p in twin.plain.named_parameters():
                    held[rank][name] += p.grad
            if kind == "s":
                for name, value in total.items():
                    value += sum(h[name] for h in held) / twin.size
                    for h in held:
                        h[name].zero_()
        for name, p in twin.plain.named_parameters():
            p.grad = total[name]
        twin.check_gradients()


@on_ranks(2)
def test_gradients_appear_only_after_the_reduction() -> None:
    twin = Twin(SmallModel)
    before = twin.counters.rounds
    with twin.model.no_sync():
        next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    assert all(p.grad is None for p in twin.model.parameters())
    next_token_loss(twin.model, tokens_for(1, twin.rank)).backward()
    assert all(p.grad is not None for p in twin.model.parameters())
    assert twin.counters.rounds == before + 2


@on_ranks(2, 3)
def test_no_sync_with_parameters_that_the_last_micro_batch_does_not_use() -> None:
    """What was held back is reduced although no gradient of the block arrives in the reducing backward."""

    def run(model: SmallModel, tokens: torch.Tensor, skip: bool) -> torch.Tensor:
        x = model.embed(tokens)
        for i, layer in enumerate(model.layers):
            x = x if skip and i == 1 else layer(x)
        return torch.nn.functional.cross_entropy(model.head(x).flatten(0, 1), tokens.flatten())

    class Skipping(SmallModel):
        def forward(self, tokens: torch.Tensor, skip: bool = False) -> torch.Tensor:
            return run(self, tokens, skip)

    twin = Twin(Skipping)
    with twin.model.no_sync():
        twin.model(tokens_for(0, twin.rank)).backward()
    twin.model(tokens_for(1, twin.rank), True).backward()
    total = {name: torch.zeros_like(p) for name, p in twin.plain.named_parameters()}
    for rank in range(twin.size):
        twin.plain.zero_grad()
        twin.plain(tokens_for(0, rank)).backward()
        twin.plain(tokens_for(1, rank), True).backward()
        for name, p in twin.plain.named_parameters():
            total[name] += p.grad
    for name, p in twin.plain.named_parameters():
        p.grad = total[name] / twin.size
    twin.check_gradients()


@on_ranks(2, 3)
def test_no_sync_accumulates_in_float32() -> None:
    """bfloat16 gradients of three micro-batches are held back in float32, whatever travels.

    A running bfloat16 sum would round in every micro-batch; here the sum is rounded for the wire and then joins the
    last gradient there: two roundings of 2^-9 relative to the magnitudes, bounded by 2^-7 of them.
    """
    torch.manual_seed(0)
    plain = SmallModel().bfloat16()
    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(SmallModel(), mixed_precision=policy)
    rank, size = dist.get_rank(), dist.get_world_size()
    for micro in range(4):
        with model.no_sync() if micro < 3 else nullcontext():
            next_token_loss(model, tokens_for(micro, rank)).backward()
    total = {name: torch.zeros(p.shape, dtype=torch.float32) for name, p in plain.named_parameters()}
    for other in range(size):
        mine = {name: torch.zeros(p.shape, dtype=torch.float32) for name, p in plain.named_parameters()}
        for micro in range(4):
            plain.zero_grad()
            next_token_loss(plain, tokens_for(micro, other)).backward()
            for name, p in plain.named_parameters():
                mine[name] += p.grad.float()
        for name, value in mine.items():
            total[name] += value.abs()
            mine[name] = value
        for name in mine:
            total[name + "/sum"] = total.get(name + "/sum", 0) + mine[name]
    for param in model._fsdp_state.params:
        want = part_of(param, total[param.name + "/sum"] / size)
        bound = part_of(param, total[param.name] / size) * 2**-7 + 1e-6
        assert ((param.sharded.grad - want).abs() <= bound).all(), param.name


@on_ranks(2)
def test_no_sync_ends_with_an_exception_inside() -> None:
    twin = Twin(SmallModel)
    with pytest.raises(KeyError), twin.model.no_sync():
        raise KeyError("inside")
    twin.train(2)
