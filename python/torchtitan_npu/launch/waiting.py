"""Work that local rank 0 of each machine does, while the others wait for it: as long as it goes on, however long.

A collective would not do: its timeout counts from when the first rank comes, and those inside it cannot say a word. So
the ranks that wait look into the job's store, where the working ones leave a sign of life every second, how far they
are, and how it ended.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchtitan_npu.launch.distributed import PeerFailureError, first_line, gather_rows, job_store
from torchtitan_npu.launch.environment import Environment

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Report = Callable[[str], None]
"""Says how far the work is. It counts as progress when the text differs from the one before."""

_KEY = "torchtitan_npu/once_per_machine"
_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.2
_FIRST_MESSAGE_SECONDS = 4.0
_MESSAGE_SECONDS = 30.0
# Without a sign of life: a rank that is alive gives one even when its disk does not answer.
_SILENCE_SECONDS = 30.0


def once_per_machine(
    action: Callable[[Report], Value], env: Environment, *, what: str, deadline_seconds: float
) -> Value | None:
    """Run ``action`` on local rank 0 of each machine; return when all of them are done. Collective.

    Args:
        what: the work, for messages: "rank 0 <what>".
        deadline_seconds: how long a working rank may take without getting on, before the others give up; 0: for ever.

    Returns:
        What ``action`` returned here, None on the ranks that waited.

    Raises:
        Exception: what ``action`` raised here.
        PeerFailureError: it failed elsewhere, or that rank died or does not get on.
    """
    works = env.local_rank == 0
    if env.world_size == 1:
        return action(lambda text: None)
    store = job_store()
    # The number keeps this call's keys apart from those of other calls, and of the job's life before a restart.
    number = store.add(f"{_KEY}/calls", 1) if env.rank == 0 else 0
    rows = gather_rows([number, works])
    key = f"{_KEY}/{int(rows[0][0])}"
    value = None
    if works:
        with _SignOfLife(store, f"{key}/{env.rank}") as sign:
            try:
                value = action(sign.report)
            except BaseException as error:
                with contextlib.suppress(RuntimeError, OSError):  # the store is gone, too: this error says more
                    store.set(f"{key}/failed", f"rank {env.rank}: {first_line(error)}")
                raise
        store.set(f"{key}/{env.rank}/done", "")
    workers = [rank for rank, row in enumerate(rows) if row[1]]
    _Wait(store, key, env, what, deadline_seconds).for_all(workers)
    return value


class _SignOfLife:
    """A thread that counts, in the store, as long as this process lives. A context manager."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key, self._text = store, key, ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="sign of life", daemon=True)

    def __enter__(self) -> _SignOfLife:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def report(self, text: str) -> None:
        self._text = text

    def _beat(self) -> None:
        beat = 0
        while True:
            beat += 1
            try:
                self._store.set(self._key, f"{beat} {self._text}")
            except (RuntimeError, OSError) as error:
                logger.debug("no sign of life: the store did not answer: %s", error)
            if self._ended.wait(_BEAT_SECONDS):
                return


class _Wait:
    def __init__(self, store: dist.Store, key: str, env: Environment, what: str, deadline_seconds: float) -> None:
        self._store, self._key, self._what, self._deadline_seconds = store, key, what, deadline_seconds
        self._began = time.monotonic()
        self._next_message = self._began + _FIRST_MESSAGE_SECONDS
        # Of each machine one rank speaks: the second, while the first one works, and then the first. Information is
        # shown of rank 0 only.
        self._speaks = env.local_rank <= 1
        self._level = logging.INFO if env.rank == 0 else logging.WARNING

    def for_all(self, workers: list[int]) -> None:
        for rank in workers:
            self._for_one(rank)

    def _for_one(self, rank: int) -> None:
        key = f"{self._key}/{rank}"
        sign, text = "", ""
        lived = got_on = time.monotonic()
        while not self._store.check([f"{key}/done"]):
            if self._store.check([f"{self._key}/failed"]):
                raise PeerFailureError(self._store.get(f"{self._key}/failed").decode("utf-8", "replace"))
            now = time.monotonic()
            latest = self._store.get(key).decode("utf-8", "replace") if self._store.check([key]) else ""
            if latest != sign:
                sign, lived = latest, now
                if latest.partition(" ")[2] != text:
                    text, got_on = latest.partition(" ")[2], now
            self._check(rank, text, silent=now - lived, stuck=now - got_on)
            if self._speaks and now >= self._next_message:
                self._next_message = now + _MESSAGE_SECONDS
                waited = f"waiting for {now - self._began:.0f} s while rank {rank} {self._what}"
                logger.log(self._level, "%s%s", waited, f" ({text})" if text else "")
            time.sleep(_POLL_SECONDS)

    def _check(self, rank: int, text: str, *, silent: float, stuck: float) -> None:
        where = f" (last: {text})" if text else ""
        if silent > _SILENCE_SECONDS:
            raise PeerFailureError(
                f"rank {rank}: no sign of life for {silent:.0f} s while it {self._what}{where}: it died, or its "
                "machine is gone; see its output"
            )
        if stuck > self._deadline_seconds > 0:
            raise PeerFailureError(
                f"rank {rank}: has not got on for {stuck:.0f} s while it {self._what}{where}; see whether its disk "
                "answers, or allow more with HCCL_EXEC_TIMEOUT (seconds; 0: for ever)"
            )
