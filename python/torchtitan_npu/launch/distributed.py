"""The process group, and the few small collectives that the trainer needs besides its gradients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from torchtitan_npu.launch.device import BACKENDS
from torchtitan_npu.launch.environment import Environment, LaunchError
from torchtitan_npu.launch.timeouts import Timeouts

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_ARRIVED = "torchtitan_npu/arrived"
_FAILED = "torchtitan_npu/failed"
_THREADS_SETTLE_SECONDS = 0.1
_store: dist.Store | None = None


class PeerFailureError(RuntimeError):
    """Another rank failed; the message is ``rank i: its message``."""


def connect(env: Environment, timeouts: Timeouts, device: torch.device) -> None:
    """Create the default process group, for tensors on the CPU and on ``device``; one process that nothing launched
    gets a group of its own.

    Raises:
        LaunchError: not all ranks arrived within ``timeouts.connect_seconds``; the message names the missing ones.
    """
    global _store
    store: dist.Store
    if env.from_torchrun:
        try:
            store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeouts.connect_seconds)))
        except (dist.DistError, TimeoutError, OSError) as error:
            raise LaunchError(
                f"rank {env.rank} cannot reach the job's store at MASTER_ADDR:MASTER_PORT within "
                f"{timeouts.connect_seconds} s (HCCL_CONNECT_TIMEOUT): {error}"
            ) from error
        _wait_for_all(store, env, timeouts.connect_seconds)
    else:
        store = dist.HashStore()
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=env.rank, world_size=env.world_size, timeout=timeouts.process_group
    )
    _store = store


def disconnect() -> None:
    """Destroy the process group of a single process, at the end of its run; do nothing when there is none.

    ProcessGroupGloo's destructor joins its threads while it holds the interpreter lock, which a thread that has just
    finished a collective may still need to release the tensors: a deadlock. So the threads get time to finish first. A
    process of a job with several ranks does not come here: it leaves without destroying anything.
    """
    global _store
    if dist.is_initialized():
        time.sleep(_THREADS_SETTLE_SECONDS)
        dist.destroy_process_group()
    _store = None


def job_store() -> dist.Store:
    """The store of the job's ranks; where somebody else than ``connect`` made the process group, that group's."""
    return dist.distributed_c10d._get_default_store() if _store is None else _store


def _wait_for_all(store: dist.Store, env: Environment, seconds: int) -> None:
    # A restarted job may meet the keys of its former life in the agent's store; the run number keeps them apart.
    run = store.add(f"{_ARRIVED}/{env.rank}/count", 1)
    store.set(f"{_ARRIVED}/{run}/{env.rank}", "")
    deadline = time.monotonic() + seconds
    keys = [f"{_ARRIVED}/{run}/{rank}" for rank in range(env.world_size)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise LaunchError(
                f"ranks {missing} of {env.world_size} did not arrive within {seconds} s (HCCL_CONNECT_TIMEOUT); see "
                "their output, and check that every node was started with the same --nnodes and --nproc_per_node"
            )
        time.sleep(0.05)


def announce_failure(rank: int, message: str) -> None:
    """Leave a message for the other ranks, whose next collective will break. Never raises."""
    if _store is None:
        return
    try:
        if _store.add(f"{_FAILED}/count", 1) == 1:
            _store.set(_FAILED, f"rank {rank}: {message}")
    except (RuntimeError, OSError) as error:
        logger.debug("the failure could not be announced to the other ranks: %s", error)


def announced_failure(wait_seconds: float = 2.0) -> str | None:
    """The message of the rank that failed first, or None when none has left one within ``wait_seconds``."""
    if _store is None:
        return None
    deadline = time.monotonic() + wait_seconds
    try:
        while not _store.check([_FAILED]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
        return _store.get(_FAILED).decode("utf-8", "replace")
    except (RuntimeError, OSError) as error:
        logger.debug("the store did not answer: %s", error)
        return None


def gather_rows(row: list[float], group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """Every rank's ``row`` (the same length everywhere), in rank order, exact in fp64. Collective."""
    mine = torch.tensor(row, dtype=torch.float64)
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, mine, group=group)
    return [other.tolist() for other in rows]


def gather_texts(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Every rank's ``text``, in rank order. Collective."""
    data = text.encode("utf-8")
    sizes = [int(row[0]) for row in gather_rows([len(data)], group)]
    longest = max(sizes)
    if longest == 0:
        return [""] * len(sizes)
    mine = torch.tensor(list(data.ljust(longest, b"\0")), dtype=torch.uint8)
    texts = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(texts, mine, group=group)
    return [bytes(other.tolist())[:size].decode("utf-8") for other, size in zip(texts, sizes, strict=True)]


def together(action: Callable[[], Value]) -> Value:
    """Run ``action`` on every rank; if it fails on one, all ranks raise. Collective.

    Raises:
        Exception: what ``action`` raised here.
        PeerFailureError: it succeeded here and failed elsewhere.
    """
    failure: Exception | None = None
    value: Value | None = None
    try:
        value = action()
    except Exception as error:
        failure = error
    texts = gather_texts("" if failure is None else first_line(failure))
    if failure is not None:
        raise failure
    for rank, text in enumerate(texts):
        if text:
            raise PeerFailureError(f"rank {rank}: {text}")
    return cast(Value, value)


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type where it has none."""
    return str(error).partition("\n")[0] or type(error).__name__
