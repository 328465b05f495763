"""``profile``: traces with the engine's work in them, and no other numbers than without."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Workspace


def _range_names(path: Path) -> Counter[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_traces_of_two_ranks(make_workspace: Callable[..., Workspace]) -> None:
    plain, profiled = make_workspace("plain"), make_workspace("profiled")
    flags = ["--profile.start", "2", "--profile.steps", "2", "--profile.ranks", "all", "--training.max_steps", "4"]
    result = profiled.train(*flags, ranks=2)
    assert result.returncode == 0, result.stderr
    files = sorted((profiled.logs / "profile").iterdir())
    assert [file.name for file in files] == ["rank-0-steps-2-3.json", "rank-1-steps-2-3.json"]
    assert f"profile of steps 2 to 3: {files[0]}" in result.stdout
    for file in files:
        names = _range_names(file)
        # Two steps of two micro-batches each.
        assert names["forward"] == names["backward"] == 4
        assert names["data"] == names["optimizer"] == 2
        # Two small blocks are one unit. Every micro-batch gathers and reduces each bucket at least once.
        units = {name.removeprefix("reduce ") for name in names if name.startswith("reduce ")}
        assert units == {"root", "layers.0-1"}
        for unit in units:
            assert names[f"reduce {unit}"] >= 4
            assert names[f"gather {unit}"] >= 4 and names[f"wait for {unit}"] >= 4
            assert names[f"launch reduction of {unit}"] == names[f"reduce {unit}"]
        assert names["finish reductions"] == 4

    assert plain.train("--training.max_steps", "4", ranks=2).returncode == 0
    assert profiled.losses() == plain.losses()


def test_training_that_ends_inside_the_profiled_steps_writes_them(make_workspace: Callable[..., Workspace]) -> None:
    work = make_workspace("short", "--profile.start", "3", "--profile.steps", "100", "--training.max_steps", "4")
    result = work.train()
    assert result.returncode == 0, result.stderr
    (file,) = (work.logs / "profile").iterdir()
    assert _range_names(file)["optimizer"] == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--profile.steps", "1", "--profile.ranks", "[0, 1]"], "profile.ranks: 1 must be < WORLD_SIZE, which is 1"),
        (
            ["--profile.steps", "1", "--profile.memory_snapshot", "true"],
            "profile.memory_snapshot is true, and training",
        ),
        (["--profile.memory_snapshot", "true"], "needs profile.steps > 0"),
    ],
)
def test_what_cannot_be_recorded_is_refused(
    make_workspace: Callable[..., Workspace], flags: list[str], message: str
) -> None:
    work = make_workspace("refused")
    result = work.train(*flags)
    assert result.returncode != 0
    assert message in result.stderr
    assert not work.checkpoints.exists()
