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
from pool import on_ranks
from torch import nn
from twin import DIM, SmallModel, Twin, floats_for, next_token_loss, squared_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy, plan_model

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])
CAPS = pytest.mark.parametrize("cap", [None, 0.0005, 25], ids=["no_cap", "tiny_cap", "cap_25"])


def mesh_of(replicas: int) -> list[list[int]]:
    return torch.arange(dist.get_world_size()).view(replicas, -1).tolist()


def check_replicas_are_equal(twin: Twin) -> None:
    """Bit for bit: weights and gradients of the ranks that hold the same shard."""
    mine = [(p.sharded.detach(), p.sharded.grad) for p in twin.state.params]
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
    inner = "shared memory" if communicator == "auto" else "c10d"
    assert twin.state.engine.communicator_name == f"{inner} inside and c10d between 2 replicas"


@COMMUNICATORS
@on_ranks(2)
def test_two_replicas_of_one(communicator: str) -> None:
    """Shard size 1: plain data parallel."""
    twin = Twin(SmallModel, device_mesh=[[0], [1]], communicator=communicator)
    twin.train(3)
    check_replicas_are_equal(twin)
