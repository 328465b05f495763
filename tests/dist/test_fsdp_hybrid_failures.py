"""A rank of one replica dies or stops: the ranks of all replicas end within seconds, and say why."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankGroup
from twin import SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu import _C
from torchtitan_npu.fsdp import FSDP, PeerError

MESH = [[0, 1], [2, 3]]


def run(body: Any, **kwargs: Any) -> list[Any]:
    """Outcomes by rank, in processes of their own."""
    group = RankGroup(4)
    try:
        outcomes = group.call(body, timeout=40, **kwargs)
        for outcome in outcomes:
            outcome.error += group.output(outcome.rank) if outcome.error else ""
        return outcomes
    finally:
        group.close()


def die_in_step(where: str, communicator: str) -> tuple[str, float]:
    twin = Twin(SmallModel, device_mesh=MESH, communicator=communicator)
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
        next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
def test_a_killed_rank_ends_all_replicas(communicator: str, where: str) -> None:
    """Rank 1 shares memory with rank 0, and its shard with rank 3; rank 2 hears of it from rank 3."""
    outcomes = run(die_in_step, where=where, communicator=communicator)
    assert outcomes[1].error.startswith(f"died, exit code {-signal.SIGKILL}")
    for rank in (0, 2, 3):
        assert not outcomes[rank].error, outcomes[rank].error
        message, seconds = outcomes[rank].value
        assert seconds < 15, "the deadline of a wait is 1,836 s"
        assert "rank 1" in message or "a peer died" in message or "ranks 1, 3" in message, message


def raise_alone(communicator: str) -> str:
    """An exception of rank 1 alone, which leaves its model behind; its process lives on."""
    model: Any = FSDP(SmallModel(), device_mesh=MESH, communicator=communicator)
    if dist.get_rank() == 1:
        raise ValueError("bad batch")
    with pytest.raises(PeerError) as caught:
        next_token_loss(model, tokens_for(0, 0)).backward()
    return str(caught.value)


def test_an_exception_on_one_rank_ends_all_replicas() -> None:
    outcomes = run(raise_alone, communicator="auto")
    assert "ValueError: bad batch" in outcomes[1].error
    for rank in (0, 2, 3):
        assert not outcomes[rank].error, outcomes[rank].error
        assert "rank 1" in outcomes[rank].value, outcomes[rank].value


def stumble_in_one_replica(where: str) -> str:
    """Both ranks of the second replica give a backward up, catch the exception and go on; the first ends its own."""
    model: Any = FSDP(SmallModel(), device_mesh=MESH)

    def stumble(gradient: torch.Tensor) -> None:
        if dist.get_rank() >= 2:
            raise KeyError("second replica only")

    module = model.get_submodule(where)
    handle = module.register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
    loss = next_token_loss(model, tokens_for(0, 0))
    if dist.get_rank() < 2:
        with pytest.raises(PeerError) as caught:
            loss.backward()
        return str(caught.value)
    with pytest.raises(KeyError):
        loss.backward()
    model.zero_grad()
    handle.remove()
    with pytest.raises(PeerError) as caught:
        for _ in range(3):
            next_token_loss(model, tokens_for(0, 0)).backward()
    return str(caught.value)


@pytest.mark.parametrize("where", ["layers.1", "embed"])
def test_one_replica_gives_a_backward_up(where: str) -> None:
    """Between buckets of one size (the next backward's sum meets another one of this), and before the last, larger one
    (which its sum cannot meet)."""
    outcomes = run(stumble_in_one_replica, where=where)
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    for outcome in outcomes:
        assert any(text in outcome.value for text in ("come apart", "given", "failed")), outcome.value


def stop_early() -> str:
    """The second replica takes one step less."""
    model: Any = FSDP(SmallModel(), device_mesh=MESH)
    next_token_loss(model, tokens_for(0, 0)).backward()
    if dist.get_rank() >= 2:
        return ""
    with pytest.raises(PeerError) as caught:
        next_token_loss(model, tokens_for(0, 0)).backward()
    return str(caught.value)


def test_one_replica_takes_fewer_steps() -> None:
    """The partner says by itself that it is gone, or the other rank of the replica was told so first."""
    outcomes = run(stop_early)
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    for rank in (0, 1):
        assert "has closed its communicator. All ranks must run the same number of steps" in outcomes[rank].value


def stay_away() -> str:
    """The second replica comes to no step, and lives on until the first has given up."""
    os.environ["HCCL_EXEC_TIMEOUT"] = "1"
    model: Any = FSDP(SmallModel(), device_mesh=MESH)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() >= 2:
        store.wait(["rank 0 gave up", "rank 1 gave up"])
        return ""
    with pytest.raises(PeerError) as caught:
        next_token_loss(model, tokens_for(0, 0)).backward()
    store.set(f"rank {dist.get_rank()} gave up", "")
    return str(caught.value)


def test_a_replica_that_does_not_come() -> None:
    """Rank 0 and 1 wait as long as HCCL_EXEC_TIMEOUT says, or one hears it from the other."""
    outcomes = run(stay_away)
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    for rank in (0, 1):
        assert "waited 1 seconds for the sum of bucket" in outcomes[rank].value, outcomes[rank].value


def decide_apart() -> str:
    """As if the second replica's ranks were on machines of their own."""
    if dist.get_rank() >= 2:
        _C.shm_identity = lambda: f"machine of rank {dist.get_rank()}"  # type: ignore[method-assign]
    twin = Twin(SmallModel, device_mesh=MESH)
    twin.train(1)
    return twin.state.engine.communicator_name


def test_replicas_on_one_machine_and_on_several_decide_alike() -> None:
    outcomes = run(decide_apart)
    assert [outcome.error or outcome.value for outcome in outcomes] == ["c10d inside and c10d between 2 replicas"] * 4
