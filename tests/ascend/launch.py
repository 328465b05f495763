"""Runs Python programs as ranks on simulated cards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from simulated import find_simulator, simulator_environment

# The interpreter that has torch_npu, where that is not the one that runs the tests.
NPU_PYTHON = os.environ.get("TT_SIM_PYTHON", sys.executable)


@dataclass
class Result:
    """How one rank ended."""

    rank: int
    returncode: int
    output: str
    seconds: float


def run_ranks(
    command: list[str], ranks: int, timeout: float = 60, python: str = sys.executable, fail: bool = True, **more: str
) -> list[Result]:
    """Starts `python command` once per rank, with its number for "{rank}", and waits for all.

    What still runs at the timeout is killed.
    With `fail`, a rank that does not end with 0 fails the test, and all outputs are shown.
    """
    folder = find_simulator()
    processes = []
    for rank in range(ranks):
        environment = simulator_environment(
            folder, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), **{"TT_SIM_MEMORY_MB": "4096", **more}
        )
        processes.append(
            subprocess.Popen(
                # Unbuffered: programs that end by a signal or os._exit lose nothing that they have printed.
                [python, "-u", *(part.replace("{rank}", str(rank)) for part in command)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
                errors="replace",
            )
        )
    begin = time.monotonic()
    results = []
    try:
        ended: dict[int, float] = {}
        outputs = {}
        while len(ended) < ranks and time.monotonic() - begin < timeout:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - begin
            time.sleep(0.02)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for rank, process in enumerate(processes):
            outputs[rank] = process.communicate()[0]
            results.append(Result(rank, process.returncode, outputs[rank], ended.get(rank, timeout)))
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if fail and any(result.returncode != 0 for result in results):
        raise AssertionError(report(results))
    return results


def report(results: list[Result]) -> str:
    lines = []
    for result in results:
        lines.append(f"--- rank {result.rank}: exit {result.returncode} after {result.seconds:.1f} s\n{result.output}")
    return "\n".join(lines)
