"""Kills training at random moments, resumes it again and again, and compares with a run that nobody disturbed.

    python tests/e2e/kills.py --kills 200 --seed 1

Each life of the run: two ranks train from where the last one left; a random time after its first step, one rank or both
get SIGKILL. Then there must be a checkpoint whose every byte is right, no older than the save interval allows. Some
lives have a disk that is full at a random byte: they must go on training, and end with status 1. The last life ends by
itself; the losses of all steps must be those of the undisturbed run, bit by bit.
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

from processes import Ranks

from e2e.conftest import Workspace, workspace_maker

INTERVAL = 2
RANKS = 2
LIFE_SECONDS = 60


def start(work: Workspace, flags: list[str], directory: Path, disk_bytes: int | None = None) -> Ranks:
    """Start the ranks; what they write goes to ``directory``."""
    directory.mkdir()
    arguments = ["" if disk_bytes is None else str(disk_bytes), *work.arguments(*flags)]
    return Ranks("e2e.kills:live", [arguments] * RANKS, directory)


def live(arguments: list[str]) -> int:
    """One rank: the first argument is the size of its disk, the others are train.py's."""
    from torchtitan_npu.cli import train_main

    if arguments[0]:
        fill_disk_after(int(arguments[0]))
    return train_main(arguments[1:])


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


def wait_for_step(ranks: Ranks) -> None:
    """Until this life has done a step."""
    deadline = time.monotonic() + LIFE_SECONDS
    while "[Step " not in ranks.output()[0]:
        assert time.monotonic() < deadline, "no step was done"
        assert all(copy.returncode is None for copy in ranks.copies), ranks.output()
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
    # A slow machine may save nothing at first; then there are more lives, until one has had a full disk.
    while counts["lives"] < kills or (limit > 0 and counts["limited"] == 0):
        life = counts["lives"]
        assert life < 10 * kills, counts
        is_async = rng.random() < 0.7
        limited = newest > 0 and rng.random() < limit
        more = [*flags, f"--training.checkpoint.async_save={str(is_async).lower()}"]
        # A disk below the size of a rank's tensors.
        disk_bytes = rng.randrange(330_000) if limited else None
        more += ["--training.max_steps", str(newest + 5) if limited else "1000000"]
        with start(work, more, directory / f"life-{life}", disk_bytes) as ranks:
            if limited:
                assert ranks.wait(LIFE_SECONDS) == [1] * RANKS, ranks.output()
                text = "".join(ranks.output())
                assert "No space left on device" in text and "Traceback" not in text, text
                assert "training goes on" in text, text
                counts["limited"] += 1
            else:
                wait_for_step(ranks)
                time.sleep(rng.random() * 0.3)
                victims = ranks.copies if rng.random() < 0.5 else [rng.choice(ranks.copies)]
                for copy in victims:
                    copy.send_signal(signal.SIGKILL)
                statuses = ranks.wait(LIFE_SECONDS)
                assert all(status in (-signal.SIGKILL, 1) for status in statuses), ranks.output()
                counts["all" if len(victims) == RANKS else "one"] += 1
            text = "".join(ranks.output())
        if newest:
            assert f"resumed from {store.path(newest)}" in text, text
        done = last_step(work)
        good = [step for step in store.steps() if corruption(store.path(step)) is None]
        if limited:
            assert good[-1] == newest
        else:
            # A save that was under way is lost, too; in the background, one interval of training beside it.
            allowed = INTERVAL * (2 if is_async else 1)
            assert done - (good[-1] if good else 0) <= allowed, (done, good, text)
            counts["most_lost"] = max(counts["most_lost"], done - (good[-1] if good else 0))
        counts["leftovers"] += len(list(work.checkpoints.glob("*.tmp")))
        assert not newest or (good and good[-1] >= newest), (newest, good)
        newest = good[-1] if good else 0
        counts["lives"] += 1
    end = str(newest + 3)
    for run in (work, calm):
        with start(run, [*flags, "--training.max_steps", end], directory / f"{run.root.name}-end") as ranks:
            assert ranks.wait(LIFE_SECONDS) == [0] * RANKS, ranks.output()
    assert work.losses() == calm.losses()
    assert not list(work.checkpoints.glob("*.tmp"))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=0.25, help="share of lives with a full disk, instead of a kill")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        counts = chain(Path(directory), kills=args.kills, seed=args.seed, limit=args.limit)
        sys.stdout.write(f"{json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
