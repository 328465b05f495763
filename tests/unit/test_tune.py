"""The arithmetic of tuning: traffic of a plan, the fit of the fabric, prediction, recommendation, arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_npu import cli
from torchtitan_npu.config import load_config
from torchtitan_npu.fsdp import MixedPrecisionPolicy, plan_model
from torchtitan_npu.launch import Environment
from torchtitan_npu.planning import tune
from torchtitan_npu.planning.fabric import Fabric, Line, fit_line, probe_sizes
from torchtitan_npu.planning.traffic import Traffic, planned_traffic
from torchtitan_npu.planning.tune_measure import Measured, quartiles
from torchtitan_npu.planning.tune_report import Candidate, plot, predict, recommend

DEBUG = str(Path(__file__).resolve().parents[2] / "examples/llama3_debug.yaml")
MIB = 1024**2


class Three(nn.Module):
    """Three units of 1 MiB of fp32 in two parameters each, and a root of 2 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 256, bias=False), nn.Linear(256, 512, bias=False)) for _ in range(3)
        )
        self.head = nn.Linear(512, 1024, bias=False)


def three(**options: Any) -> Any:
    return plan_model(Three(), 4, **options)


def candidate(step_ms: list[float], planned: int = 0, cap: float | None = None, exposed_ms: float = 0.0) -> Candidate:
    """One round per entry of ``step_ms``; ``planned`` more bytes of arena than others."""
    measured = Measured(steps=[[1e-3 * ms] for ms in step_ms], waits=[[1e-3 * exposed_ms] for _ in step_ms])
    plan = three()
    plan = dataclasses.replace(plan, gather_bytes=plan.gather_bytes + planned)
    return Candidate(cap, plan, planned_traffic(plan), measured, 2 * plan.parameter_bytes)


# ---- traffic ---------------------------------------------------------------------------------------------------------


def test_traffic_of_a_step() -> None:
    """Gathers: root once, units 0 and 1 in forward and backward, unit 2 once as it stays in between. Reductions: each
    once. 2 + 2 * 1 + 2 * 1 + 1 = 7 MiB and 5 MiB."""
    traffic = planned_traffic(three())
    assert sorted(traffic.gathers) == [MIB] * 5 + [2 * MIB]
    assert sorted(traffic.reductions) == [MIB] * 3 + [2 * MIB]
    assert traffic.written_bytes == 7 * MIB // 4
    assert traffic.sent_bytes == (7 + 5) * MIB * 3 // 4


