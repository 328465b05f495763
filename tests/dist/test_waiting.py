"""Ranks that wait for one of their machine: what they say, and how they end when it fails, dies or hangs."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from pool import RankGroup, on_ranks

from torchtitan_npu.launch import distributed, once_per_machine, waiting
from torchtitan_npu.launch.distributed import PeerFailureError
from torchtitan_npu.launch.environment import Environment

WHAT = "converts the data"


@contextmanager
def job(machines: list[int], **constants: float) -> Iterator[tuple[Environment, list[tuple[int, str]]]]:
    """This rank's place among machines of so many ranks each, and what is logged: (level, message)."""
    rank = dist.get_rank()
    places = [(local, size) for size in machines for local in range(size)]
    env = Environment(rank, places[rank][0], dist.get_world_size(), places[rank][1], from_torchrun=True)
    records: list[tuple[int, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append((record.levelno, record.getMessage()))  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_store", dist.distributed_c10d._get_default_store())
        for name, value in {"_POLL_SECONDS": 0.01, "_BEAT_SECONDS": 0.05, **constants}.items():
            patch.setattr(waiting, name, value)
        waiting.logger.addHandler(handler)
        waiting.logger.setLevel(logging.INFO)
        try:
            yield env, records
        finally:
            waiting.logger.removeHandler(handler)
            waiting.logger.setLevel(logging.NOTSET)


def wait_for(key: str) -> None:
    """Not the store's own wait, during which no other thread can use it."""
    while not dist.distributed_c10d._get_default_store().check([key]):
        time.sleep(0.01)


@on_ranks(1, 4)
def test_the_first_of_each_machine_works_and_the_others_wait() -> None:
    """Machines of 3 and 1 ranks. Rank 3 works longer, and rank 0 waits for it too. Twice, for the keys in the store."""
    for _ in range(2):
        with job([3, 1] if dist.get_world_size() == 4 else [1]) as (env, _records):

            def work(report: waiting.Report, rank: int = env.rank) -> float:
                report("some")
                time.sleep(0.1 * rank)
                return time.monotonic()

            ended = once_per_machine(work, env, what=WHAT, deadline_seconds=60)
            returned = time.monotonic()
        assert (ended is None) == (env.local_rank > 0)
        assert returned >= max(row[0] for row in distributed.gather_rows([ended or 0.0]))


@on_ranks(3)
def test_they_say_for_how_long_and_how_far_it_is() -> None:
    """One of the two that wait speaks; not before the first message is due."""
    with job([3], _FIRST_MESSAGE_SECONDS=0.2, _MESSAGE_SECONDS=0.2) as (env, records):

        def work(report: waiting.Report) -> None:
            for number in range(70):
                report(f"{number} MiB")
                time.sleep(0.01)

        once_per_machine(work, env, what=WHAT, deadline_seconds=60)
    if env.rank != 1:
        assert not records
        return
    assert len(records) >= 2
    for level, message in records:
        assert level == logging.WARNING
        assert message.startswith("waiting for ") and " s while rank 0 converts the data (" in message
        assert message.endswith(" MiB)")


@on_ranks(3)
def test_a_failure_ends_them_all() -> None:
    """Also the one that waits for another machine's rank, which would work for ever."""
    with job([2, 1]) as (env, _):

        def work(report: waiting.Report) -> None:
            if env.rank == 2:
                raise ValueError("the disk is full\nand more")
            wait_for(f"{waiting._KEY}/seen")

        if env.rank == 1:
            with pytest.raises(PeerFailureError, match="^rank 2: the disk is full$"):
                once_per_machine(work, env, what=WHAT, deadline_seconds=0)
            dist.distributed_c10d._get_default_store().set(f"{waiting._KEY}/seen", "")
        else:
            with pytest.raises(ValueError if env.rank == 2 else PeerFailureError, match="the disk is full"):
                once_per_machine(work, env, what=WHAT, deadline_seconds=0)


@on_ranks(2)
def test_a_rank_that_lives_but_does_not_get_on() -> None:
    """Signs of life come every 0.05 s and are not progress; the deadline is 0.5 s."""
    with job([2]) as (env, _):
        key = f"{waiting._KEY}/stuck"

        def work(report: waiting.Report) -> None:
            report("a.jsonl: 5 of 9 MiB")
            wait_for(key)

        if env.rank == 0:
            once_per_machine(work, env, what=WHAT, deadline_seconds=0.5)
            return
        with pytest.raises(PeerFailureError, match=r"rank 0: has not got on for \d+ s while it converts the data \(last"):
            once_per_machine(work, env, what=WHAT, deadline_seconds=0.5)
        dist.distributed_c10d._get_default_store().set(key, "")


def killed_at_work() -> str:
    with job([2], _SILENCE_SECONDS=0.5) as (env, _):

        def work(report: waiting.Report) -> None:
            report("a.jsonl: 5 of 9 MiB")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)

        try:
            once_per_machine(work, env, what=WHAT, deadline_seconds=60)
        except PeerFailureError as error:
            return str(error)
    return "no error"


def test_a_rank_that_dies() -> None:
    group = RankGroup(2)
    dead, waited = group.call(killed_at_work)
    group.kill()
    assert dead.error == "died, exit code -9"
    assert waited.value is not None, waited.error
    assert waited.value.startswith("rank 0: no sign of life for ")
    assert "while it converts the data (last: a.jsonl: 5 of 9 MiB): it died" in waited.value
