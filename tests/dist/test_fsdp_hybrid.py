"""Hybrid sharding: replicas of a sharded model. Numbers equal those of one process; replicas stay equal bit for bit.

With two replicas the sums have one order, ((g0 + g1) + (g2 + g3)) / 4, so they are compared bit for bit.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import DEVICE, on_ranks
from torch import nn
from twin import DIM, SmallModel, Twin, floats_for, next_token_loss, squared_loss, tokens_for

from torchtitan_npu.config import config_from_dict
from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy, materialize, plan_model
from torchtitan_npu.planning.memory import plan_fsdp
from torchtitan_npu.planning.report import dry_run

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])
# What "auto" takes inside a replica, and between replicas.
CHOSEN = {"cpu": ("shared memory", "c10d"), "npu": ("hccl", "hccl")}
CAPS = pytest.mark.parametrize("cap", [None, 0.0005, 25], ids=["no_cap", "tiny_cap", "cap_25"])


def mesh_of(replicas: int) -> list[list[int]]:
    ranks = list(range(dist.get_world_size()))
    size = len(ranks) // replicas
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def check_replicas_are_equal(twin: Twin) -> None:
    """Bit for bit: weights and gradients of the ranks that hold the same shard."""
    mine = [
        (p.sharded.detach().cpu(), p.sharded.grad if p.sharded.grad is None else p.sharded.grad.cpu())
        for p in twin.state.params
    ]
    everyone: list[Any] = [None] * twin.size
    dist.all_gather_object(everyone, mine)
    for other in twin.state.mesh.replicate.ranks:
        for (weight, gradient), (its_weight, its_gradient) in zip(mine, everyone[other], strict=True):
            assert torch.equal(weight, its_weight)
            assert (gradient is None) == (its_gradient is None)
            assert gradient is None or torch.equal(gradient, its_gradient)


@CAPS
@COMMUNICATORS
@on_ranks(4)
def test_two_replicas_of_two(communicator: str, cap: float | None) -> None:
    twin = Twin(SmallModel, device_mesh=mesh_of(2), communicator=communicator, bucket_cap_mb=cap)
    twin.train(3)
    check_replicas_are_equal(twin)
    assert (twin.state.mesh.shard.size, twin.state.mesh.replicate.size) == (2, 2)
    inner, between = ("c10d", "c10d") if communicator == "c10d" else CHOSEN[DEVICE]
    assert twin.state.engine.communicator_name == f"{inner} inside and {between} between 2 replicas"


@COMMUNICATORS
@on_ranks(2)
def test_two_replicas_of_one(communicator: str) -> None:
    """Shard size 1: plain data parallel."""
    twin = Twin(SmallModel, device_mesh=[[0], [1]], communicator=communicator)
    twin.train(3)
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_four_replicas_of_one() -> None:
    """Four terms are added around a ring, so not in rank order: within 1e-6 of the largest gradient."""
    twin = Twin(SmallModel, device_mesh=[[0], [1], [2], [3]])
    twin.backward(0)
    twin.check_gradients(relative=1e-6)
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        next_token_loss(twin.model, tokens_for(step, twin.rank)).backward()
        optimizer.step()
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_one_replica_is_plain_sharding() -> None:
    twin = Twin(SmallModel, device_mesh=[[0, 1, 2, 3]])
    twin.train(2)
    assert twin.state.engine.communicator_name == "shared memory"
    assert twin.state.plan.replicas == 1 and twin.state.plan.staging_bytes == 0


@on_ranks(4)
def test_meshes_given_in_other_ways() -> None:
    """Replicas of ranks that are not neighbours; a tensor; a DeviceMesh."""
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh, replicas in (
        (torch.tensor([[0, 2], [1, 3]]), ([0, 2], [1, 3])),
        ([[3, 1], [2, 0]], ([1, 3], [0, 2])),
        (device_mesh, ([0, 1], [2, 3])),
    ):
        twin = Twin(SmallModel, device_mesh=mesh)
        twin.rows = list(replicas)
        twin.train(1)
        check_replicas_are_equal(twin)
        assert twin.state.mesh.shard.ranks == tuple(next(row for row in replicas if twin.rank in row))


@COMMUNICATORS
@on_ranks(2)
def test_ranks_in_any_order(communicator: str) -> None:
    """torch sorts the ranks of a new group; pieces follow."""
    twin = Twin(SmallModel, device_mesh=torch.tensor([1, 0]), communicator=communicator)
    twin.train(1)


@on_ranks(3, 4)
def test_bad_meshes() -> None:
    size = dist.get_world_size()
    with pytest.raises(ValueError, match=r"rows of 1 and 2 ranks: all replicas must have as many"):
        FSDP(SmallModel(), device_mesh=[[0, 1], [2]])
    with pytest.raises(ValueError, match="names rank 0 more than once"):
        FSDP(SmallModel(), device_mesh=[[0, 1], [2, 0]] if size == 4 else [[0], [0], [1]])
    with pytest.raises(ValueError, match=f"has {2 * size} ranks but WORLD_SIZE is {size}"):
        FSDP(SmallModel(), device_mesh=torch.arange(2 * size).view(2, -1))
    with pytest.raises(ValueError, match=r"one or two dimensions \(shard, or replicate x shard\), got shape"):
        FSDP(SmallModel(), device_mesh=torch.arange(size).view(1, 1, -1))


@COMMUNICATORS
@on_ranks(4)
def test_sum_in_float32_of_bfloat16_gradients(communicator: str) -> None:
    """bf16 on the wire inside a replica, fp32 from there on, rounded to reduce_dtype once at the end."""
    for reduce_dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        torch.manual_seed(0)
        model: Any = FSDP(
            nn.Sequential(nn.Linear(DIM, 7), nn.Linear(7, 5)).to(DEVICE),
            device_mesh=mesh_of(2),
            communicator=communicator,
            mixed_precision=policy,
        )
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(DIM, 7), nn.Linear(7, 5)).to(DEVICE).bfloat16()
        squared_loss(model, floats_for(0, dist.get_rank())).backward()
        gradients = []
        for rank in range(4):
            plain.zero_grad()
            squared_loss(plain, floats_for(0, rank).bfloat16()).backward()
            gradients.append([p.grad.float() for p in plain.parameters()])
        for i, param in enumerate(model._fsdp_state.params):
            g = [of_rank[i] for of_rank in gradients]
            want = (((g[0] + g[1]) + (g[2] + g[3])) / 4).to(reduce_dtype).float().flatten()
            got = param.sharded.grad.flatten()
            assert torch.equal(got, want[param.piece.start : param.piece.start + got.numel()]), param.name


@on_ranks(4)
def test_bfloat16_master_weights() -> None:
    """Sums travel in fp32 and end in the gradient's 16 bits."""
    torch.manual_seed(0)
    model: Any = FSDP(nn.Linear(DIM, 7).bfloat16(), device_mesh=mesh_of(2))
    squared_loss(model, floats_for(0, dist.get_rank()).bfloat16()).backward()
    torch.manual_seed(0)
    plain = nn.Linear(DIM, 7).bfloat16()
    g = []
    for rank in range(4):
        plain.zero_grad()
        squared_loss(plain, floats_for(0, rank).bfloat16()).backward()
        g.append(plain.weight.grad.float())
    want = (((g[0] + g[1]) + (g[2] + g[3])) / 4).bfloat16().flatten()
    param = next(p for p in model._fsdp_state.params if p.name == "weight")
    got = param.sharded.grad.flatten()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want[param.piece.start : param.piece.start + got.numel()])


