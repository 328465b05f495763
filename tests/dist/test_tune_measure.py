"""Measuring variants in turns: what is counted agrees with the plan, and a variant's memory goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import on_ranks
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, plan_model
from torchtitan_npu.planning.fabric import measure_fabric
from torchtitan_npu.planning.traffic import planned_traffic
from torchtitan_npu.planning.tune_measure import measure_in_turns


class Trial:
    """Steps of one or more micro-batches."""

    def __init__(self, rank: int, micro_batches: int = 1, **options: Any) -> None:
        self.model: Any = FSDP(SmallModel(), **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.micro_batches = micro_batches
        self.rank = rank

    def step(self) -> None:
        for number in range(self.micro_batches):
            next_token_loss(self.model, tokens_for(number, self.rank)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def arena_mappings() -> int:
    """Mappings of shared arenas in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:torchtitan_npu")


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(1, 2, 3)
def test_counted_bytes_are_the_plans(communicator: str) -> None:
    """Caps, prefetch, no resharding, micro-batches; and no arena stays mapped between or after the turns."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    before = arena_mappings()
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "small": {"bucket_cap_mb": 0.002},
        "merged": {"bucket_cap_mb": 1.0},
        "kept": {"reshard_after_forward": False, "prefetch": 2},
        "three": {"bucket_cap_mb": 0.002, "prefetch": 0},
    }
    micro_batches = {"three": 3}

    def make(name: str) -> Trial:
        assert arena_mappings() == before
        return Trial(rank, micro_batches.get(name, 1), communicator=communicator, **options[name])

    results = measure_in_turns({name: (lambda name=name: make(name)) for name in options}, steps=1)
    assert arena_mappings() == before
    for name, result in results.items():
        plan = plan_model(SmallModel(), size, **options[name])
        assert result.written_bytes == planned_traffic(plan, micro_batches.get(name, 1)).written_bytes, name
        assert [len(turn) for turn in result.steps] == [len(turn) for turn in result.waits] == [1]
        assert result.exposed_seconds is not None and 0 <= result.exposed_seconds <= max(map(max, result.steps))


@on_ranks(2)
def test_five_rounds_share_the_steps() -> None:
    """12 steps: 3, 3, 2, 2, 2. A model without our engine has no waits."""

    class Plain:
        def __init__(self) -> None:
            self.model = torch.nn.Linear(2, 2)

        def step(self) -> None:
            self.model(torch.ones(1, 2)).sum().backward()

    rank = torch.distributed.get_rank()
    results = measure_in_turns({"ours": lambda: Trial(rank), "plain": Plain}, steps=12)
    assert [len(turn) for turn in results["ours"].steps] == [len(turn) for turn in results["plain"].steps]
    assert [len(turn) for turn in results["ours"].steps] == [3, 3, 2, 2, 2]
    assert results["plain"].exposed_seconds is None and results["plain"].written_bytes == 0
    assert len(results["plain"].ratios_to(results["ours"])) == 5


@on_ranks(2)
def test_a_model_that_is_kept_is_told() -> None:
    kept = []

    def make() -> Trial:
        kept.append(Trial(torch.distributed.get_rank()))
        return kept[-1]

    with pytest.raises(RuntimeError, match="the model of 'kept' is still referenced after its turn"):
        measure_in_turns({"kept": make}, steps=1)


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(2, 3)
def test_fabric_is_measured_through_the_engine(communicator: str) -> None:
    """Sizes are the planned buffers' (padding included), times positive, all ranks agree on the fit."""
    before = arena_mappings()
    sizes = [64 << 10, 256 << 10]
    fabric = measure_fabric(sizes, turns=2, communicator=communicator)
    world_size = torch.distributed.get_world_size()
    for line in (fabric.gather, fabric.reduce):
        assert line.world_size == world_size
        assert all(size <= planned <= 1.02 * size + 1024 * world_size for size, planned in zip(sizes, line.sizes, strict=True))
        assert min(line.seconds) > 0 and line.alpha_seconds >= 0 and line.bytes_per_second > 0
    everyone: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(everyone, (fabric.gather.seconds, fabric.reduce.seconds))
    assert all(other == everyone[0] for other in everyone)
    assert arena_mappings() == before
