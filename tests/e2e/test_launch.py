"""What a rank makes of its environment: R51, R52; and that it leaves a process as it was."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from torchtitan_npu.cli import main
from torchtitan_npu.launch import Environment, LaunchError, read_environment, read_timeouts

from .conftest import Workspace

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_torchrun_environment() -> None:
    assert read_environment(TORCHRUN) == Environment(3, 1, 4, 2, from_torchrun=True)


def test_without_torchrun_there_is_one_process() -> None:
    assert read_environment({"MASTER_ADDR": "10.0.0.1"}) == Environment(0, 0, 1, 1, from_torchrun=False)


@pytest.mark.parametrize("name", sorted(TORCHRUN))
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(LaunchError, match=f"{name} is not set"):
        read_environment({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"RANK": "4"}, "RANK=4 must be less than WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be less than LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 must be at most WORLD_SIZE=4"),
        ({"RANK": "0"}, "LOCAL_RANK=1 must be at most RANK=0"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE=four is not a whole number"),
        ({"RANK": "-1"}, "RANK=-1 is not a whole number"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not in 1..65535"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        read_environment(TORCHRUN | change)


def test_all_problems_are_listed_together() -> None:
    with pytest.raises(LaunchError) as caught:
        read_environment({"RANK": "9", "WORLD_SIZE": "2"})
    assert all(name in str(caught.value) for name in ("RANK=9", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def test_default_timeouts() -> None:
    timeouts = read_timeouts({})
    assert (timeouts.connect_seconds, timeouts.exec_seconds, timeouts.warnings) == (120, 1836, ())
    # The process group waits longer than both: 1836 + 60.
    assert timeouts.process_group.total_seconds() == 1896


def test_timeouts_of_the_environment() -> None:
    timeouts = read_timeouts({"HCCL_CONNECT_TIMEOUT": "7200", "HCCL_EXEC_TIMEOUT": "300"})
    assert timeouts.process_group.total_seconds() == 7260
    assert "HCCL_EXEC_TIMEOUT=300 is below the default of 1836" in timeouts.warnings[0]
    never = read_timeouts({"HCCL_EXEC_TIMEOUT": "0"})
    assert never.process_group.days >= 365 and not never.warnings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_CONNECT_TIMEOUT", "119"),
        ("HCCL_CONNECT_TIMEOUT", "7201"),
        ("HCCL_EXEC_TIMEOUT", "-1"),
        ("HCCL_EXEC_TIMEOUT", "1h"),
    ],
)
def test_a_timeout_out_of_range(name: str, value: str) -> None:
    with pytest.raises(LaunchError, match=f"{name}={value} must be a whole number of seconds in "):
        read_timeouts({name: value})


def _state() -> dict[str, Any]:
    """Of this process: what others in it share with a run."""
    ours = logging.getLogger("torchtitan_npu")
    return {
        "logging": (ours.level, ours.propagate, list(ours.handlers), list(logging.getLogger().handlers)),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        # torch sets inductor's when it is imported.
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR_")},
        "deterministic": torch.get_deterministic_debug_mode(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "process group": torch.distributed.is_initialized(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


@pytest.mark.parametrize("flags", [(), ("--model.ffn_dim", "96"), ("--dry_run",)], ids=["trains", "fails", "plans"])
def test_a_run_leaves_the_process_as_it_was(
    make_workspace: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """A program that calls ``main`` may do other things afterwards, also when the run has failed (here: it does not fit
    the checkpoint)."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    work = make_workspace("run", "--training.deterministic", "true", "--training.checkpoint.async_save", "true")
    before = _state()
    assert main(["train", *work.arguments()]) == 0
    status = main(["train", *work.arguments("--training.max_steps", "9", *flags)])
    assert status == (1 if "--model.ffn_dim" in flags else 0)
    assert _state() == before
    open_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [file for file in open_files if str(work.root) in file]
