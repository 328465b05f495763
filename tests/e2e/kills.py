"""Kills training at random moments, resumes it again and again, and compares with a run that nobody disturbed.

    python tests/e2e/kills.py --kills 200 --seed 1

Each life of the run: two ranks (forked, so that nothing is imported twice) train from where the last one left; a random
time after its first step, one rank or both get SIGKILL. Then there must be a checkpoint whose every byte is right, no
older than the save interval allows. Some lives have a disk that is full at a random
byte: they must go on training, and end with status 1. The last life ends by itself; the losses of all steps must be
those of the undisturbed run, bit by bit.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ports import free_port

from e2e.conftest import Workspace, workspace_maker

INTERVAL = 2
RANKS = 2
LIFE_SECONDS = 60


def start(work: Workspace, flags: list[str], output: Path, disk_bytes: int | None = None) -> list[int]:
    """Fork the ranks; the process ids."""
    port = str(free_port())
    pids = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                os.environ.update(
                    RANK=str(rank),
                    LOCAL_RANK=str(rank),
                    WORLD_SIZE=str(RANKS),
                    LOCAL_WORLD_SIZE=str(RANKS),
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
                descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
                if disk_bytes is not None:
                    fill_disk_after(disk_bytes)
                from torchtitan_npu.cli import train_main

                status = train_main(work.arguments(*flags))
            finally:
                os._exit(status)
        pids.append(pid)
    return pids


def fill_disk_after(disk_bytes: int) -> None:
    """In this process, a disk with room for ``disk_bytes`` of each tensor file: what is beyond is not written.

    A real full disk is in test_checkpoints.py, where one can be mounted; RLIMIT_FSIZE would hit logs and metrics, too.
    """
    from torchtitan_npu.checkpoint import writer

    class Stream(writer._SummingStream):
        def _out(self, view: memoryview) -> None:
            room = disk_bytes - self._raw.tell()
            if len(view) > room:
                super()._out(view[:room])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super()._out(view)

    writer._SummingStream = Stream  # type: ignore[misc]


def finish(pids: list[int]) -> list[int]:
    """Wait for the processes; their exit statuses (a signal's is negative). Kills and fails after LIFE_SECONDS."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + LIFE_SECONDS
    while len(statuses) < len(pids):
        for pid in pids:
            if pid not in statuses:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in pids:
                if pid not in statuses:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise AssertionError(f"ranks did not end within {LIFE_SECONDS} s")
        time.sleep(0.01)
    return [statuses[pid] for pid in pids]


def wait_for_step(output: Path, pids: list[int]) -> None:
    """Until this life has done a step."""
    deadline = time.monotonic() + LIFE_SECONDS
    while not output.exists() or "[Step " not in output.read_text():
        assert time.monotonic() < deadline, "no step was done"
        ended = [pid for pid in pids if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
        assert not ended, output.read_text()
        time.sleep(0.005)


def last_step(work: Workspace) -> int:
    try:
        lines = (work.logs / "metrics.jsonl").read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def chain(directory: Path, *, kills: int, seed: int, limit: float) -> dict[str, int]:
    """Run all lives; raises AssertionError where one breaks a promise. Returns counts of what happened."""
    from torchtitan_npu.checkpoint import CheckpointStore
    from torchtitan_npu.checkpoint.manifest import corruption

    rng = random.Random(seed)
    make = workspace_maker(directory)
    work, calm = make("killed"), make("calm")
    flags = ["--training.checkpoint.max_keep", "2", f"--training.checkpoint.save_interval={INTERVAL}"]
    store = CheckpointStore(work.checkpoints)
    counts = {"lives": 0, "one": 0, "all": 0, "limited": 0, "leftovers": 0, "most_lost": 0}
    newest = 0
    for life in range(kills):
        output = directory / f"life-{life}.txt"
        is_async = rng.random() < 0.7
        limited = newest > 0 and rng.random() < limit
        more = [*flags, f"--training.checkpoint.async_save={str(is_async).lower()}"]
        if limited:
            # Below the size of a rank's tensors.
            pids = start(work, [*more, "--training.max_steps", str(newest + 5)], output, rng.randrange(330_000))
            assert finish(pids) == [1] * RANKS, output.read_text()
            text = output.read_text()
            assert "No space left on device" in text and "Traceback" not in text, text
            assert "training goes on" in text, text
            counts["limited"] += 1
        else:
            pids = start(work, [*more, "--training.max_steps", "1000000"], output)
            wait_for_step(output, pids)
            time.sleep(rng.random() * 0.3)
            victims = pids if rng.random() < 0.5 else [rng.choice(pids)]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            statuses = finish(pids)
            assert all(status in (-signal.SIGKILL, 1) for status in statuses), output.read_text()
            counts["all" if len(victims) == RANKS else "one"] += 1
        if newest:
            assert f"resumed from {store.path(newest)}" in output.read_text(), output.read_text()
        done = last_step(work)
        good = [step for step in store.steps() if corruption(store.path(step)) is None]
        if limited:
            assert good[-1] == newest
        else:
            # A save that was under way is lost, too; in the background, one interval of training beside it.
            allowed = INTERVAL * (2 if is_async else 1)
            assert done - (good[-1] if good else 0) <= allowed, (done, good, output.read_text())
            counts["most_lost"] = max(counts["most_lost"], done - (good[-1] if good else 0))
        counts["leftovers"] += len(list(work.checkpoints.glob("*.tmp")))
        assert not newest or (good and good[-1] >= newest), (newest, good)
        newest = good[-1] if good else 0
        counts["lives"] += 1
    end = str(newest + 3)
    for run in (work, calm):
        output = directory / f"{run.root.name}.txt"
        assert finish(start(run, [*flags, "--training.max_steps", end], output)) == [0] * RANKS, output.read_text()
    assert work.losses() == calm.losses()
    assert not list(work.checkpoints.glob("*.tmp"))
    return counts


def preload() -> None:
    """Import what a run needs, once, before forking."""
    import torchtitan_npu.train.main  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.25, help="share of lives with a full disk, instead of a kill")
    args = parser.parse_args()
    preload()
    with tempfile.TemporaryDirectory() as directory:
        counts = chain(Path(directory), kills=args.kills, seed=args.seed, limit=args.limit)
        sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
