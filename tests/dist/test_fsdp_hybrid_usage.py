"""What users do beside training steps, with replicas: clipping, loss scaling, copies, whole parameters, recomputation.

2 x 2 ranks, and 2 x 1, compared with a plain model in one process.
"""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, on_ranks
from test_fsdp_hybrid import check_replicas_are_equal, mesh_of
from torch import nn
from twin import SmallModel, Twin, next_token_loss, part_of, tokens_for

from torchtitan_npu.fsdp import FSDP, GradScaler, MovingAverage, StateDictType, full_params
from torchtitan_npu.fsdp.state import state_of

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch"])
@on_ranks(2, 4)
def test_clipping_counts_one_replica(by_torch: bool, norm_type: float) -> None:
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    twin.backward(0)
    if by_torch:
        ours = nn.utils.clip_grad_norm_(twin.model.parameters(), 0.01, norm_type)
    else:
        ours = twin.model.clip_grad_norm_(0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.01, norm_type)
    assert theirs > 0.01, "the test would not clip otherwise"
    torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=1e-5, atol=0)
    assert set(everywhere(ours.item())) == {ours.item()}
    twin.check_gradients(relative=1e-5)
    check_replicas_are_equal(twin)


@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch"])
@on_ranks(2, 4)
def test_an_overflow_of_one_rank_skips_the_step_of_all(by_torch: bool) -> None:
    """Also one that is in no sum of gradients: the user's own, in one piece of one replica."""
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    scaler: Any = torch.amp.GradScaler("cpu", 4.0) if by_torch else GradScaler(twin.model, init_scale=4.0)
    optimizer = torch.optim.SGD(twin.model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in twin.model.parameters()]
    for case in ("in the loss", "in a piece"):
        optimizer.zero_grad()
        loss = next_token_loss(twin.model, tokens_for(0, twin.rank))
        last = twin.rank == twin.size - 1
        scaler.scale(loss * (math.inf if last and case == "in the loss" else 1.0)).backward()
        if last and case == "in a piece":
            twin.model.head.weight.grad.view(-1)[:1] = math.inf
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(p, old) for p, old in zip(twin.model.parameters(), before, strict=True)), case
    assert set(everywhere(scaler.get_scale())) == {1.0}
    optimizer.zero_grad()
    scaler.scale(next_token_loss(twin.model, tokens_for(0, twin.rank))).backward()
    scaler.step(optimizer)
    assert not all(torch.equal(p, old) for p, old in zip(twin.model.parameters(), before, strict=True))
    check_replicas_are_equal(twin)


@COMMUNICATORS
@on_ranks(2, 4)
def test_a_copy_has_replicas_of_its_own(communicator: str) -> None:
    twin = Twin(SmallModel, device_mesh=mesh_of(2), communicator=communicator)
    twin.train(1)
    other = copy.copy(twin)
    other.model, other.plain = copy.deepcopy(twin.model), copy.deepcopy(twin.plain)
    other.state = state_of(other.model)
    other.model.zero_grad()
    other.train(2)
    check_replicas_are_equal(other)
    assert other.state.engine.communicator_name == twin.state.engine.communicator_name
    twin.check_weights()
    twin.train(1)


@on_ranks(2, 4)
def test_whole_parameters_and_averages() -> None:
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    average = MovingAverage(twin.model, decay=0.5)
    twin.train(1)
    average.update()
    plain = dict(twin.plain.named_parameters())
    with full_params(twin.model, writeback=True), torch.no_grad():
        for name, p in twin.model.named_parameters():
            assert torch.equal(p, plain[name].cpu()), name
            p.mul_(2)
    for p in twin.state.params:
        assert torch.equal(p.sharded, part_of(p, plain[p.name] * 2))
    twin.model.load_state_dict(twin.plain.state_dict())
    with average.averaged():
        means = everywhere([p.sharded.detach().cpu() for p in twin.state.params])
        for other in twin.state.mesh.replicate.ranks:
            assert all(torch.equal(a, b) for a, b in zip(means[twin.rank], means[other], strict=True))
    twin.train(1)
    check_replicas_are_equal(twin)


@on_ranks(4, own_group=True)  # torch closes the connections of a barrier that has failed
def test_a_full_state_dict_on_one_replica_only() -> None:
    os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"] = "0.5"
    twin = Twin(SmallModel, device_mesh=mesh_of(2))
    twin.backward(0)
    if twin.rank < 2:
        with FSDP.state_dict_type(twin.model, StateDictType.FULL_STATE_DICT):
            with pytest.raises(RuntimeError, match=r"a FULL state dict is collective, but not all ranks called it"):
                twin.model.state_dict()


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("prefetch", [0, 2])
@COMMUNICATORS
@on_ranks(2, 4)
def test_recomputation(communicator: str, prefetch: int, mode: Any) -> None:
    twin = Twin(
        SmallModel,
        device_mesh=mesh_of(2),
        communicator=communicator,
        prefetch=prefetch,
        activation_checkpointing=mode,
    )
    twin.train(2)
    check_replicas_are_equal(twin)


@on_ranks(4)
def test_replicas_that_are_built_differently_say_so() -> None:
    with pytest.raises(ValueError, match="rank 0 and rank 2 wrap different models or use different FSDP options"):
        FSDP(SmallModel(), device_mesh=mesh_of(2), prefetch=1 + dist.get_rank() // 2)


class Choice(nn.Module):
    """Which of two layers is used depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Linear(8, 8)
        self.to(DEVICE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers[0](x) + (self.layers[1](x) if x[0, 0] > 0 else 0)
        return self.last(y)


@COMMUNICATORS
@on_ranks(4)
def test_replicas_that_give_up_after_different_numbers_of_sums_stay_in_step(communicator: str) -> None:
    """A layer gets no gradient in the second replica, so its bucket is complete there at another moment."""

    def batch(step: int, rank: int) -> torch.Tensor:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + rank))
        x[0, 0] = 1.0 if rank < 2 else -1.0
        return x.to(DEVICE)

    twin = Twin(
        Choice,
        lambda model, x: model(x).square().mean(),
        batch,
        device_mesh=mesh_of(2),
        communicator=communicator,
        bucket_cap_mb=0.0001,
        auto_wrap_policy=lambda module: isinstance(module, nn.Linear),
    )

    def stumble(gradient: torch.Tensor) -> None:
        raise KeyError("on every rank")

    for where in (twin.model.layers[0], twin.model.last):
        handle = where.register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
        for step in range(2):
            with pytest.raises(KeyError, match="on every rank"):
                twin.model(batch(step, twin.rank)).square().mean().backward()
        handle.remove()
        twin.model.zero_grad()  # sums that came before the exception
        twin.backward(5)
        twin.check_gradients()
        check_replicas_are_equal(twin)