class Branches(nn.Module):
    """Uses only the branches that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x_and_used: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        x, used = x_and_used
        for index in used:
            x = F.relu(self.branches[index](x)) + x
        return x * self.scale


USED = {
    "not_in_one_replica": [[0, 1, 3], [0, 1, 3], [0, 1, 2, 3], [0, 1, 2, 3]],
    "not_on_one_rank": [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3], [0, 3]],
    "nowhere": [[0, 2, 3]] * 4,
    "all_differ": [[0], [1], [2], [3]],
}


@pytest.mark.parametrize("used", list(USED))
@COMMUNICATORS
@on_ranks(4)
def test_parameters_that_not_all_ranks_use(communicator: str, used: str) -> None:
    """Branches are no units of their own, as ranks of one replica gather units in one order."""
    twin = Twin(
        Branches,
        squared_loss,
        lambda step, rank: (floats_for(step, rank), USED[used][rank]),
        device_mesh=mesh_of(2),
        communicator=communicator,
        bucket_cap_mb=0.0005,
        auto_wrap_policy=lambda module: False,
    )
    for _ in range(2):
        twin.model.zero_grad()
        twin.backward(0)
        twin.check_gradients()
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_replicas_may_run_different_units() -> None:
    """Replicas gather by themselves: one that skips a unit sends zeros for it."""
    used = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 2], [0, 2]]
    twin = Twin(Branches, squared_loss, lambda step, rank: (floats_for(step, rank), used[rank]), device_mesh=mesh_of(2))
    twin.train(2, torch.optim.SGD)
    check_replicas_are_equal(twin)


@pytest.mark.parametrize("inside", [(), (0,), (0, 1), (1,)], ids=["none", "first", "both", "second"])
@on_ranks(4)
def test_gradient_accumulation(inside: tuple[int, ...]) -> None:
    """Three micro-batches, some of them in no_sync. The order of sums differs with no_sync: within 1e-6."""
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    for step in range(3):
        with twin.model.no_sync() if step in inside else contextlib.nullcontext():
            next_token_loss(twin.model, tokens_for(step, twin.rank)).backward()
    twin.plain_backward([0, 1, 2])
    twin.check_gradients(relative=1e-6 if inside else 0.0)
    check_replicas_are_equal(twin)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(4)
def test_clipping(norm_type: float) -> None:
    """Every parameter counts once, however many replicas there are."""
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    twin.backward(0)
    ours = twin.model.clip_grad_norm_(0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.01, norm_type)
    torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-5, atol=0)
    twin.check_gradients(relative=2e-5)
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_replicas_start_with_the_same_values() -> None:
    torch.manual_seed(dist.get_rank())
    model: Any = FSDP(SmallModel(), device_mesh=mesh_of(2))
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, [p.detach() for p in model.parameters()])
    for mine, other in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(everyone[mine], everyone[other], strict=True))


@on_ranks(4)
def test_meta_models_have_the_values_of_one_process() -> None:
    with torch.device("meta"):
        model: Any = FSDP(SmallModel(), device_mesh=mesh_of(2), init_seed=3)
        plain: Any = SmallModel()
    materialize(plain, 3)
    whole = dict(plain.named_parameters())
    for param in model._fsdp_state.params:
        start = param.piece.start
        assert torch.equal(
            param.sharded.flatten(), whole[param.name].flatten()[start : start + param.sharded.numel()]
        ), param.name


@COMMUNICATORS
@on_ranks(4)
def test_an_exception_on_all_ranks_leaves_replicas_in_step(communicator: str) -> None:
    """In the middle of a backward, where replicas may differ in how far their sums have got."""
    twin = Twin(SmallModel, device_mesh=mesh_of(2), communicator=communicator, bucket_cap_mb=0.0005)
    twin.train(1)

    def stumble(gradient: torch.Tensor) -> None:
        raise KeyError("on every rank")

    for _ in range(3):
        handle = twin.model.layers[0].register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
        with pytest.raises(KeyError, match="on every rank"):
            next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
        handle.remove()
        twin.train(1)
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_memory_does_not_move() -> None:
    """Gradients and staged sums have the same addresses in every step, and the staging memory is the planned one."""
    twin = Twin(SmallModel, device_mesh=mesh_of(2), bucket_cap_mb=0.01)
    twin.train(1)
    before = [p.grad.data_ptr() for p in twin.model.parameters()]
    twin.train(2)
    assert [p.grad.data_ptr() for p in twin.model.parameters()] == before
    assert twin.counters.overflow_places == 0


def test_the_plan_counts_staging_memory() -> None:
    """One bucket of 3 x 4 fp32: two shards of 2 x 4 (padded to whole rows) = 8 elements of 4 bytes, aligned to 512."""
    model = nn.Linear(4, 3, bias=False)
    assert plan_model(model, 2).staging_bytes == 0
    plan = plan_model(model, 2, replicas=2)
    assert plan.staging_bytes == 512
    assert plan.arena_bytes == plan.gather_bytes + plan.reduce_bytes + 512
    assert "2 x 2 ranks" in plan.describe() and "between replicas 0.0 MiB" in plan.describe()
    with pytest.raises(ValueError, match="replicas must be at least 1, got 0"):
        plan_model(model, 2, replicas=0)


def test_the_dry_run_shows_replicas() -> None:
    config = config_from_dict(
        {
            "model": {"name": "llama3_debug", "vocab_size": 320},
            "training": {"batch_size": 2, "seq_len": 8, "learning_rate": 1e-3, "max_steps": 1},
            "parallel": {"strategy": "hsdp", "replicate_degree": 2},
        }
    )
    text = dry_run(config, 4)
    assert "2 replicas of 2 ranks" in text
    staging = plan_fsdp(config, 4).staging_bytes
    assert staging > 0
    line = next(line for line in text.splitlines() if "of it between replicas" in line)
    assert f"{staging:,}" in line
