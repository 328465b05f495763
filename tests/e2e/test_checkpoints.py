"""Checkpoints as a user meets them: in the background, stopped by signals, killed, damaged, without room."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from torchtitan_npu.checkpoint import CheckpointError, CheckpointStore
from torchtitan_npu.checkpoint.manifest import corruption
from torchtitan_npu.cli import train_main
from torchtitan_npu.train import checkpointing
from torchtitan_npu.train.resume import Candidates

from . import kills
from .conftest import Workspace, workspace_maker

ASYNC = "--training.checkpoint.async_save=true"


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not torch.distributed.is_initialized()


def names(work: Workspace) -> list[str]:
    return sorted(path.name for path in work.checkpoints.iterdir())


def run(work: Workspace, *flags: str) -> int:
    """In this process."""
    return train_main(work.arguments("--parallel.strategy", "ddp", *flags))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Six steps, saved at 3 and 6 in the background by one process; not to be changed."""
    work = workspace_maker(tmp_path_factory.mktemp("finished"))("run")
    assert run(work, ASYNC) == 0
    return work


@pytest.fixture
def copy(finished: Workspace, tmp_path: Path) -> Workspace:
    """A copy of ``finished`` that may be changed."""
    shutil.copytree(finished.root, tmp_path / "run")
    return Workspace(tmp_path / "run", finished.data, finished.config)


def test_contents(finished: Workspace) -> None:
    """Issue 5, distributed checkpoints 2: 2 x 2 sequences of 32 tokens a step."""
    meta = json.loads((finished.checkpoints / "step-00000006" / "meta.json").read_text())
    assert (meta["step"], meta["tokens"], meta["learning_rate"]) == (6, 6 * 4 * 32, 2e-3)
    assert meta["data"]["global_sample"] == 6 * 4
    assert meta["config"]["training"]["checkpoint"]["async_save"] is True
    assert meta["config_version"] == 1
    assert meta["versions"]["torch"] == torch.__version__
    seconds = sum(record["step_time"] for record in finished.metrics())
    assert meta["train_seconds"] == pytest.approx(seconds)
    states = json.loads((finished.checkpoints / "step-00000006" / "rank-00000.json").read_text())
    assert states.keys() == {"python", "numpy", "torch"}


