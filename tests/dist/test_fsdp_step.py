"""Training steps equal those of one unsharded process, for any number of ranks, cap and grouping.

Gradients are compared bit for bit with (g0 + g1 + …) / N, g_r being the plain model's float32 gradient on rank r's
batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import COMMUNICATOR, on_ranks
from torch import nn
from twin import DIM, Block, SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, fully_shard

CAPS = pytest.mark.parametrize("cap", [None, 0.0005, 25], ids=["no_cap", "tiny_cap", "cap_25"])


@CAPS
@on_ranks(1, 2, 3, 4)
def test_gradients_and_weights(cap: float | None) -> None:
    """Tiny: 524 bytes, so nearly every parameter is a bucket. 25 MiB: all blocks merge into one unit."""
    twin = Twin(SmallModel, bucket_cap_mb=cap)
    twin.train(4)
    assert twin.state.engine.communicator_name == COMMUNICATOR
    assert twin.counters.overflow_places == 0
    buckets, units = twin.state.plan.num_buckets, len(twin.state.plan.units)
    assert (buckets > 8, units) == {None: (False, 4), 0.0005: (True, 4), 25: (False, 2)}[cap]


@CAPS
@on_ranks(2, 3)
def test_gradients_and_weights_through_c10d(cap: float | None) -> None:
    twin = Twin(SmallModel, bucket_cap_mb=cap, communicator="c10d")
    twin.train(3)
    assert twin.state.engine.communicator_name == "c10d"


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2, 3)
def test_reshard_after_forward(reshard: bool) -> None:
    """Three blocks and the root. Resharded blocks are gathered in forward and in backward, kept ones once per step.

    The last block of a forward stays for its backward, once it is known which one is the last.
    """
    twin = Twin(SmallModel, reshard_after_forward=reshard)
    twin.train(3)
    assert twin.counters.gathers == (7 + 6 + 6 if reshard else 3 * 4)


@on_ranks(2)
def test_auto_wrap_policy_chooses_the_units() -> None:
    twin = Twin(SmallModel, auto_wrap_policy=lambda m: isinstance(m, (nn.Linear, nn.Embedding)))
    names = [unit.name for unit in twin.state.plan.units]
    assert names == ["root", "embed", *(f"layers.{i}.{n}" for i in range(3) for n in ("up", "down")), "head"]
    twin.train(3)


@on_ranks(2, 3)
def test_nested_units() -> None:
    """Blocks as units, and their largest layer as a unit inside each."""
    twin = Twin(SmallModel, auto_wrap_policy=lambda m: isinstance(m, Block) or getattr(m, "out_features", 0) == 3 * DIM)
    assert [unit.name for unit in twin.state.plan.units][1:3] == ["layers.0", "layers.0.up"]
    twin.train(3)
    assert twin.counters.overflow_places == 0


def marked_model() -> nn.Module:
    model = SmallModel()
    fully_shard(model.layers[0])
    fully_shard(model.layers[1], reshard_after_forward=False)
    fully_shard(model.head)
    return model


def test_marks_are_the_units(rank_pool: Any) -> None:
    rank_pool.run(2, train_marked_model)


def train_marked_model() -> None:
    torch.manual_seed(0)
    model = FSDP(marked_model())
    twin = Twin(SmallModel)
    twin.model, twin.state = model, model._fsdp_state
    assert [unit.name for unit in twin.state.plan.units] == ["root", "layers.0", "layers.1", "head"]
    twin.train(3)
    # root 1, layers.0 2, layers.1 (kept) 1, head 2 in the first step; then the head, the last one, stays: 1.
    assert twin.counters.gathers == 6 + 5 + 5


@on_ranks(1)
def test_a_marked_module_without_fsdp_refuses_to_run() -> None:
    model = marked_model()
    with pytest.raises(RuntimeError, match="Block was marked with fully_shard, but FSDP was not called"):
        model(tokens_for(0, 0))


@on_ranks(2, 3)
def test_small_units_merge_up_to_the_cap() -> None:
    """A block is 20+20 + 1200+60 + 1200 = 2500 floats = 10,000 bytes; a cap of 20,971 bytes holds two."""
    twin = Twin(lambda: SmallModel(layers=5), bucket_cap_mb=0.02)
    assert [unit.name for unit in twin.state.plan.units] == ["root", "layers.0-1", "layers.2-3", "layers.4"]
    twin.train(3)


@on_ranks(2, 3, 4)
def test_bucket_cap_does_not_change_numbers() -> None:
    """The full weights after three steps are the same bits for every cap, also through c10d."""
    results = []
    for options in (
        {},
        {"bucket_cap_mb": 0.0005},
        {"bucket_cap_mb": 0.01},
        {"bucket_cap_mb": 25},
        {"communicator": "c10d"},
    ):
        torch.manual_seed(0)
        model = FSDP(SmallModel(), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            optimizer.zero_grad()
            next_token_loss(model, tokens_for(step, dist.get_rank())).backward()
            optimizer.step()
        pieces = {p.name: (p.piece.start, p.sharded.detach().flatten().cpu()) for p in model._fsdp_state.params}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, pieces)
        results.append(
            {n: torch.cat([part[n][1] for part in sorted(everywhere, key=lambda e: e[n][0])]) for n in pieces}
        )
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        assert all(torch.equal(result[name], results[0][name]) for name in result)


@on_ranks(2, 4)
def test_a_subset_of_the_ranks() -> None:
    """device_mesh of the odd ranks: they average among themselves, the others train alone."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = list(range(rank % 2, size, 2))
    torch.manual_seed(0)
    plain = SmallModel()
    torch.manual_seed(0)
    model = FSDP(SmallModel(), device_mesh=torch.tensor(mesh))
    next_token_loss(model, tokens_for(0, rank)).backward()
    for other in mesh:
        next_token_loss(plain, tokens_for(0, other)).backward()
    for param, want in zip(model._fsdp_state.params, plain.parameters(), strict=True):
        got, start = param.sharded.grad, param.piece.start
        whole = (dict(plain.named_parameters())[param.name].grad / len(mesh)).flatten()
        assert torch.equal(got.flatten(), whole[start : start + got.numel()])
        assert want.grad is not None