def test_traffic_of_smaller_buckets_and_dtypes() -> None:
    """A cap of 0.5 MiB halves the units' buckets; the head is one parameter. bf16 parameters, so bf16 on the wire."""
    assert sorted(planned_traffic(three(bucket_cap_mb=0.5)).gathers) == [MIB // 2] * 10 + [2 * MIB]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    traffic = planned_traffic(three(mixed_precision=policy))
    assert sorted(traffic.gathers) == [MIB // 2] * 5 + [MIB]
    assert sorted(traffic.reductions) == [MIB // 2] * 3 + [MIB]
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    traffic = planned_traffic(three(mixed_precision=policy))
    assert (traffic.gathered_bytes, traffic.reduced_bytes) == (7 * MIB, 5 * MIB // 2)


@pytest.mark.parametrize(("reshard", "units_gathers"), [(True, 5), (False, 3)])
def test_traffic_of_micro_batches(reshard: bool, units_gathers: int) -> None:
    """Every micro-batch gathers; no_sync reduces once. Frozen parameters are gathered only."""
    model = Three()
    model.head.weight.requires_grad_(False)
    plan = plan_model(model, 4, reshard_after_forward=reshard)
    each, once = (planned_traffic(plan, 3, reduce_each=reduce_each) for reduce_each in (True, False))
    assert each.gathered_bytes == once.gathered_bytes == 3 * (2 + units_gathers) * MIB
    assert (each.reduced_bytes, once.reduced_bytes) == (9 * MIB, 3 * MIB)


# ---- fabric ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_fit_finds_the_line_again(world_size: int) -> None:
    """20 us and 3 GB/s per message; 64 KiB ... 64 MiB."""
    true = Line(20e-6, 3e9, world_size, (), ())
    sizes = probe_sizes(64 * MIB)
    line = fit_line(sizes, [true.predict(size, world_size) for size in sizes], world_size)
    assert line.alpha_seconds == pytest.approx(20e-6, rel=1e-6)
    assert line.bytes_per_second == pytest.approx(3e9, rel=1e-6)
    assert line.rms_residual == pytest.approx(0, abs=1e-9)
    assert line.predict(MIB, 16) == pytest.approx(15 * (20e-6 + MIB / (16 * 3e9)))


def test_fit_counts_small_sizes_as_much_as_large_ones() -> None:
    """Times 10 % above and below the line in turn: residuals near 10 % everywhere, latency within 20 %."""
    true = Line(20e-6, 3e9, 2, (), ())
    sizes = probe_sizes(64 * MIB)
    seconds = [true.predict(size, 2) * (1.1 if i % 2 else 0.9) for i, size in enumerate(sizes)]
    line = fit_line(sizes, seconds, 2)
    assert line.alpha_seconds == pytest.approx(20e-6, rel=0.2)
    assert all(abs(r) < 0.2 for r in line.residuals)
    assert 0.08 < line.rms_residual < 0.12


def test_fit_has_no_negative_latency_or_bandwidth() -> None:
    through_origin = fit_line([1000, 2000, 4000], [0.5e-6, 2e-6, 5e-6], 2)
    assert through_origin.alpha_seconds == 0 and through_origin.bytes_per_second > 0
    flat = fit_line([1000, 2000], [2e-6, 1e-6], 2)
    assert flat.bytes_per_second == float("inf") and 1e-6 < flat.alpha_seconds < 2e-6


def test_fit_refuses_what_has_no_line() -> None:
    with pytest.raises(ValueError, match="one rank sends nothing"):
        fit_line([1, 2], [1.0, 2.0], 1)
    with pytest.raises(ValueError, match="two sizes at least"):
        fit_line([5, 5], [1.0, 2.0], 2)


def test_probe_sizes_grow_geometrically() -> None:
    sizes = probe_sizes(4 * MIB)
    assert (sizes[0], sizes[-1], len(sizes)) == (64 << 10, 4 * MIB, 7)
    assert all(b / a == pytest.approx(2, rel=0.02) for a, b in zip(sizes, sizes[1:], strict=False))
    assert probe_sizes(1)[-1] == 256 << 10


# ---- prediction and recommendation -----------------------------------------------------------------------------------


def test_prediction() -> None:
    """Here: comm 10 ms, of which 4 are exposed in a step of 24: busy 20, 60 % hidden. There: comm 30 ms.

    0.4 x 30 = 12 exposed, as hiding all but 10 would fit into 20 busy ones: step 32, at best 30, at worst 50.
    """
    sizes = (MIB,)
    line = Line(0.0, MIB / 0.020, 2, (), ())  # (N-1) * n / (N * B): 10 ms for 1 MiB among 2 ranks
    fabric = Fabric(line, line)
    here = dataclasses.replace(candidate([24.0], exposed_ms=4.0), traffic=Traffic(2, sizes, ()))
    there = Traffic(4, (2 * MIB,), ())
    assert fabric.seconds(here.traffic) == pytest.approx(0.010)
    assert fabric.seconds(there) == pytest.approx(0.030)
    found = predict(here, fabric, three(), there, 8)
    assert (found.ranks, found.communication) == (8, pytest.approx(0.030))
    assert (found.step, found.low, found.high) == (pytest.approx(0.032), pytest.approx(0.030), pytest.approx(0.050))
    # No more hides than there is to hide behind: comm 90 ms behind 20 busy ones.
    far = predict(here, fabric, three(), Traffic(4, (6 * MIB,), ()), 8)
    assert (far.step, far.low) == (pytest.approx(0.090), pytest.approx(0.090))


def test_recommended_is_the_least_memory_within_noise() -> None:
    fast = candidate([10.0, 10.2, 10.4, 10.0], planned=MIB, cap=25)
    as_good = candidate([10.1, 10.1, 10.5, 10.3], cap=5)  # 10.1/10.2 < 1 in one round of four
    slow = candidate([10.9, 11.0, 11.2, 10.8], planned=-MIB, cap=1)
    found = recommend([slow, as_good, fast])
    assert found.candidate is as_good
    assert "10.2 ms a step, which noise does not tell from the fastest (25: 10.1 ms), with 1.0 MiB less" in found.why
    assert recommend([slow, fast]).candidate is fast
    assert recommend([fast, slow]).why.endswith("the fastest")
    assert recommend([slow]).why.endswith("ms a step; nothing else was measured")


def test_quartiles() -> None:
    assert quartiles([3.0]) == (3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 4.0)


def test_missing_matplotlib_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with caplog.at_level("WARNING"):
        assert not plot(tmp_path / "tune.png", load_config(DEBUG), [candidate([1.0])], [], "")
    assert "matplotlib is not installed (pip install matplotlib)" in caplog.text
    assert not (tmp_path / "tune.png").exists()


# ---- how many layers -------------------------------------------------------------------------------------------------


def fitted(monkeypatch: pytest.MonkeyPatch, available: int) -> tuple[int, str]:
    monkeypatch.setattr(tune, "available_bytes", lambda: available)
    monkeypatch.setattr(tune, "gather_rows", lambda row: [row])
    config, note = tune._fit(load_config(DEBUG), Environment())
    return config.model.n_layers, note


def test_as_many_layers_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan_npu.planning import estimate_memory

    config = load_config(DEBUG)
    four = dataclasses.replace(config, model=dataclasses.replace(config.model, n_layers=4))
    enough_for_four = int(estimate_memory(four, 1).total / tune.MEMORY_SHARE) + 2
    assert fitted(monkeypatch, 1 << 40) == (6, "all 6 layers")
    layers, note = fitted(monkeypatch, enough_for_four)
    assert layers == 4 and note.startswith("4 of 6 layers, which is what ")
    with pytest.raises(tune.TuneError, match=r"even one layer of llama3_debug needs .*: lower training.batch_size"):
        fitted(monkeypatch, 1 << 20)


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--caps", "1,x"], "'x' is neither a number of MiB above 0 nor none"),
        (["--caps", "0"], "'0' is neither"),
        (["--caps", "inf"], "'inf' is neither"),
        (["--caps", "5,1,5.0"], "'5,1,5.0' names a cap twice"),
        (["--caps", "none,none"], "names a cap twice"),
        (["--steps", "0"], "'0' is not a whole number >= 1"),
        (["--predict_ranks", "8,1"], "'1' is not a whole number of ranks >= 2"),
        (["--predict_ranks", "8,8"], "names a number of ranks twice"),
        (["--cap", "1"], "unrecognized arguments: --cap 1; did you mean --caps?"),
        (["--parallel.strategy", "ddp"], "parallel.strategy: is ddp; tune measures fsdp"),
        (["--parallel.tp_degree", "2"], "parallel.tp_degree: 2 must divide WORLD_SIZE, which is 1"),
        (
            ["--parallel.tp_degree", "2", "--predict_ranks", "4,7"],
            "parallel.tp_degree: 2 must divide every number of --predict_ranks, which has 7",
        ),
        (["--parallel.device", "npu"], "parallel.device: npu is not supported yet by tune"),
        (["--training.optimizer_state_offload", "true"], "true is not supported by tune, which measures on the CPU"),
        (["--parallel.prefetch", "9"], "it must be >= 0 and <= 8"),
        (["--parallel.dp_degree", "2"], "WORLD_SIZE is 1"),
    ],
)
def test_bad_arguments_end_with_status_2(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = cli.main(["tune", "--config", DEBUG, *flags])
    except SystemExit as error:
        status = error.code  # type: ignore[assignment]
    assert status == 2
    assert message in capsys.readouterr().err


def test_no_arguments_show_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune"]) == 2
    assert "torchtitan-npu tune --config examples/llama3_debug.yaml" in capsys.readouterr().err
