"""Kills `prepare` with SIGKILL at each thing that it asks of the file system, and lets the same command finish.

    python prepare_kills.py WORKDIR jsonl|bin

WORKDIR holds ``in``. Prints how many kills there were. Every run is a fork: nothing is imported twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data import bin_writer, prepare, prepare_output, prepare_read
from torchtitan_npu.data.input_file import InputFile

WORK = Path(sys.argv[1])
NAME = f"out.{sys.argv[2]}"
COMMAND = ["--input", str(WORK / "in"), "--output", str(WORK / "out" / NAME), "--tokenizer", "byte", "--eos"]


def run(kill_at: int) -> int:
    """The wait status of one run that is killed before event number ``kill_at`` (0: never)."""
    pid = os.fork()
    if pid == 0:
        events = 0

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal events
                events += 1
                if events == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args, **kwargs)

            return call

        for owner, name in (
            (os, "fsync"),
            (os, "replace"),
            (os, "unlink"),
            (os, "rmdir"),
            (InputFile, "read"),
            (prepare_output._Rows, "append"),
            (bin_writer.BinWriter, "_write"),
        ):
            setattr(owner, name, counted(getattr(owner, name)))
        os._exit(main(COMMAND))
    return os.waitpid(pid, 0)[1]


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (WORK / "out").iterdir() if path.is_file()}


if __name__ == "__main__":
    prepare.JOURNAL_SECONDS = 0.0  # after every chunk
    prepare_read.CHUNK_BYTES = 300
    (WORK / "out").mkdir()
    assert run(0) == 0
    expected = contents()
    kill_at = 0
    while True:
        kill_at += 1
        shutil.rmtree(WORK / "out")
        (WORK / "out").mkdir()
        status = run(kill_at)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        # Nothing half-written under a final name, never the .idx without its .bin, never a JSONL without its mark.
        finals = contents()
        assert all(expected[name] == data for name, data in finals.items()), (kill_at, list(finals))
        assert "out.idx" not in finals or "out.bin" in finals
        assert "out.jsonl" not in finals or "out.jsonl.tokenizer" in finals
        assert run(0) == 0
        assert contents() == expected, kill_at
    sys.stdout.write(f"{kill_at - 1}\n")
