"""What is said before step 1 about ``bucket_cap_mb``: by what tune has measured, or else by counting."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from test_tune import candidate

from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.planning import measured_caps
from torchtitan_npu.planning.bucket_hints import bucket_cap_hints
from torchtitan_npu.planning.measured_caps import recall, remember
from torchtitan_npu.planning.report import dry_run
from torchtitan_npu.planning.tune import _keep

SLOWDOWNS = {0.25: 2.0, 1.0: 1.2, 4.0: 1.1, 16.0: 1.0, 64.0: 1.03, None: 1.06}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHTITAN_NPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config(cap: float | None = 25.0, *, model: dict[str, Any] | None = None, **parallel: Any) -> Config:
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", **(model or {})},
            "training": {"learning_rate": 1e-3, "max_steps": 1},
            "parallel": {"bucket_cap_mb": cap, **parallel},
        }
    )


def hints(cfg: Config, world_size: int = 2) -> list[str]:
    return bucket_cap_hints(cfg, world_size, "cpu")


# ---- measured --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "slowdown"),
    [
        (16.0, None),
        (64.0, None),
        (1000.0, None),  # the nearest that was measured
        (0.25, "2.00"),
        (0.01, "2.00"),
        (0.5, "1.60"),  # in the middle, as powers of two go
        (2.0, "1.15"),
        (8.0, "1.05"),
        (10.0, None),
        (None, "1.06"),
    ],
)
def test_far_from_the_measured_best(cap: float | None, slowdown: str | None) -> None:
    remember(config(), 2, "cpu", 16.0, SLOWDOWNS)
    found = hints(config(cap))
    if slowdown is None:
        assert found == []
    else:
        (hint,) = found
        assert hint.startswith(f"parallel.bucket_cap_mb={'null' if cap is None else f'{cap:g}'} is far from the best")
        assert f"{slowdown} times as long as with parallel.bucket_cap_mb=16" in hint and "2 ranks" in hint


def test_a_cap_of_none_that_was_not_measured_is_unknown() -> None:
    remember(config(), 2, "cpu", 16.0, {16.0: 1.0, 1.0: 3.0})
    assert hints(config(None)) == [] and len(hints(config(1.0))) == 1


@pytest.mark.parametrize(
    "other",
    [
        config(0.25, model={"n_layers": 7}),
        config(0.25, model={"vocab_size": 321}),
        config(0.25, model={"name": "qwen3_debug"}),
        config(0.25, dtype="fp32"),
        config(0.25, prefetch=2),
    ],
)
def test_what_was_measured_for_another_run_says_nothing(other: Config) -> None:
    remember(config(), 2, "cpu", 16.0, SLOWDOWNS)
    assert recall(config(0.25), 2, "cpu") is not None
    assert recall(other, 2, "cpu") is None
    assert recall(config(0.25), 4, "cpu") is None and recall(config(0.25), 2, "npu") is None


def test_another_machine_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    remember(config(), 2, "cpu", 16.0, SLOWDOWNS)
    monkeypatch.setattr(measured_caps, "processor_name", lambda: "another one")
    assert recall(config(), 2, "cpu") is None


def test_tune_keeps_what_it_measured_for_the_configured_model(caplog: pytest.LogCaptureFixture) -> None:
    """Medians over two rounds of step times over those of the recommended cap; a later call replaces it."""
    fast, slow = candidate([100, 100], cap=25.0), candidate([150, 170], cap=1.0)
    with caplog.at_level(logging.INFO, logger="torchtitan_npu"):
        _keep(config(), 2, [slow, fast], fast)
    assert "for the hints of later runs" in caplog.text
    measured = recall(config(), 2, "cpu")
    assert measured is not None and measured.best == 25.0
    assert measured.slowdowns == pytest.approx({1.0: 1.6, 25.0: 1.0})
    _keep(config(), 2, [slow], slow)  # nothing was compared
    assert recall(config(), 2, "cpu") == measured
    _keep(config(), 2, [candidate([100, 100], cap=None), slow], slow)
    measured = recall(config(), 2, "cpu")
    assert measured is not None and measured.best == 1.0 and measured.slowdowns[None] == pytest.approx(0.627, abs=1e-3)


def test_a_cache_that_cannot_be_written_ends_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.write_text("a file, not a directory")
    fast, slow = candidate([100], cap=25.0), candidate([150], cap=1.0)
    _keep(config(), 2, [slow, fast], fast)
    assert "later runs cannot hint at these caps" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        lambda record: "no JSON",
        lambda record: [],
        lambda record: record | {"caps": [[1, "a"]]},
        lambda record: record | {"best": 7.0},
        lambda record: record | {"caps": [[16.0, float("nan")]]},
        lambda record: record | {"caps": [[16.0, 0.0]]},
    ],
)
def test_a_damaged_file_is_no_knowledge(change: Any, caplog: pytest.LogCaptureFixture) -> None:
    path = remember(config(), 2, "cpu", 16.0, SLOWDOWNS)
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    assert hints(config(0.25)) == []
    assert "cannot be read, so nothing is known of measured bucket caps" in caplog.text


# ---- counted ---------------------------------------------------------------------------------------------------------

DEEP = {"n_layers": 48, "dim": 128, "ffn_dim": 344}
"""48 layers of 128² (1 + 1 + 1/2 + 1/2) + 3 · 128 · 344 = 181,248 parameters and two norms: 0.35 MiB in bf16."""


def test_many_small_collectives() -> None:
    """Of a cap below each matrix; the default joins 71 layers to a unit. A model whose matrices are as large as the cap
    has as many anyway.
    """
    (hint,) = hints(config(0.01, model=DEEP))
    assert hint.startswith("parallel.bucket_cap_mb=0.01 makes ") and "whose latency counts" in hint
    assert hints(config(model=DEEP)) == []
    assert hints(config(0.01, model={"n_layers": 2})) == []
    assert hints(config(1.0, model={"name": "llama3_8b"}), 64) == []


def test_one_unit_of_the_whole_model() -> None:
    model = {"n_layers": 12, "dim": 512, "ffn_dim": 1376}
    (hint,) = hints(config(1000.0, model=model))
    assert hint.startswith("parallel.bucket_cap_mb=1000 joins layers into a unit of ") and "% of the model" in hint
    assert hints(config(None, model=model)) == [] and hints(config(25.0, model=model)) == []
    assert hints(config(1000.0)) == []  # 10 MiB: the default would join them, too


def test_nothing_to_hint_at() -> None:
    model = {"n_layers": 12, "dim": 512, "ffn_dim": 1376}
    assert hints(config(1000.0, model=model), 1) == []
    assert hints(config(1000.0, model=model, strategy="ddp")) == []
    assert hints(config(1000.0, model=model, tp_degree=2), 2) == []  # nothing is sharded
    assert len(hints(config(1000.0, model=model, tp_degree=2), 4)) == 1


def test_the_plan_has_the_hints() -> None:
    cfg = config(1000.0, model={"n_layers": 12, "dim": 512, "ffn_dim": 1376})
    assert "\nhint: parallel.bucket_cap_mb=1000 joins layers" in dry_run(cfg, 2)
    assert "hint:" not in dry_run(dataclasses.replace(cfg, parallel=config().parallel), 2)