def test_saved_in_the_background_continues_bit_by_bit_on_two_ranks(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    """Saved while training goes on, the checkpoint of step 3 is that of step 3."""
    whole = make_workspace("whole", ASYNC, "--training.checkpoint.save_interval", "3")
    result = whole.train(ranks=2)
    assert result.returncode == 0, result.stderr
    assert "training stood still for" in result.stdout
    rest = make_workspace("rest")
    shutil.copytree(whole.checkpoints / "step-00000003", rest.checkpoints / "step-00000003")
    result = rest.train(ranks=2)
    assert result.returncode == 0, result.stderr
    assert rest.losses() == whole.losses()[3:]
    for name in ("__0_0.distcp", "__1_0.distcp"):
        files = [work.checkpoints / "step-00000006" / name for work in (whole, rest)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_corrupt_bytes_are_found_and_named(copy: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    """One bit of a tensor, with every size right: found by its checksum, passed over, and replaced when saved again."""
    newest = copy.checkpoints / "step-00000006"
    tensors = newest / "__0_0.distcp"
    data = bytearray(tensors.read_bytes())
    data[len(data) // 2] ^= 16
    tensors.write_bytes(data)
    losses = copy.losses()
    assert run(copy, "--training.resume", str(newest)) == 1
    assert f"training.resume={newest} cannot be used: its file __0_0.distcp is corrupt" in capfd.readouterr().err
    assert run(copy) == 0
    output = capfd.readouterr()
    assert f"{newest} is passed over: its file __0_0.distcp is corrupt: CRC-32" in output.err
    assert copy.losses() == losses
    assert corruption(newest) is None


def test_a_damaged_newest_does_not_count_as_kept(tmp_path: Path, copy: Workspace) -> None:
    """max_keep 1 must not keep the damaged step 6 and remove the good ones."""
    newest = copy.checkpoints / "step-00000006"
    meta = newest / "meta.json"
    meta.write_text(meta.read_text().replace('"step": 6', '"step": 7'))
    interval = ("--training.checkpoint.save_interval", "1", "--training.checkpoint.max_keep", "1")
    assert run(copy, *interval, "--training.max_steps", "5") == 0
    assert names(copy) == ["step-00000005", "step-00000006"]
    assert corruption(copy.checkpoints / "step-00000005") is None


@pytest.mark.parametrize("change", ["format", "config_version"])
def test_a_newer_version_is_refused(copy: Workspace, capfd: pytest.CaptureFixture[str], change: str) -> None:
    newest = copy.checkpoints / "step-00000006"
    meta = json.loads((newest / "meta.json").read_text())
    meta[change] = 99
    text = json.dumps(meta)
    (newest / "meta.json").write_text(text)
    marker = json.loads((newest / "COMPLETE").read_text())
    marker["files"]["meta.json"] = {"bytes": len(text), "crc32": f"{zlib.crc32(text.encode()):08x}"}
    (newest / "COMPLETE").write_text(json.dumps(marker))
    assert run(copy) == 1
    assert f"its {change} is 99, and this torchtitan-npu reads" in capfd.readouterr().err


def test_another_models_tensors_are_in_a_table(copy: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(copy, "--model.ffn_dim", "96", "--model.n_layers", "3", "--training.max_steps", "9") == 1
    lines = [line.split() for line in capfd.readouterr().err.splitlines()]
    assert ["tensor", "in", "the", "checkpoint", "in", "the", "model"] in lines
    assert any(line[0].endswith("w2.weight") and line[1:] == ["[48,", "88]", "[48,", "96]"] for line in lines if line)
    assert any("layers.2." in line[0] and line[1] == "none" for line in lines if line)


def test_resume_from_a_file(copy: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    path = copy.checkpoints / "step-00000006" / "meta.json"
    assert run(copy, "--training.resume", str(path)) == 1
    assert f"training.resume={path}: is a file" in capfd.readouterr().err


def test_a_directory_without_permission(finished: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    """As nobody, where the test is root: root may read everything."""
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        place.chmod(0o755)
        closed = place / "closed"
        closed.mkdir(mode=0o700 if os.geteuid() == 0 else 0o000)
        store = CheckpointStore(closed / "checkpoints")
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=r"--checkpoint_dir .*closed.* cannot be written: .*ermission"):
                store.prepare()
            with pytest.raises(CheckpointError, match=r"training\.resume=.*closed cannot be read: .*ermission"):
                Candidates(str(closed), CheckpointStore(place)).best()
        finally:
            if root:
                os.seteuid(0)
            closed.chmod(0o700)


def test_kept_for_ever(make_workspace: Callable[..., Workspace]) -> None:
    """Of the steps 1 to 6, one is kept, and the multiples of 2."""
    work = make_workspace("every")
    flags = ["--training.checkpoint.save_interval=1", "--training.checkpoint.max_keep=1", ASYNC]
    assert run(work, *flags, "--training.checkpoint.keep_every=2") == 0
    # 6 is the newest and a multiple, 5 is the newest that counts.
    assert names(work) == [f"step-0000000{step}" for step in (2, 4, 5, 6)]


def test_what_is_not_ours_is_never_removed(copy: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    """A file of the user's in an old checkpoint, a directory that looks like a leftover."""
    (copy.checkpoints / "step-00000003" / "notes.txt").write_text("the best one")
    other = copy.checkpoints / "step-00000099.tmp"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    assert run(copy, "--training.max_steps", "9", "--training.checkpoint.max_keep", "1") == 0
    assert names(copy) == ["step-00000003", "step-00000009", "step-00000099.tmp"]


def test_no_room(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system with 1000 bytes: nothing is written, training goes on, and the end is a failure."""
    work = make_workspace("room")
    real = os.statvfs

    def full(path: object) -> object:
        status = list(real(path))  # type: ignore[arg-type, call-overload]
        status[1], status[4] = 1, 1000
        return os.statvfs_result(status)

    monkeypatch.setattr(os, "statvfs", full)
    assert run(work) == 1
    message = capfd.readouterr().err
    # fp32 weights and two moments of 45,264 parameters, and a step count for each of the 21 tensors.
    assert "has 1,000 bytes free and the checkpoint needs 543," in message
    assert "the checkpoint of step 3 was not saved" in message and "training goes on" in message
    assert [record["step"] for record in work.metrics()] == [1, 2, 3, 4, 5, 6]
    assert names(work) == []


@pytest.mark.parametrize("mode", ["stop", "continue"])
def test_the_directory_vanishes(
    make_workspace: Callable[..., Workspace],
    capfd: pytest.CaptureFixture[str],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before the save of step 3, in the background; stop ends training at the step that sees it."""
    work = make_workspace("vanished", ASYNC, f"--training.checkpoint.on_save_error={mode}")
    begin = CheckpointStore.begin

    def vanish(store: CheckpointStore, step: int, needed_bytes: int) -> Path:
        if step == 3:
            shutil.rmtree(store.root)
        elif not store.root.exists():
            store.root.mkdir()
        return begin(store, step, needed_bytes)

    monkeypatch.setattr(CheckpointStore, "begin", vanish)
    assert run(work, "--training.max_steps", "12") == 1
    message = capfd.readouterr().err
    assert "the checkpoint of step 3 was not saved: rank 0: " in message and "No such file" in message
    last = work.metrics()[-1]["step"]
    if mode == "continue":
        assert last == 12 and names(work) == ["step-00000006", "step-00000009", "step-00000012"]
    else:
        assert 3 < last <= 6 and not work.checkpoints.exists()


def test_minutes(make_workspace: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is ten seconds later. With half a minute: saves at steps that are not the last."""
    now = iter(range(0, 100_000, 10))
    monkeypatch.setattr(checkpointing.time, "monotonic", lambda: float(next(now)))
    work = make_workspace("minutes", "--training.checkpoint.save_interval_minutes", "0.5")
    assert run(work, "--training.checkpoint.save_interval=0") == 0
    assert len(names(work)) > 1


@pytest.mark.parametrize(("number", "whole_job"), [(signal.SIGUSR1, False), (signal.SIGTERM, True)])
def test_a_signal_saves_and_stops_all_ranks(
    make_workspace: Callable[..., Workspace], number: signal.Signals, whole_job: bool
) -> None:
    """To one rank or to all; status 0, and the next run goes on from the step after which it stopped."""
    work = make_workspace("signal", ASYNC, "--training.checkpoint.save_interval", "0")
    with work.start_ranks(2, "--training.max_steps", "1000000") as ranks:
        deadline = time.monotonic() + 60
        while kills.last_step(work) < 2:
            assert time.monotonic() < deadline and ranks[0].returncode is None, ranks.output()
            time.sleep(0.05)
        for copy in ranks.copies if whole_job else ranks.copies[1:]:
            copy.send_signal(number)
        assert ranks.wait(30) == [0, 0], ranks.output()
    outputs = ranks.output()
    step = kills.last_step(work)
    path = work.checkpoints / f"step-{step:08d}"
    assert f"stopped by {number.name} after step {step} of 1000000, saved in {path}" in outputs[0]
    assert corruption(path) is None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs is not permitted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_disk_that_fills_while_saving(
    make_workspace: Callable[..., Workspace],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    small_disk: Path,
    seed: int,
) -> None:
    """After the look at the free space, another program leaves a random number of bytes: too few for step 4. Removing
    it lets step 6 be saved.
    """
    work = make_workspace("disk", ASYNC, "--training.checkpoint.save_interval=2")
    begin = CheckpointStore.begin
    other = small_disk / "other"

    def fill(store: CheckpointStore, step: int, needed_bytes: int) -> Path:
        other.unlink(missing_ok=True)
        place = begin(store, step, needed_bytes)
        if step == 4:
            status = os.statvfs(small_disk)
            left = random.Random(seed).randrange(500_000)
            other.write_bytes(bytes(status.f_bavail * status.f_frsize - left))
        return place

    monkeypatch.setattr(CheckpointStore, "begin", fill)
    work.flags += ["--checkpoint_dir", str(small_disk / "checkpoints")]
    assert run(work) == 1
    message = capfd.readouterr().err
    assert "the checkpoint of step 4 was not saved: rank 0: " in message and "No space left on device" in message
    assert "Traceback" not in message
    assert sorted(p.name for p in (small_disk / "checkpoints").iterdir()) == ["step-00000002", "step-00000006"]


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A few of what ``kills.py`` does by hundreds."""
    counts = kills.chain(tmp_path, kills=4, seed=2, limit=0.5)
    assert counts["lives"] >= 4 and counts["one"] + counts["all"] > 0 and counts["limited"] > 0
