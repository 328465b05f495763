"""A rank dies: the others stop within seconds, name it, and leave nothing behind."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kills import assert_no_more_shared_memory_files_than, kill_one, shared_memory_files
from pool import RankGroup
from twin import SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, PeerError


def die_in_step(where: str, communicator: str) -> tuple[str, float]:
    """Rank 1 kills itself in the second step. The others: their error, and how long it took."""
    twin = Twin(SmallModel, communicator=communicator)
    twin.train(1)
    dist.barrier()
    started = time.monotonic()

    def die(*_: Any) -> None:
        if twin.rank == 1:
            time.sleep(0.3)  # the others have left the barrier by then: its messages would be lost with the socket
            os.kill(os.getpid(), signal.SIGKILL)

    if where == "forward":
        twin.model.layers[1].register_forward_pre_hook(die)
    else:
        twin.model.layers[1].register_forward_hook(lambda m, a, o: o.register_hook(die) and None)
    with pytest.raises(PeerError) as caught:
        next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    with pytest.raises(PeerError):
        twin.model(tokens_for(0, twin.rank))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_killed_rank(world_size: int, communicator: str, where: str) -> None:
    files = shared_memory_files()
    group = RankGroup(world_size)
    try:
        outcomes = group.call(die_in_step, timeout=30, where=where, communicator=communicator)
        assert outcomes[1].error == f"died, exit code {-signal.SIGKILL}"
        for rank in {0, 2} & set(range(world_size)):
            assert not outcomes[rank].error, outcomes[rank].error + group.output(rank)
            message, seconds = outcomes[rank].value
            assert seconds < 5, "the deadline of a wait is 1,836 s"
            # The ranks hear of it from the system, or from each other.
            assert re.search(r"rank 1( \(pid \d+\))? died while rank \d waited for it in", message)
    finally:
        group.close()
    assert not any(process.is_alive() for process in group.processes)
    assert_no_more_shared_memory_files_than(files)


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
def test_kills_at_random_moments(communicator: str) -> None:
    """Two of them; ``tests/dist/kills.py`` does more. What is checked is in ``kill_one``."""
    choice = random.Random(communicator)
    for _ in range(2):
        kill_one(choice, communicator=communicator)


def leave_early() -> str:
    """Rank 1 returns from its program while rank 0 goes on."""
    model = FSDP(SmallModel())
    if dist.get_rank() == 1:
        del model
        import gc

        gc.collect()
        return ""
    with pytest.raises(PeerError) as caught, torch.no_grad():
        for _ in range(3):
            model(tokens_for(0, 0))
    return str(caught.value)


def test_a_rank_that_drops_its_model() -> None:
    group = RankGroup(2)
    try:
        outcomes = group.call(leave_early, timeout=30)
        assert not outcomes[0].error, outcomes[0].error
        assert "rank 1" in outcomes[0].value
    finally:
        group.close()


def raise_on_rank_1() -> str:
    """An exception of rank 1 alone, caught there: rank 0 must not wait for ever for what rank 1 will not do."""
    model = FSDP(SmallModel())
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    with pytest.raises(PeerError) as caught:
        next_token_loss(model, tokens_for(0, 0)).backward()
    return str(caught.value)


def test_a_rank_that_ends_with_an_exception() -> None:
    """Its process lives on (here: waiting for the next test), but the frame that held the model is gone."""
    group = RankGroup(2)
    try:
        outcomes = group.call(raise_on_rank_1, timeout=30)
        assert "ValueError: bad batch" in outcomes[1].error
        assert not outcomes[0].error, outcomes[0].error
        assert "rank 1" in outcomes[0].value
    finally:
        group.close()


def stumble_alone() -> str:
    """Rank 1 alone fails in backward, catches it and goes on; rank 0 waits for what rank 1 will not send."""
    model = FSDP(SmallModel())

    def stumble(gradient: torch.Tensor) -> None:
        if dist.get_rank() == 1:
            raise KeyError("rank 1 only")

    model.layers[1].register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
    loss = next_token_loss(model, tokens_for(0, 0))
    if dist.get_rank() == 1:
        with pytest.raises(KeyError, match="rank 1 only"):
            loss.backward()
        model.zero_grad()
        with pytest.raises(PeerError) as caught:
            next_token_loss(model, tokens_for(1, 0))
    else:
        with pytest.raises(PeerError) as caught:
            loss.backward()
    return str(caught.value)


def test_one_rank_gives_up_a_backward() -> None:
    group = RankGroup(2)
    try:
        outcomes = group.call(stumble_alone, timeout=30)
        assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
        assert all("gave up backward pass 1" in outcome.value for outcome in outcomes), [o.value for o in outcomes]
    finally:
        group.close()
