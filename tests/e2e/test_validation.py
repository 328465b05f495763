"""The loss on held-out data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .conftest import Workspace

LINE = re.compile(r"validation after step (\d+): loss=(\d+\.\d{4}), perplexity=[\d.]+, over (\d+) labels in \d+\.\d s$")


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    """Eleven documents of 31 tokens: 340 tokens after the first, in 11 samples of 32 labels, less those that begin a
    document (10 of 340)."""
    path = tmp_path / "held_out.jsonl"
    with open(path, "w") as file:
        for document in range(11):
            file.write(json.dumps({"tokens": [(document * 5 + position * 3) % 61 for position in range(31)]}) + "\n")
    return path


def lines(output: str) -> list[tuple[int, float, int]]:
    found = (LINE.search(line) for line in output.splitlines())
    return [(int(match[1]), float(match[2]), int(match[3])) for match in found if match]


def test_the_same_however_it_is_cut_and_without_effect_on_training(
    make_workspace: Callable[..., Workspace], held_out: Path
) -> None:
    flags = ["--validation.interval", "4", "--validation.data_dir", str(held_out)]
    plain = make_workspace("plain")
    assert plain.train(ranks=2).returncode == 0
    runs = {
        # Batches of 2 x 2 samples, so that the last one has one too many; 1 x 4; 2 x 3 with replicas
        "fsdp": (2, []),
        "one": (1, ["--training.batch_size", "4", "--training.gradient_accumulation_steps", "2"]),
    }
    results = {}
    for name, (ranks, more) in runs.items():
        work = make_workspace(name, *flags, *more)
        result = work.train(ranks=ranks)
        assert result.returncode == 0, result.stderr
        results[name] = lines(result.stdout)
        recorded = [record["validation_loss"] for record in work.metrics()]
        assert [loss is None for loss in recorded] == [True, True, True, False, True, False]
        assert [round(loss, 4) for loss in recorded if loss is not None] == [loss for _, loss, _ in results[name]]
        board = EventAccumulator(str(work.logs / "tensorboard")).Reload()
        assert [event.step for event in board.Scalars("validation/loss")] == [4, 6]
        if name == "fsdp":
            assert work.losses() == plain.losses()
    assert [(step, labels) for step, _, labels in results["fsdp"]] == [(4, 330), (6, 330)]
    assert [loss for _, loss, _ in results["fsdp"]] == pytest.approx([loss for _, loss, _ in results["one"]], abs=2e-4)
    assert results["fsdp"][0][1] > results["fsdp"][1][1]


def test_first_samples_only_with_replicas(make_workspace: Callable[..., Workspace], held_out: Path) -> None:
    work = make_workspace("ddp", "--parallel.strategy", "ddp", "--validation.max_samples", "3")
    result = work.train("--validation.interval", "6", "--validation.data_dir", str(held_out), ranks=2)
    assert result.returncode == 0, result.stderr
    # 3 x 32 labels less those at 31, 62 and 93
    assert [(step, labels) for step, _, labels in lines(result.stdout)] == [(6, 93)]


def test_missing_data_is_named_before_anything_is_built(make_workspace: Callable[..., Workspace]) -> None:
    result = make_workspace("missing").train("--validation.interval", "5", "--validation.data_dir", "nowhere.jsonl")
    assert result.returncode == 1
    assert "validation.data_dir" in result.stderr + result.stdout and "nowhere.jsonl" in result.stderr + result.stdout
    result = make_workspace("no_path").train("--validation.interval", "5")
    assert result.returncode == 2 and "validation.interval: 5 needs validation.data_dir" in result.stderr.replace(
        "--", ""
    )
