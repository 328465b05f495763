"""What users do beside training steps, with DTensor parameters: clipping, loss scaling, copies, whole parameters,
averages, recomputation. As in ``test_fsdp_tensor_parallel.py``, within 1e-5 of the plain model's numbers.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from test_fsdp_tensor_parallel import FFN, DIM, Pair, loss_of, tokens_for
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from torchtitan_npu.fsdp import GradScaler, MovingAverage, full_params, walk_full_params

DOWN = "layers.0.feedforward.down.weight"


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain_norms", "sequence_parallel"])
@on_ranks(2, 4)
def test_torchs_clipping_counts_every_element_once(sequence: bool, norm_type: float) -> None:
    pair = Pair(sequence=sequence)
    pair.backward(0)
    ours = nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, norm_type)
    assert theirs > 0.01, "the test would not clip otherwise"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    assert set(everywhere(ours.item())) == {ours.item()}
    pair.check(relative=5e-5)


@pytest.mark.parametrize("by_torch", [False, True], ids=["ours", "torch"])
@on_ranks(2, 4)
def test_an_overflow_of_one_part_skips_the_step_of_all(by_torch: bool) -> None:
    pair = Pair()
    scaler: Any = torch.amp.GradScaler("cpu", 4.0) if by_torch else GradScaler(pair.model, init_scale=4.0)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in pair.model.parameters()]
    scaler.scale(loss_of(pair.model, tokens_for(0, pair.group))).backward()
    if dist.get_rank() == dist.get_world_size() - 1:
        gradient = next(p for p in pair.params if p.name == DOWN).sharded.grad
        gradient.view(-1)[:1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, old) for p, old in zip(pair.model.parameters(), before, strict=True))
    assert set(everywhere(scaler.get_scale())) == {2.0}


@pytest.mark.parametrize("sequence", [False, True], ids=["plain_norms", "sequence_parallel"])
@on_ranks(4)
def test_a_copy_trains_by_itself(sequence: bool) -> None:
    pair = Pair(sequence=sequence)
    pair.train(1)
    other = copy.copy(pair)
    other.model, other.plain = copy.deepcopy(pair.model), copy.deepcopy(pair.plain)
    other.params = other.model._fsdp_state.params
    assert all(p.sharded.grad is None for p in other.params)
    weights = [p.detach().clone() for p in pair.model.parameters()]
    other.plain.zero_grad()
    other.train(2)
    assert all(torch.equal(p, old) for p, old in zip(pair.model.parameters(), weights, strict=True))


@on_ranks(2, 4)
def test_whole_parameters_are_the_dtensors_that_modules_compute_with() -> None:
    pair = Pair(sequence=True)
    down = pair.model.layers[0].feedforward.down
    with full_params(pair.model, writeback=True), torch.no_grad():
        for name, p in pair.model.named_parameters():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.equal(whole, pair.plain.get_parameter(name)), name
            p.mul_(2)
        assert isinstance(down.weight, DTensor) and down.weight.shape == (DIM, FFN)
    for name, unit in walk_full_params(pair.model):
        for key, p in unit.items():
            whole = p.full_tensor() if isinstance(p, DTensor) else p
            assert torch.equal(whole, 2 * pair.plain.get_parameter(key)), (name, key)
    with torch.no_grad():
        for p in pair.plain.parameters():
            p.mul_(2)
    pair.train(1)


@on_ranks(2)
def test_whole_parameters_that_are_replaced() -> None:
    """By a whole plain tensor, which each rank takes its part of; not by a DTensor that is cut in another way."""
    pair = Pair()
    down = pair.model.layers[0].feedforward.down
    values = torch.randn(DIM, FFN, generator=torch.Generator().manual_seed(3))
    with full_params(pair.model, writeback=True):
        down.weight = nn.Parameter(values.clone())
    param = next(p for p in pair.params if p.name == DOWN)
    assert torch.equal(param.sharded, pair.part(param, values))
    with pytest.raises(RuntimeError, match=r"'layers.0.feedforward.down.weight' is a DTensor with placements"):
        with full_params(pair.model, writeback=True):
            down.weight = nn.Parameter(distribute_tensor(values, pair.mesh["tp"], [Replicate()]))
    assert torch.equal(param.sharded, pair.part(param, values)) and down.weight is param.sharded


@on_ranks(4)
def test_averages() -> None:
    pair = Pair(sequence=True)
    first = {name: p.detach().clone() for name, p in pair.plain.named_parameters()}
    average = MovingAverage(pair.model, decay=0.5)
    with torch.no_grad():
        for p in pair.model.parameters():
            p.mul_(3)
    average.update()
    with average.averaged():
        for param in pair.params:
            torch.testing.assert_close(param.sharded.detach(), pair.part(param, 2 * first[param.name]))
    pieces = average.state_dict()
    assert pieces[DOWN].whole_shape == (DIM, FFN)
    average.load_state_dict(pieces)
    average.load_state_dict(first)
    with average.averaged():
        assert all(torch.equal(p.sharded, pair.part(p, first[p.name])) for p in pair.params)


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize(("communicator", "prefetch"), [("auto", 1), ("c10d", 2)])
@on_ranks(2, 4)
def test_recomputation(communicator: str, prefetch: int, mode: Any) -> None:
    pair = Pair(sequence=True, activation_checkpointing=mode, communicator=communicator, prefetch=prefetch)
    pair.train(2)


@on_ranks(4)
def test_the_start_up_line_counts_the_whole_model() -> None:
    pair = Pair()
    whole = sum(p.numel() for p in pair.plain.parameters())
    plan = pair.model._fsdp_state.plan
    # Of each layer's matrices, biases of `up` included, half; norms, embedding, head and the bias of `out` whole.
    halved = 2 * (4 * DIM * DIM + 3 * DIM * FFN + FFN)
    assert f"FSDP: {whole:,} parameters ({whole - halved // 2:,} on this tensor-parallel rank) in" in plan.describe()
