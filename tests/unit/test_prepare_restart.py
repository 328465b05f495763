"""`prepare` after a stop: kills at every moment, full disks, other commands in between, two runs at once."""

from __future__ import annotations

import fcntl
import gzip
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data import prepare as prepare_module
from torchtitan_npu.data import prepare_read
from torchtitan_npu.data.input_file import InputFile

REPOSITORY = Path(__file__).resolve().parents[2]


class Stop(BaseException):
    """Stands for a kill inside of this process."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks, and a journal after each of them."""
    monkeypatch.setattr(prepare_module, "JOURNAL_SECONDS", 0.0)
    monkeypatch.setattr(prepare_read, "CHUNK_BYTES", 1000)


def write_inputs(folder: Path) -> Path:
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text("".join(f"file {number} line {i}\n" for i in range(200)))
    return folder


def command(folder: Path, out: Path, *flags: str) -> list[str]:
    return ["--input", str(folder), "--output", str(out), "--tokenizer", "byte", *flags]


def stop_after(monkeypatch: pytest.MonkeyPatch, argv: list[str], reads: int) -> None:
    """Runs until that many blocks of input have been read."""
    done = 0
    read = InputFile.read

    def counted(self: InputFile, size: int) -> bytes:
        nonlocal done
        done += 1
        if done > reads:
            raise Stop
        return read(self, size)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(InputFile, "read", counted)
        main(argv)


@pytest.mark.parametrize("output_format", ["jsonl", "bin"])
def test_killed_at_every_step(tmp_path: Path, output_format: str) -> None:
    """3 files of 2 to 3 chunks, one compressed; a run makes at least one read, write, sync and rename for each."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.txt").write_text("".join(f"line {i}\n" for i in range(80)))
    (folder / "b.txt.gz").write_bytes(gzip.compress("".join(f"ünï {i}\n\n" for i in range(60)).encode()))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"a\n{i}"}) + "\n{\n" for i in range(25)))
    program = [sys.executable, str(REPOSITORY / "tests" / "unit" / "prepare_kills.py"), str(tmp_path), output_format]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 40


def test_sigkill_with_several_processes(tmp_path: Path) -> None:
    """At three moments after the first journal; the workers end too, and the result is that of one process."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "in.txt").write_text("".join(f"line {i}\n" for i in range(60_000)))
    assert main(command(folder, tmp_path / "whole.bin")) == 0
    out = tmp_path / "out.bin"
    program = (
        "import sys; from torchtitan_npu.data import prepare; prepare.JOURNAL_SECONDS = 0.05; "
        "from torchtitan_npu.data import prepare_read; prepare_read.CHUNK_BYTES = 5000; "
        "from torchtitan_npu.cli_prepare import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", program, *command(folder, out, "--num_proc", "2")]
    journal = tmp_path / "out.bin.unfinished" / "journal"
    for delay in (0.0, 0.03, 0.1):
        process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, start_new_session=True)
        before = journal.stat().st_mtime_ns if journal.exists() else 0
        while not (journal.exists() and journal.stat().st_mtime_ns != before) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        # stderr ends when the last process that has it open, a worker, has ended
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL and not out.exists()
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "continuing the run that was stopped after" in done.stderr
    for ending in (".bin", ".idx"):
        assert out.with_suffix(ending).read_bytes() == (tmp_path / "whole").with_suffix(ending).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["in", "out.bin", "out.idx", "whole.bin", "whole.idx"]


@pytest.mark.parametrize("output_format", ["jsonl", "bin"])
def test_a_full_disk(tmp_path: Path, output_format: str) -> None:
    """The limit on a file's size stands for it; it leaves what is done, and the same command goes on there."""
    folder = write_inputs(tmp_path / "in")
    out = tmp_path / f"out.{output_format}"
    assert main(command(folder, tmp_path / f"whole.{output_format}")) == 0
    limit = (tmp_path / f"whole.{output_format}").stat().st_size * 2 // 3
    program = (
        "import resource, sys; from torchtitan_npu.data import prepare, prepare_read; prepare.JOURNAL_SECONDS = 0.0; "
        f"prepare_read.CHUNK_BYTES = 1000; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
        "from torchtitan_npu.cli_prepare import main; sys.exit(main(sys.argv[1:]))"
    )
    argv = [sys.executable, "-c", program, *command(folder, out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"{out} is not written: [Errno 27] File too large" in done.stderr
    assert "the same command goes on there" in done.stderr
    assert not out.exists()
    assert main(command(folder, out)) == 0
    assert out.read_bytes() == (tmp_path / f"whole.{output_format}").read_bytes()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_interruption_keeps_what_is_done_and_the_old_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_inputs(tmp_path / "in"), tmp_path / "out.jsonl"
    out.write_text("old")
    with caplog.at_level(logging.INFO):
        stop_after(monkeypatch, command(folder, out), 6)
        assert out.read_text() == "old"
        assert f"kept in {out}.unfinished: the same command goes on there" in caplog.text
        assert main(command(folder, out)) == 0
    assert "continuing the run that was stopped after" in caplog.text
    assert out.read_text().count("\n") == 600
    assert not Path(f"{out}.unfinished").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("option", "--eos was auto, is always"),
        ("begun input", "1.txt has changed, or is another one"),
        ("fewer inputs", "there are fewer input files"),
        ("tokens", "cannot be continued"),
        ("journal", "its journal is damaged"),
    ],
)
@pytest.mark.parametrize("output_format", ["jsonl", "bin"])
def test_what_cannot_be_continued_begins_anew(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    message: str,
    output_format: str,
) -> None:
    folder, out = write_inputs(tmp_path / "in"), tmp_path / f"out.{output_format}"
    stop_after(monkeypatch, command(folder, out), 8)  # inside of the second file
    flags: tuple[str, ...] = ()
    work = Path(f"{out}.unfinished")
    if change == "option":
        flags = ("--eos",)
    elif change == "begun input":
        (folder / "1.txt").write_text("other\n")
    elif change == "fewer inputs":
        (folder / "1.txt").unlink()
        (folder / "2.txt").unlink()
    elif change == "tokens":
        with (work / ("rows" if output_format == "jsonl" else "tokens")).open("r+b") as file:
            file.truncate(200)
    else:
        (work / "journal").write_text("{")
    with caplog.at_level(logging.INFO):
        assert main(command(folder, out, *flags)) == 0
    assert message in caplog.text and "Starting anew" in caplog.text
    assert main(command(folder, tmp_path / f"whole.{output_format}", *flags)) == 0
    assert out.read_bytes() == (tmp_path / f"whole.{output_format}").read_bytes()


def test_inputs_that_were_not_begun_may_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = write_inputs(tmp_path / "in"), tmp_path / "out.jsonl"
    stop_after(monkeypatch, command(folder, out), 3)  # inside of the first file
    (folder / "1.txt").unlink()
    (folder / "3.txt").write_text("new\n")
    with caplog.at_level(logging.INFO):
        assert main(command(folder, out)) == 0
    assert "continuing the run" in caplog.text
    assert main(command(folder, tmp_path / "whole.jsonl")) == 0
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_two_runs_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, out = write_inputs(tmp_path / "in"), tmp_path / "out.jsonl"
    work = Path(f"{out}.unfinished")
    work.mkdir()
    with (work / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(command(folder, out)) == 1
        assert "another process is preparing this output" in caplog.text
        assert (work / "lock").exists()
    assert main(command(folder, out)) == 0
