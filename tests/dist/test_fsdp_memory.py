"""Memory and communication, by the engine's own counters."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, on_ranks
from torch import nn
from twin import VOCAB, SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy, plan_model
from torchtitan_npu.planning.traffic import planned_traffic

WIDE = 68  # DIM's blocks are so small that padding would be most of them
BLOCK = 2 * WIDE + 3 * WIDE * WIDE + 3 * WIDE + 3 * WIDE * WIDE
NUMEL = 2 * VOCAB * WIDE + VOCAB + 3 * BLOCK
# The plan may spend this much, summed over ranks, to keep rows whole in a small bucket.
PADDING = 4096 // 4


def wide_model() -> SmallModel:
    return SmallModel(dim=WIDE)


@on_ranks(1, 2, 3, 4)
def test_parameters_gradients_and_optimizer_state_divide_by_n() -> None:
    """Summed over ranks they are those of one process; no rank has more than 1/N of the four padded buckets."""
    twin = Twin(wide_model)
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    twin.backward(0)
    optimizer.step()
    mine = [
        sum(p.numel() for p in twin.model.parameters()),
        sum(p.grad.numel() for p in twin.model.parameters()),
        sum(s["exp_avg"].numel() for s in optimizer.state.values()),
    ]
    everyone: list[list[int]] = [[] for _ in range(twin.size)]
    dist.all_gather_object(everyone, mine)
    for kind in range(3):
        assert sum(counts[kind] for counts in everyone) == NUMEL
        assert max(counts[kind] for counts in everyone) <= (NUMEL + 4 * PADDING) / twin.size


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2, 3)
def test_gathers_per_step(reshard: bool) -> None:
    """At most forward and backward for each unit; each rank writes 1/N of what is gathered, plus padding."""
    twin = Twin(wide_model, reshard_after_forward=reshard)
    for step in range(3):
        before = twin.counters
        twin.backward(step)
        after = twin.counters
        # The last block of a forward stays for its backward, once it is known which one is the last.
        gathers = 4 if not reshard else 7 if step == 0 else 6
        assert after.gathers - before.gathers == gathers
        assert after.rounds - before.rounds == 1
        gathered = NUMEL + (gathers - 4) * BLOCK
        written = (after.bytes_written - before.bytes_written) / 4
        assert gathered / twin.size <= written <= (gathered + gathers * PADDING) / twin.size


@on_ranks(2)
def test_units_are_gathered_ahead_from_the_second_step_on() -> None:
    """Forward root, 0, 1, 2; backward root, 2, 1, 0, where root and 2 stayed.

    Once the order is known, every gather but the first of a step is early: 3 + 2 of 6.
    """
    twin = Twin(SmallModel)
    twin.backward(0)
    before = twin.counters
    twin.backward(1)
    after = twin.counters
    assert after.prefetches - before.prefetches == 5
    assert after.order_misses == 0


class Addresses(SmallModel):
    """Notes where its weights are."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen: list[int] = []
        x = self.embed(tokens)
        for layer in self.layers:
            layer.up.register_forward_pre_hook(lambda m, a: self.seen.append(m.weight.data_ptr()))
            x = layer(x)
            layer.up._forward_pre_hooks.clear()
        return self.head(x)


@on_ranks(1, 2, 3)
def test_addresses_repeat_from_the_second_step_on() -> None:
    """Blocks rotate over two places, one being used and one gathered ahead."""
    twin = Twin(Addresses)
    seen = []
    for step in range(5):
        twin.backward(step)
        seen.append(list(twin.model.seen))
    assert len(seen[0]) == 3 and len(set(seen[1])) == 2
    assert seen[1] == seen[2] == seen[3] == seen[4]
    assert twin.counters.overflow_places == 0


