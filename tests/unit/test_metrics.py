"""The log line, its numbers, and the metrics file across resumes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchtitan_npu.planning import process_memory
from torchtitan_npu.planning.process_memory import available_bytes, capacity_bytes, peak_resident_bytes
from torchtitan_npu.train.metrics import (
    MetricsWriter,
    StepMetrics,
    format_duration,
    format_learning_rate,
    format_step,
)

# R49, verbatim
LINE = re.compile(
    r"^\[Step (\d+)\] loss=(\d+\.\d{2}|nan|inf), lr=(\d(?:\.\d+)?e-?\d+|0), throughput=(\d+) tokens/s, "
    r"mem=(\d+\.\d)GB/(\d+)GB$"
)


def _metrics(step: int = 100, loss: float = 7.1249, lr: float = 2.7e-4, mem_bytes: int = 0) -> StepMetrics:
    return StepMetrics(
        step=step, loss=loss, grad_norm=1.0, lr=lr, tokens=step * 64, step_time=0.5, data_time=0.1, mem_bytes=mem_bytes
    )


def test_the_line_of_the_article() -> None:
    line = format_step(_metrics(mem_bytes=int(58.2 * 1024**3)), 620.4, 64 * 1024**3)
    assert line == "[Step 100] loss=7.12, lr=2.7e-4, throughput=620 tokens/s, mem=58.2GB/64GB"


@pytest.mark.parametrize("loss", [0.0, 10.823, 1234.5, float("nan"), float("inf")])
@pytest.mark.parametrize("lr", [0.0, 3e-4, 2.97123e-4, 1.0, 9.9999e-5, 1e-12, 20.0])
def test_every_line_matches(loss: float, lr: float) -> None:
    assert LINE.fullmatch(format_step(_metrics(loss=loss, lr=lr), 0.2, 24 * 1024**3))


@pytest.mark.parametrize(
    ("value", "text"),
    [(3e-4, "3e-4"), (2.7e-4, "2.7e-4"), (2.9653e-4, "2.97e-4"), (9.9999e-4, "1e-3"), (0.0, "0"), (1.0, "1e0")],
)
def test_learning_rate(value: float, text: str) -> None:
    assert format_learning_rate(value) == text
    assert float(text) == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize(
    ("seconds", "text"), [(11.2, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (97200, "1 d 3 h")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, resumed_step=0) as writer:
        for step in range(1, 6):
            writer.write(_metrics(step), 128.0, world_size=2)
    with open(writer.path, "a") as file:
        file.write('{"step": 6, "lo')  # the process was killed in the middle of a line
    with MetricsWriter(tmp_path, resumed_step=3) as writer:
        writer.write(_metrics(4, loss=1 / 3), 128.0, world_size=2)
    assert _steps(writer.path) == [1, 2, 3, 4]
    last = json.loads(writer.path.read_text().splitlines()[-1])
    assert last["loss"] == 1 / 3
    assert last["tokens_per_second_per_card"] == 64.0
    assert any(writer.tensorboard_dir.iterdir())


def _board_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory))
    board.Reload()
    return {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_has_what_is_known_and_a_resumed_run_replaces_steps(tmp_path: Path) -> None:
    for resumed, steps in ((0, range(1, 6)), (3, range(4, 6))):
        with MetricsWriter(tmp_path, resumed_step=resumed) as writer:
            for step in steps:
                writer.write(_metrics(step, loss=10.0 * (resumed + step)), 128.0, world_size=2, mfu=0.25)
    scalars = _board_scalars(writer.tensorboard_dir)
    assert scalars["train/loss"] == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 70.0), (5, 80.0)]
    assert scalars["speed/mfu"] == [(step, 0.25) for step in range(1, 6)]
    assert scalars["speed/checkpoint_seconds"] == [(step, 0.0) for step in range(1, 6)]
    # None in _metrics
    assert "train/loss_scale" not in scalars and "memory/allocated_peak_gib" not in scalars


def test_a_fresh_run_keeps_the_file_of_an_earlier_one(tmp_path: Path) -> None:
    for first in (1, 11, 21):
        with MetricsWriter(tmp_path, resumed_step=0) as writer:
            writer.write(_metrics(first), 128.0, world_size=1)
    assert _steps(writer.path) == [21]
    assert _steps(tmp_path / "metrics.1.jsonl") == [1]
    assert _steps(tmp_path / "metrics.2.jsonl") == [11]


def test_memory_is_measured() -> None:
    before = peak_resident_bytes()
    block = bytearray(64 * 1024**2)
    assert peak_resident_bytes() >= before
    assert len(block) < peak_resident_bytes() <= capacity_bytes()


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        ({"memory.max": "max", "memory.current": "5"}, None, None),
        ({"memory.max": "1000", "memory.current": "400"}, 1000, 600),
        ({"memory.max": "1000", "memory.current": "1200"}, 1000, 0),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "100"}, 900, 800),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "100"}, None, None),
        ({}, None, None),
    ],
)
def test_a_cgroup_limits_memory(
    files: dict[str, str], limit: int | None, left: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a limit, or with one above the RAM of 64 MiB, of which 32 are left, those are what there is."""
    (tmp_path / "meminfo").write_text("MemTotal:  65536 kB\nMemFree:  1 kB\nMemAvailable:  32768 kB\n")
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(process_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(process_memory, "_CGROUP", tmp_path)
    assert capacity_bytes() == (64 * 1024**2 if limit is None else limit)
    assert available_bytes() == (32 * 1024**2 if left is None else left)
