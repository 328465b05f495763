"""When a profile is recorded, on which ranks, and what is refused."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_npu.config import Config, ConfigError, config_from_dict
from torchtitan_npu.config.coerce import Mismatch, coerce
from torchtitan_npu.launch import Environment, LaunchError
from torchtitan_npu.train import profiling
from torchtitan_npu.train.profiling import Profiling

GPU = torch.device("cuda", 0)


def _config(**profile: Any) -> Config:
    return config_from_dict(
        {
            "model": {"name": "llama3_debug"},
            "training": {"learning_rate": 1e-3, "max_steps": 20},
            "profile": profile,
        }
    )


class _Recorder:
    """Stands for the profiler and for the memory module of an accelerator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.error: Exception | None = None
        monkeypatch.setattr(profiling, "_make_profile", lambda device: self)
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(memory=self))

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")

    def export_chrome_trace(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(f"trace {Path(path).name}")

    def _record_memory_history(self, enabled: Any = "all", max_entries: int = 0) -> None:
        self.calls.append(f"history {enabled}")

    def _dump_snapshot(self, path: str) -> None:
        self.calls.append(f"snapshot {Path(path).name}")


def _run(profile: Profiling, first: int, last: int) -> list[int]:
    recorded = []
    with profile.around_steps():
        for step in range(first, last + 1):
            profile.before_step(step)
            if profile.recording:
                recorded.append(step)
            profile.after_step(step)
    return recorded


@pytest.mark.parametrize(("first", "last", "recorded"), [(1, 9, [3, 4]), (4, 9, [4]), (5, 9, []), (1, 3, [3])])
def test_steps_that_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int, recorded: list[int]
) -> None:
    """From the start, resumed inside, resumed after, and ended inside."""
    recorder = _Recorder(monkeypatch)
    profile = Profiling(_config(start=3, steps=2), tmp_path, Environment(), torch.device("cpu"))
    assert _run(profile, first, last) == recorded
    assert recorder.calls.count("start") == recorder.calls.count("stop") == (1 if recorded else 0)


@pytest.mark.parametrize(("ranks", "recording"), [("all", [0, 1, 2]), ([0], [0]), ([2, 1], [1, 2])])
def test_ranks_that_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Any, recording: list[int]) -> None:
    _Recorder(monkeypatch)
    found = []
    for rank in range(3):
        environment = Environment(rank, rank, 3, 3)
        profile = Profiling(_config(start=1, steps=1, ranks=ranks), tmp_path, environment, torch.device("cpu"))
        found += [rank] if _run(profile, 1, 1) else []
    assert found == recording


def test_memory_history_of_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = _Recorder(monkeypatch)
    profile = Profiling(_config(start=2, steps=2, memory_snapshot=True), tmp_path, Environment(), GPU)
    _run(profile, 1, 4)
    trace, snapshot = "trace rank-0-steps-2-3.json", "snapshot rank-0-steps-2-3-memory.pickle"
    assert recorder.calls == ["history all", "start", "stop", trace, snapshot, "history None"]


def test_a_trace_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = _Recorder(monkeypatch)
    recorder.error = OSError(28, "No space left on device")
    monkeypatch.setattr(logging.getLogger("torchtitan_npu"), "propagate", True)
    _run(Profiling(_config(start=1, steps=1), tmp_path, Environment(), torch.device("cpu")), 1, 3)
    assert "the profile of steps 1 to 1 could not be written" in caplog.text


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="keeps no history"):
        Profiling(_config(steps=1, memory_snapshot=True), tmp_path, Environment(), torch.device("cpu"))
    npu = SimpleNamespace(type="npu")
    monkeypatch.setattr(profiling, "is_simulated", lambda: True)
    with pytest.raises(LaunchError, match="simulated cards are not supported"):
        Profiling(_config(steps=1), tmp_path, Environment(), npu)  # type: ignore[arg-type]
    Profiling(_config(steps=0), tmp_path, Environment(), npu)  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        Profiling(_config(steps=1), tmp_path / "file", Environment(), torch.device("cpu"))


@pytest.mark.parametrize("ranks", [[], ["x"], [-1], [0.5], "some", 3])
def test_ranks_are_all_or_a_list(ranks: Any) -> None:
    with pytest.raises(ConfigError, match=r"profile\.ranks"):
        _config(steps=1, ranks=ranks)


def test_lists_of_any_length() -> None:
    assert coerce([1, "2", 3], tuple[int, ...]) == (1, 2, 3)
    assert coerce([], tuple[int, ...]) == ()
    with pytest.raises(Mismatch, match="a list, each item an integer"):
        coerce("1", tuple[int, ...])
