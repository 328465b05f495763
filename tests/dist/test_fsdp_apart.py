"""Ranks that come apart: every rank stops, soon, with an error that names ranks, units and numbers; none goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, PeerError

SECONDS = 10.0
"""Far below the deadline of a wait (1,836 s), so that what ends it is not the deadline."""


def train(model: nn.Module, step: int = 0, backward: bool = True) -> None:
    loss = next_token_loss(model, tokens_for(step, dist.get_rank()))
    if backward:
        loss.backward()


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(tokens_for(9, 0))


def fail_alone(model: nn.Module, unit: int, where: str) -> None:
    """The user's exception on this rank, who catches it."""

    def trip(*_: Any) -> None:
        raise KeyError("this rank only")

    layer = model.layers[unit]  # type: ignore[index, union-attr]
    if where == "forward":
        handle = layer.register_forward_pre_hook(trip)
    else:
        handle = layer.register_forward_hook(lambda m, a, o: o.register_hook(trip) and None)
    try:
        with pytest.raises(KeyError, match="this rank only"):
            train(model)
    finally:
        handle.remove()


def one_skips_a_backward(model: nn.Module, odd: bool) -> None:
    train(model, backward=not odd)
    model.zero_grad()
    for step in (1, 2):
        train(model, step)


def one_runs_another_forward(model: nn.Module, odd: bool) -> None:
    if odd:
        evaluate(model)
    for step in (1, 2):
        train(model, step)


def one_skips_a_unit(model: nn.Module, odd: bool) -> None:
    layers = model.layers
    if odd:
        model.layers = nn.ModuleList(layers[i] for i in (0, 2))  # type: ignore[index]
    for step in (1, 2):
        train(model, step)


def one_fails_in_forward(model: nn.Module, odd: bool) -> None:
    if odd:
        fail_alone(model, 1, "forward")
    for step in (1, 2):
        train(model, step)


def one_fails_in_backward(model: nn.Module, odd: bool) -> None:
    if odd:
        fail_alone(model, 1, "backward")
        model.zero_grad()
    for step in (1, 2):
        train(model, step)


def one_does_another_step(model: nn.Module, odd: bool) -> None:
    train(model)
    if odd:
        train(model, 1)
    else:
        train(model, 1, backward=False)
        evaluate(model)
        evaluate(model)


SCENARIOS: dict[str, Callable[[nn.Module, bool], None]] = {
    f.__name__: f
    for f in (
        one_skips_a_backward,
        one_runs_another_forward,
        one_skips_a_unit,
        one_fails_in_forward,
        one_fails_in_backward,
        one_does_another_step,
    )
}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("scenario", SCENARIOS)
@on_ranks(2, 3, timeout=30)
def test_every_rank_stops(scenario: str, communicator: str, reshard: bool) -> None:
    """The last rank does something else than the others, after a step in which all were in step."""
    model: Any = FSDP(SmallModel(), communicator=communicator, reshard_after_forward=reshard)
    train(model)
    model.zero_grad()
    started = time.monotonic()
    with pytest.raises(PeerError) as caught:
        SCENARIOS[scenario](model, dist.get_rank() == dist.get_world_size() - 1)
    assert time.monotonic() - started < SECONDS
    message = str(caught.value)
    assert re.search(r"ranks have come apart|gave up backward pass|failed:", message), message
    assert len(set(re.findall(r"rank \d", message))) >= 2, message
    assert re.search(r"unit '(root|layers\.\d)'|backward pass \d", message), message
    with pytest.raises(PeerError):  # and it stays so
        for step in (3, 4):
            train(model, step)


@on_ranks(2, timeout=30)
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
def test_a_rank_that_gives_up_a_backward_and_calls_nothing_more(communicator: str) -> None:
    """Rank 1 fails alone, and does something else for long: rank 0 hears of it now."""
    model: Any = FSDP(SmallModel(), communicator=communicator)
    train(model)
    started = time.monotonic()
    if dist.get_rank() == 1:
        fail_alone(model, 2, "backward")
        model.zero_grad()  # where the engine hears of it
        dist.barrier()
        return
    with pytest.raises(PeerError, match=r"rank 1.* gave up backward pass 2 because of an exception there"):
        train(model)
    assert time.monotonic() - started < SECONDS
    dist.barrier()
