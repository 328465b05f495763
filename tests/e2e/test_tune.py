"""``torchtitan-npu tune`` as a user starts it."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from processes import run

from torchtitan_npu.config import load_config
from torchtitan_npu.fsdp import plan_model
from torchtitan_npu.models import build_model
from torchtitan_npu.planning import fsdp_options
from torchtitan_npu.planning.memory import plan_fsdp
from torchtitan_npu.planning.traffic import planned_traffic

from .conftest import TIMEOUT_SECONDS, Workspace

CAPS = ("0.02", "none")


def tune(work: Workspace, *flags: str, ranks: int) -> subprocess.CompletedProcess[str]:
    command = ["tune", "--config", str(work.config), "--output_dir", str(work.root / "out"), *flags]
    return run("torchtitan_npu.cli:main", command, ranks=ranks, timeout=TIMEOUT_SECONDS)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_two_ranks(make_workspace: Callable[..., Workspace]) -> None:
    """Two caps, two steps of two micro-batches; the files against the plan; the YAML line among the caps."""
    pytest.importorskip("matplotlib")
    work = make_workspace("tune")
    result = tune(work, "--caps", ",".join(CAPS), "--steps", "2", "--predict_ranks", "4", ranks=2)
    assert result.returncode == 0, result.stderr
    out = work.root / "out"
    rows = rows_of(out / "tune.csv")
    assert [row["bucket_cap_mb"] for row in rows] == list(CAPS)
    config = load_config(str(work.config))
    for row, cap in zip(rows, (0.02, None), strict=True):
        options = {**fsdp_options(config.parallel), "bucket_cap_mb": cap}
        plan = plan_model(build_model(config.model), 2, **options)
        traffic = planned_traffic(plan, config.training.gradient_accumulation_steps)
        assert int(row["gathers"]) == len(traffic.gathers)
        assert int(row["gathered_bytes"]) == sum(traffic.gathers)
        assert int(row["written_bytes_measured"]) * 2 == sum(traffic.gathers)
        assert int(row["reduced_bytes"]) == sum(traffic.reductions)
        assert int(row["sent_bytes"]) * 2 == sum(traffic.gathers) + sum(traffic.reductions)
        assert int(row["arena_bytes"]) == int(row["gather_arena_bytes"]) + int(row["reduce_arena_bytes"])
        assert int(row["planned_bytes"]) == 3 * plan.parameter_bytes + plan.gradient_bytes + plan.arena_bytes
        assert float(row["step_seconds_q1"]) <= float(row["step_seconds"]) <= float(row["step_seconds_q3"])
        assert 0 <= float(row["exposed_seconds"]) < float(row["step_seconds_q3"])
        assert float(row["ratio_to_fastest"]) > 0
    (recommended,) = (row["bucket_cap_mb"] for row in rows if row["recommended"] == "1")
    snippet = yaml.safe_load(result.stdout[result.stdout.rindex("parallel:") :])
    assert snippet == {"parallel": {"bucket_cap_mb": None if recommended == "none" else float(recommended)}}
    assert f"recommended: {recommended}; " in result.stdout
    assert "all 2 layers" in result.stdout
    assert "for the hints of later runs of this model on as many ranks" in result.stdout

    fabric = rows_of(out / "fabric.csv")
    assert {row["operation"] for row in fabric} == {"gather", "reduce"}
    for row in fabric:  # among 2 ranks: one message of half the buffer
        fitted = float(row["alpha_seconds"]) + int(row["bytes"]) / 2 / float(row["bytes_per_second"])
        assert float(row["fitted_seconds"]) == pytest.approx(fitted)
        residual = 1 - fitted / float(row["seconds"])
        assert float(row["relative_residual"]) == pytest.approx(residual, abs=1e-9)
    predicted = rows_of(out / "predicted.csv")
    assert [(row["ranks"], row["bucket_cap_mb"]) for row in predicted] == [("4", cap) for cap in CAPS]
    for row in predicted:
        low, step, high = (float(row[f"{key}_seconds"]) for key in ("all_hidden", "step", "none_hidden"))
        assert low <= step <= high
    assert (out / "tune.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_one_process(make_workspace: Callable[..., Workspace]) -> None:
    """Nothing to send, so no fabric; and no prediction without one."""
    work = make_workspace("one")
    result = tune(work, "--caps", "0.02", "--steps", "1", ranks=1)
    assert result.returncode == 0, result.stderr
    assert "recommended: 0.02; " in result.stdout and "hints of later runs" not in result.stdout
    (row,) = rows_of(work.root / "out" / "tune.csv")
    assert (row["sent_bytes"], row["recommended"], row["ratio_to_fastest"]) == ("0", "1", "1.0")
    assert not (work.root / "out" / "fabric.csv").exists()
    result = tune(work, "--caps", "0.02", "--steps", "1", "--predict_ranks", "8", ranks=1)
    assert result.returncode == 1
    assert "--predict_ranks needs a measured fabric" in result.stderr and "Traceback" not in result.stderr


def test_tensor_parallel(make_workspace: Callable[..., Workspace]) -> None:
    """2 x 2: what the two ranks that share parameters send, of their part of the model."""
    work = make_workspace("tp")
    settings = ["--model.vocab_size", "62", "--parallel.tp_degree", "2"]
    result = tune(work, *settings, "--caps", "0.02", "--steps", "1", "--predict_ranks", "8", ranks=4)
    assert result.returncode == 0, result.stderr
    (row,) = rows_of(work.root / "out" / "tune.csv")
    config = load_config(str(work.config), [*settings, "--parallel.bucket_cap_mb", "0.02"])
    plan = plan_fsdp(config, 4)
    traffic = planned_traffic(plan, config.training.gradient_accumulation_steps)
    assert plan.world_size == 2 and int(row["gathered_bytes"]) == traffic.gathered_bytes
    assert int(row["written_bytes_measured"]) * 2 == traffic.gathered_bytes
    assert {line["ranks"] for line in rows_of(work.root / "out" / "fabric.csv")} == {"2"}
    assert [line["ranks"] for line in rows_of(work.root / "out" / "predicted.csv")] == ["8"]
