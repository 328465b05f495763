"""Kills a rank at a random moment, over and over: the others must end within seconds, with an error, and nothing may be
left behind.

    python tests/dist/kills.py --kills 40 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kills  # itself, by the name under which the ranks import it
import torch
import torch.distributed.checkpoint as dcp
from pool import RankGroup
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP

LIMIT_SECONDS = 20.0
"""Far below every timeout, far above what it takes on a busy machine."""


@dataclass
class Kill:
    """One kill, and what came of it."""

    communicator: str
    victim: int
    phase: str
    """What the victim was in."""
    phases: set[str]
    """What all ranks were in when they ended: a survivor may be a step behind."""
    errors: dict[int, str]
    """Of the other ranks."""
    seconds: float
    """From the kill to the last error."""


def train_until_it_fails(communicator: str, directory: str) -> str:
    """Builds a model, then trains, evaluates and saves until something is raised; returns that."""
    me = torch.distributed.get_rank()
    phases = os.open(Path(directory, f"phase.{me}"), os.O_CREAT | os.O_WRONLY)

    def enter(phase: str) -> None:
        os.pwrite(phases, f"{phase:10}".encode(), 0)  # at once: the kill may come at any time

    try:
        enter("init")
        model = FSDP(SmallModel(), communicator=communicator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(1_000_000):
            enter("forward")
            loss = next_token_loss(model, tokens_for(step, me))
            enter("backward")
            loss.backward()
            enter("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            if step % 4 == 3:
                enter("checkpoint")
                dcp.save({"model": model.state_dict()}, checkpoint_id=str(Path(directory, "checkpoint")))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def kill_one(choice: random.Random, world_size: int = 3, communicator: str | None = None) -> Kill:
    """In new processes; AssertionError if anything is left or a rank goes on."""
    communicator = communicator or choice.choice(["auto", "c10d"])
    victim, delay = choice.randrange(world_size), choice.uniform(0.0, 1.5)
    files = shared_memory_files()
    group = RankGroup(world_size)
    killed_at: list[float] = []
    with tempfile.TemporaryDirectory() as directory:

        def kill() -> None:
            phase = Path(directory, f"phase.{victim}")
            deadline = time.monotonic() + 60
            while not phase.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(delay)
            pid = group.processes[victim].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            killed_at.append(time.monotonic())

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            outcomes = group.call(kills.train_until_it_fails, timeout=90, communicator=communicator, directory=directory)
            ended_at = time.monotonic()
            killer.join()
            phases = [Path(directory, f"phase.{rank}").read_text().strip() for rank in range(world_size)]
        finally:
            group.close()
    errors = {outcome.rank: outcome.value or outcome.error for outcome in outcomes if outcome.rank != victim}
    result = Kill(communicator, victim, phases[victim], set(phases), errors, ended_at - killed_at[0])
    assert outcomes[victim].error == f"died, exit code {-signal.SIGKILL}", outcomes[victim]
    survivors = [outcome for outcome in outcomes if outcome.rank != victim]
    if "checkpoint" in result.phases:  # in torch's own collectives one may wait for another that has raised, as long as that lives
        assert any(outcome.finished for outcome in survivors), f"nobody has noticed: {result}"
    else:
        assert all(outcome.finished for outcome in survivors), f"a rank goes on: {result}"
        assert result.seconds < LIMIT_SECONDS, result
    assert "no error" not in errors.values(), result
    if result.phases <= {"forward", "backward"}:  # in the others, torch's own collectives or nobody may be first to see it
        assert any(re.search(rf"rank {victim}\b", error) for error in errors.values()), result
    assert not any(process.is_alive() for process in group.processes)
    assert_no_more_shared_memory_files_than(files)
    return result


def shared_memory_files() -> set[str]:
    """Without the semaphores of Python's multiprocessing, of which nothing here makes any."""
    files = os.listdir("/dev/shm") if Path("/dev/shm").is_dir() else []
    return {file for file in files if not file.startswith("sem.mp-")}


def assert_no_more_shared_memory_files_than(files: set[str]) -> None:
    """What other programs on this machine have there for a moment goes away by itself."""
    deadline = time.monotonic() + 5
    while shared_memory_files() - files and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory_files() <= files, shared_memory_files() - files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=3)
    arguments = parser.parse_args()
    choice = random.Random(arguments.seed)
    for number in range(1, arguments.kills + 1):
        kill = kill_one(choice, arguments.ranks)
        first = next(iter(kill.errors.values())).splitlines()[0]
        print(f"{number:3} {kill.communicator:5} rank {kill.victim} in {kill.phase:10} {kill.seconds:4.1f} s  {first}")
        sys.stdout.flush()
    print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
