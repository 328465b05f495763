"""Runs a function on all ranks of a group of processes, and re-uses the processes from test to test.

``@on_ranks(1, 2)`` turns a function into a test whose body runs on every rank of a group of one and of two processes.
Its parameters are filled by pytest and sent to the ranks, so they must pickle.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import forkserver

from torchtitan_npu.launch.device import BACKENDS

DEVICE = os.environ.get("TT_TEST_DEVICE", "cpu")
"""Type of the device that models of these tests are on. ``npu``: torch_npu finds a card for every rank."""
COMMUNICATOR = {"cpu": "shared memory", "npu": "hccl"}[DEVICE]
"""Name of what models there choose by themselves."""
GRACE_SECONDS = 5.0
"""How long the other ranks may go on after one has failed."""
CLOSE_SECONDS = 5.0


@dataclass
class Outcome:
    """How a function ended on one rank."""

    rank: int
    value: Any = None
    error: str = ""
    """Traceback, or what became of the process; empty: it returned ``value``."""
    finished: bool = True
    """The process is ready for the next function."""


class RankGroup:
    """``size`` processes of one process group (gloo)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.tests = 0
        self.directory = Path(tempfile.mkdtemp(prefix="torchtitan-npu-ranks-"))
        self._output_before = [0] * size
        context = forkserver()
        # The server of the store lives here, so that it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes, self.pipes = [], []
        for rank in range(size):
            mine, its = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self._store.port, its, str(self.directory)), daemon=True
            )
            process.start()
            its.close()
            self.processes.append(process)
            self.pipes.append(mine)

    def call(self, body: Callable[..., Any], timeout: float = 60, **kwargs: Any) -> list[Outcome]:
        """Runs ``body(**kwargs)`` on all ranks; never raises for what happens there."""
        paths = [self._output_path(rank) for rank in range(self.size)]
        self._output_before = [path.stat().st_size if path.exists() else 0 for path in paths]
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send((body.__module__, body.__qualname__, kwargs))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while len(outcomes) < self.size:
            waiting: dict[Connection, int] = {p: r for r, p in enumerate(self.pipes) if r not in outcomes}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                for rank in waiting.values():
                    outcomes[rank] = Outcome(
                        rank, error=f"still running after the deadline\n{self.stack(rank)}", finished=False
                    )
                break
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    value, error = pipe.recv()
                    outcomes[rank] = Outcome(rank, value, error)
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(CLOSE_SECONDS)
                    outcomes[rank] = Outcome(
                        rank, error=f"died, exit code {self.processes[rank].exitcode}", finished=False
                    )
                if outcomes[rank].error:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return [outcomes[rank] for rank in range(self.size)]

    def stack(self, rank: int) -> str:
        """What the threads of a rank are doing."""
        pid = self.processes[rank].pid
        if pid is None or not self.processes[rank].is_alive():
            return "(not alive)"
        path = self.directory / f"stack.{rank}"
        before = path.stat().st_size
        os.kill(pid, signal.SIGUSR2)
        stack, deadline = b"", time.monotonic() + CLOSE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.2)
            written = path.read_bytes()[before:]
            if written and written == stack:
                break  # nothing more comes
            stack = written
        return stack.decode(errors="replace")

    def output(self, rank: int) -> str:
        """The end of what a rank wrote to its standard output and error during the last call."""
        path = self._output_path(rank)
        return path.read_bytes()[self._output_before[rank] :].decode(errors="replace")[-4000:] if path.exists() else ""

    def _output_path(self, rank: int) -> Path:
        return self.directory / f"output.{rank}"

    def close(self) -> None:
        """Ends the processes, by force if need be."""
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):
                pipe.send(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        shutil.rmtree(self.directory, ignore_errors=True)


# A model that communicates through c10d leaves process groups behind, whose threads wake up now and then: hundreds of
# them take most of two cores.
TESTS_PER_GROUP = 40


class RankPool:
    """One group per world size, a new one after ``TESTS_PER_GROUP`` tests."""

    def __init__(self) -> None:
        self._groups: dict[int, RankGroup] = {}

    def run(
        self, size: int, body: Callable[..., Any], *, timeout: float = 60, own_group: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Values of ``body(**kwargs)`` by rank. Fails the test with the tracebacks of all ranks that did not return."""
        group = RankGroup(size) if own_group else self._groups.pop(size, None) or RankGroup(size)
        outcomes = group.call(body, timeout, **kwargs)
        failed = [outcome for outcome in outcomes if outcome.error]
        if not failed:
            group.tests += 1
            if own_group or group.tests >= TESTS_PER_GROUP:
                group.close()
            else:
                self._groups[size] = group
            return [outcome.value for outcome in outcomes]
        report = [f"{len(failed)} of {size} ranks failed"]
        for outcome in failed:
            report += [f"---- rank {outcome.rank}", outcome.error.rstrip()]
            output = group.output(outcome.rank).strip()
            if output:
                report += [f"---- output of rank {outcome.rank}", output]
        group.kill()  # its ranks may be out of step
        pytest.fail("\n".join(report), pytrace=False)

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()


def on_ranks(*world_sizes: int, timeout: float = 60, own_group: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Makes a test of a function: its body runs on every rank of a group of each size.

    ``own_group``: in new processes, which no other test uses.
    """

    def decorate(body: Callable[..., Any]) -> Any:
        @functools.wraps(body)
        def test(rank_pool: RankPool, world_size: int, **kwargs: Any) -> None:
            rank_pool.run(world_size, body, timeout=timeout, own_group=own_group, **kwargs)

        names = ["rank_pool", "world_size", *inspect.signature(body).parameters]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


# ---- in the rank processes -------------------------------------------------------------------------------------------


def _serve(rank: int, size: int, port: int, pipe: Connection, directory: str) -> None:
    output = os.open(os.path.join(directory, f"output.{rank}"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = open(os.path.join(directory, f"stack.{rank}"), "w")  # noqa: SIM115  (open as long as the process lives)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that runs the tests
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(size)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if DEVICE != "cpu":
        torch.get_device_module(DEVICE).set_device(rank)
    dist.init_process_group(BACKENDS[DEVICE], store=store, rank=rank, world_size=size)
    gc.collect()
    gc.freeze()  # the modules of torch are not looked through again after each test, nor for optimizers at each wrap
    while (message := _receive(pipe)) is not None:
        pipe.send(_call(*message))
    os._exit(0)  # without the destructors of process groups that other ranks have left


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:  # the process that runs the tests is gone
        return None


def _call(module: str, name: str, kwargs: dict[str, Any]) -> tuple[Any, str]:
    try:
        function: Any = importlib.import_module(module)
        for part in name.split("."):
            function = getattr(function, part)
        value, error = inspect.unwrap(function)(**kwargs), ""
    except BaseException:  # reported to the test, whatever it is
        value, error = None, traceback.format_exc()
    gc.collect()  # models of this test
    return value, error
