"""What a rank makes of its environment: R51, R52."""

from __future__ import annotations

import pytest

from torchtitan_npu.launch import Environment, LaunchError, read_environment, read_timeouts

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
