"""Processes that have imported torch and the trainer already: copies of one that did it once.

A Python that starts anew spends about five seconds of CPU time on imports. A copy has everything else of a process of
its own: environment, output, signals, exit status.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch.distributed as dist

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "pytest",
    "torchtitan_npu.cli",
    "torchtitan_npu.fsdp",
    "torchtitan_npu.train.main",
]
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The environment variables that make a process a rank."""


def forkserver() -> ForkServerContext:
    """Makes copies of a process that has imported ``PRELOAD``, and has no threads; it starts with the first copy."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def clean_environment() -> dict[str, str]:
    """For a new process that is not a rank of anything."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH}
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}  # whoever asks for more threads does not spin
    return environment | quiet | {"PYTHONUNBUFFERED": "1"}


class Copy:
    """A copy that runs ``function(arguments)`` as a program does its ``main``; ``function`` is ``"module:name"``."""

    def __init__(
        self, function: str, arguments: Sequence[str], environment: Mapping[str, str], stdout: int, stderr: int
    ) -> None:
        """``stdout`` and ``stderr``: open file descriptors, which stay the caller's."""
        outputs = (_Descriptor(stdout), _Descriptor(stderr))
        self.process = forkserver().Process(
            target=_main, args=(function, list(arguments), dict(environment), *outputs), daemon=True
        )
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid

    @property
    def returncode(self) -> int | None:
        """None: it still runs; negative: the signal that ended it."""
        return self.process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        """Ends it if it runs; the stacks of its threads go to its standard error."""
        if self.returncode is None:
            self.send_signal(signal.SIGABRT)
            self.process.join(5)
            self.process.kill()
        self.process.join()


class Ranks:
    """Copies that are the ranks of one job, as torchrun would have started them.

    As a context they are ended when it is left. Like torchrun's, their store outlives them.
    """

    def __init__(self, function: str, arguments: Sequence[Sequence[str]], directory: Path) -> None:
        """``arguments`` of each rank, whose output goes to files in ``directory``. One rank alone is a process that
        nothing launched."""
        size = len(arguments)
        self._directory = directory
        self._store = None
        environment = clean_environment()
        if size > 1:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            environment |= {
                "WORLD_SIZE": str(size),
                "LOCAL_WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        self.copies = []
        for rank in range(size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
            with open(self._path("stdout", rank), "ab") as stdout, open(self._path("stderr", rank), "ab") as stderr:
                outputs = (stdout.fileno(), stderr.fileno())
                self.copies.append(Copy(function, arguments[rank], environment | place, *outputs))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for copy in self.copies:
            copy.stop()

    def __getitem__(self, rank: int) -> Copy:
        return self.copies[rank]

    def wait(self, timeout: float) -> list[int]:
        """Exit statuses by rank. TimeoutExpired after ``timeout`` seconds, with what all that still ran were doing."""
        deadline = time.monotonic() + timeout
        for copy in self.copies:
            copy.process.join(max(0.0, deadline - time.monotonic()))
        late = [copy for copy in self.copies if copy.returncode is None]
        if late:
            for copy in late:
                copy.stop()
            report = "\n".join(f"---- rank {rank}\n{text}" for rank, text in enumerate(self.output()))
            raise subprocess.TimeoutExpired(f"{len(late)} of {len(self.copies)} ranks\n{report}", timeout)
        return [copy.process.exitcode for copy in self.copies if copy.process.exitcode is not None]

    def output(self) -> list[str]:
        """What each rank has written so far."""
        return [out + err for out, err in zip(self.stdout(), self.stderr(), strict=True)]

    def stdout(self) -> list[str]:
        return [self._path("stdout", rank).read_text() for rank in range(len(self.copies))]

    def stderr(self) -> list[str]:
        return [self._path("stderr", rank).read_text() for rank in range(len(self.copies))]

    def _path(self, name: str, rank: int) -> Path:
        return self._directory / f"{name}.{rank}"


def run(function: str, arguments: Sequence[str], *, ranks: int = 1, timeout: float) -> subprocess.CompletedProcess[str]:
    """``function(arguments)`` on all ranks of a job, to its end: the first status ≠ 0, what ranks wrote one by one."""
    with tempfile.TemporaryDirectory(prefix="torchtitan-npu-copies-") as directory:
        with Ranks(function, [arguments] * ranks, Path(directory)) as job:
            statuses = job.wait(timeout)
        stdout, stderr = "".join(job.stdout()), "".join(job.stderr())
    status = next((status for status in statuses if status), 0)
    return subprocess.CompletedProcess([function, *arguments], status, stdout, stderr)


class _Descriptor:
    """A file descriptor on its way into a copy."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> Any:
        return _Arrived, (reduction.DupFd(self._number),)


class _Arrived:
    def __init__(self, duplicate: Any) -> None:
        self.number: int = duplicate.detach()


# ---- in the copy -----------------------------------------------------------------------------------------------------


def _main(function: str, arguments: list[str], environment: dict[str, str], stdout: _Arrived, stderr: _Arrived) -> None:
    os.dup2(stdout.number, 1)
    os.dup2(stderr.number, 2)
    os.close(stdout.number)
    os.close(stderr.number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    gc.freeze()  # what was imported is not looked through again
    os.environ.clear()
    os.environ.update(environment)
    module, _, name = function.partition(":")
    sys.argv = [name, *arguments]
    sys.exit(getattr(importlib.import_module(module), name)(arguments))