@on_ranks(2, 3)
def test_plan_is_that_of_the_dry_run() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        planned = plan_model(wide_model(), dist.get_world_size(), mixed_precision=policy, bucket_cap_mb=0.01)
    model = FSDP(wide_model(), mixed_precision=policy, bucket_cap_mb=0.01)
    actual = model._fsdp_state.plan
    assert actual.describe() == planned.describe()
    assert (actual.arena_bytes, actual.native.hash()) == (planned.arena_bytes, planned.native.hash())
    assert planned.num_parameters == NUMEL
    masters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert masters <= planned.parameter_bytes
    next_token_loss(model, tokens_for(0, 0)).backward()


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(1, 2, 3)
def test_memory_beyond_the_arena_is_counted(communicator: str) -> None:
    """no_sync keeps one fp32 copy of the gradients, as planned, also of bf16 ones; c10d receives into own buffers."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(wide_model(), mixed_precision=policy, communicator=communicator)
    engine, plan = model._fsdp_state.engine, model._fsdp_state.plan
    rank = dist.get_rank()
    next_token_loss(model, tokens_for(0, rank)).backward()
    assert engine.accumulation_bytes == 0
    received = engine.buffer_bytes
    assert (received > 0) == (engine.communicator_name == "c10d")
    for step in (1, 2):
        with model.no_sync():
            next_token_loss(model, tokens_for(step, rank)).backward()
        assert engine.accumulation_bytes == plan.accumulation_bytes
    assert 4 * NUMEL <= plan.accumulation_bytes <= 4 * (NUMEL + 8 * PADDING)
    next_token_loss(model, tokens_for(3, rank)).backward()
    assert engine.accumulation_bytes == plan.accumulation_bytes
    # Buffers are used again: never more than one per bucket, whatever is on its way at once.
    assert received <= engine.buffer_bytes <= planned_traffic(plan).reduced_bytes


@on_ranks(2)
def test_a_dropped_model_is_freed() -> None:
    """Engine, hooks and modules form no cycle that keeps the model alive beyond a garbage collection."""
    import gc
    import weakref

    model = FSDP(SmallModel())
    next_token_loss(model, tokens_for(0, 0)).backward()
    alive = [weakref.ref(model), weakref.ref(model._fsdp_state), weakref.ref(model._fsdp_state.engine)]
    dist.barrier()
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]


class LargeVocabulary(nn.Module):
    """Embedding and head, not tied, are most of the model, and both in the root unit."""

    def __init__(self, vocab: int = 400, dim: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab, bias=False)


@pytest.mark.parametrize("cap_kib", [16, 64, 256])
@on_ranks(1, 4)
def test_no_buffer_is_larger_than_the_cap_or_the_largest_parameter(cap_kib: int) -> None:
    """Embedding and head are not gathered or reduced as one, whatever the cap."""
    plan = plan_model(LargeVocabulary(), dist.get_world_size(), bucket_cap_mb=cap_kib / 1024)
    largest_parameter = 400 * 32 * 4
    for bucket in plan.native.buckets:
        size = plan.world_size * bucket.shard_numel * 4
        # Padding to whole rows: at most one of 32 floats a shard.
        assert size <= max(cap_kib * 1024, largest_parameter) + plan.world_size * 32 * 4
    by_bucket = [[plan.params[i].name for i in bucket.params] for bucket in plan.native.buckets]
    alone = cap_kib * 1024 < 2 * largest_parameter
    assert not alone or not any({"embed.weight", "head.weight"} <= set(names) for names in by_bucket)


@on_ranks(2)
def test_gradient_shards_between_steps() -> None:
    """On a card the next forward has their memory for activations, but for the buckets that somebody still looks at. On
    the host they stay where they are.
    """
    twin = Twin(wide_model)
    twin.train(2)
    addresses = [p.grad.data_ptr() for p in twin.model.parameters()]
    sizes = [p.grad.nbytes for p in twin.model.parameters()]
    kept = twin.model.head.weight.grad
    values = kept.clone()
    twin.model.zero_grad()
    if DEVICE != "cpu":
        cards = torch.get_device_module(DEVICE)
        before = cards.memory_allocated()
        with torch.no_grad():
            twin.model(tokens_for(0, twin.rank))
        of_root = sum(p.sharded.nbytes for p in twin.state.params if p.unit == 0)
        assert before - cards.memory_allocated() >= sum(sizes) - of_root > 0
    twin.backward(7)
    twin.check_gradients()
    if DEVICE == "cpu":
        assert [p.grad.data_ptr() for p in twin.model.parameters()] == addresses
    else:
        assert torch.equal(kept, values)
