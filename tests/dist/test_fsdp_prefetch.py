"""Units gathered ahead of use: the same numbers at any depth, in the memory that was planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import on_ranks
from test_fsdp_use import AnyOrder, Twice
from torch import nn
from twin import SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import plan_model

DEEP = 6


def deep_model() -> SmallModel:
    return SmallModel(layers=DEEP)


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@on_ranks(1, 2, 3, 4)
def test_numbers_and_memory_do_not_depend_on_it(prefetch: int, communicator: str) -> None:
    """Ahead in every step after the first: all gathers but the root's in forward, all but the kept block's in backward.

    Gathers of a step: root and 6 blocks, then 5 blocks, as the last block stays from forward to backward.
    """
    twin = Twin(deep_model, prefetch=prefetch, communicator=communicator)
    twin.train(2)
    before = twin.counters
    twin.model.zero_grad()
    twin.backward(2)
    twin.check_gradients()
    after = twin.counters
    assert after.gathers - before.gathers == 1 + DEEP + DEEP - 1
    assert after.prefetches - before.prefetches == (2 * DEEP - 1 if prefetch else 0)
    assert (after.overflow_places, after.order_misses) == (0, 0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_unit_ahead_takes_one_more_place(world_size: int) -> None:
    """Beside the root's memory there are 1 + prefetch places of a block, but never more than there are blocks."""
    plans = [plan_model(deep_model(), world_size, prefetch=prefetch) for prefetch in (0, 1, 2, 5, 8)]
    assert [plan.prefetch for plan in plans] == [0, 1, 2, 5, 8]
    place = plans[1].gather_bytes - plans[0].gather_bytes
    block = plans[0].units[1].gathered_bytes
    assert block <= place <= block + plans[0].world_size * 4096
    grown = [plan.gather_bytes - plans[0].gather_bytes for plan in plans]
    assert grown == [0, place, 2 * place, (DEEP - 1) * place, (DEEP - 1) * place]
    assert len({(plan.native.hash(), plan.reduce_bytes) for plan in plans}) == 1
    assert "prefetch 2, " in plans[2].describe()


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("make", [Twice, AnyOrder])
@on_ranks(2, 3)
def test_repeated_and_skipped_units(make: Any, prefetch: int) -> None:
    """What was gathered ahead in vain makes room; the numbers stay."""
    orders = [[0, 1, 2], [2, 0, 1], [1], [0, 0, 2], []]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if isinstance(batch, tuple):
            return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch[0].flatten())
        return next_token_loss(model, batch)

    def batches(step: int, rank: int) -> Any:
        tokens = tokens_for(step, rank)
        return tokens if make is Twice else (tokens, orders[step])

    Twin(make, loss, batches, prefetch=prefetch).train(len(orders))


@pytest.mark.parametrize("prefetch", [0, 2])
@on_ranks(2)
def test_accumulation_and_evaluation(prefetch: int) -> None:
    """Two micro-batches, a forward without gradients between them."""
    twin = Twin(deep_model, prefetch=prefetch, bucket_cap_mb=0.001)
    next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    with torch.no_grad():
        twin.model(tokens_for(5, twin.rank))
    next_token_loss(twin.model, tokens_for(1, twin.rank)).backward()
    twin.plain_backward([0, 1])
    twin.check_gradients()
    assert twin.counters.overflow_places == 0
