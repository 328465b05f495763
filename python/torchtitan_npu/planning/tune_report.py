"""What tuning found: the recommendation, the table, CSV files, and a picture."""

from __future__ import annotations

import csv
import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_npu.config import Config
from torchtitan_npu.planning.fabric import Fabric
from torchtitan_npu.planning.traffic import Traffic
from torchtitan_npu.planning.tune_measure import Measured, quartiles

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import FSDPPlan

logger = logging.getLogger(__name__)

MIB = 1024**2
AS_GOOD_SHARE = 0.25
"""Of the rounds, in which a cap as good as the fastest is no slower than it."""


def cap_name(cap_mb: float | None) -> str:
    """As it is written on the command line."""
    return "none" if cap_mb is None else f"{cap_mb:g}"


@dataclass(frozen=True)
class Candidate:
    """One cap: what was planned, and what was measured."""

    cap_mb: float | None
    plan: FSDPPlan
    traffic: Traffic
    measured: Measured
    optimizer_bytes: int
    """Per rank, of the optimizer's state."""

    @property
    def name(self) -> str:
        return cap_name(self.cap_mb)

    @property
    def planned_bytes(self) -> int:
        """Per rank: shards, gradients, optimizer, arena. Exact, unlike a process's size."""
        plan = self.plan
        return plan.parameter_bytes + plan.gradient_bytes + self.optimizer_bytes + plan.arena_bytes


@dataclass(frozen=True)
class Recommendation:
    candidate: Candidate
    why: str


def recommend(candidates: Sequence[Candidate]) -> Recommendation:
    """The least memory among those that noise does not tell from the fastest.

    The fastest has the lowest median step. Another is as good when, in at least a quarter of the rounds, it was no
    slower than the fastest was in the same round. Equal memory: the lower median.
    """
    fastest = min(candidates, key=lambda c: c.measured.step_seconds)
    as_good = [c for c in candidates if _as_good(c.measured.ratios_to(fastest.measured))]
    chosen = min(as_good, key=lambda c: (c.planned_bytes, c.measured.step_seconds))
    step_ms = 1e3 * chosen.measured.step_seconds
    if len(candidates) == 1:
        return Recommendation(chosen, f"{step_ms:.1f} ms a step; nothing else was measured")
    if chosen is fastest:
        others = f", and of {len(as_good)} as fast the least memory" if len(as_good) > 1 else ", the fastest"
        return Recommendation(chosen, f"{step_ms:.1f} ms a step{others}")
    saved = (fastest.planned_bytes - chosen.planned_bytes) / MIB
    memory = f"with {saved:.1f} MiB less per rank" if saved else "with the same memory"
    return Recommendation(
        chosen,
        f"{step_ms:.1f} ms a step, which noise does not tell from the fastest ({fastest.name}: "
        f"{1e3 * fastest.measured.step_seconds:.1f} ms), {memory}",
    )


def _as_good(ratios: Sequence[float]) -> bool:
    return sum(ratio <= 1 for ratio in ratios) >= AS_GOOD_SHARE * len(ratios)


@dataclass(frozen=True)
class Prediction:
    """One cap among another number of ranks. Seconds per step."""

    ranks: int
    """All of them; the plan's are those that share parameters."""
    cap_mb: float | None
    step: float
    low: float
    """If communication hid as far as it can."""
    high: float
    """If none of it hid."""
    communication: float
    plan: FSDPPlan


def predict(candidate: Candidate, fabric: Fabric, plan: FSDPPlan, traffic: Traffic, ranks: int) -> Prediction:
    """The step among ``ranks`` ranks with the same batch per rank, ``plan.world_size`` of which share parameters.

    With ``busy`` the measured step without its exposed communication, ``comm`` the fabric's prediction for all
    collectives one after the other, here and there, and ``hidden`` = 1 - exposed / comm(here), within 0..1:

        step(there) = busy + max((1 - hidden) * comm(there), comm(there) - busy)
    """
    exposed = candidate.measured.exposed_seconds or 0.0
    busy = max(0.0, candidate.measured.step_seconds - exposed)
    here, there = fabric.seconds(candidate.traffic), fabric.seconds(traffic)
    hidden = max(0.0, 1 - exposed / here)
    return Prediction(
        ranks=ranks,
        cap_mb=candidate.cap_mb,
        step=busy + max((1 - hidden) * there, there - busy),
        low=max(busy, there),
        high=busy + there,
        communication=there,
        plan=plan,
    )


# ---- output ----------------------------------------------------------------------------------------------------------


def candidate_row(candidate: Candidate, fastest: Candidate, recommended: Candidate) -> dict[str, Any]:
    """One line of the CSV: times in seconds, sizes in bytes, per rank and step."""
    m, plan, traffic = candidate.measured, candidate.plan, candidate.traffic
    first, third = m.step_quartiles
    ratios = m.ratios_to(fastest.measured)
    ratio_first, ratio_third = quartiles(ratios)
    return {
        "bucket_cap_mb": candidate.name,
        "step_seconds": m.step_seconds,
        "step_seconds_q1": first,
        "step_seconds_q3": third,
        "exposed_seconds": m.exposed_seconds,
        "ratio_to_fastest": statistics.median(ratios),
        "ratio_q1": ratio_first,
        "ratio_q3": ratio_third,
        "units": len(plan.units),
        "buckets": plan.num_buckets,
        "padding_fraction": plan.padding_fraction,
        "gathers": len(traffic.gathers),
        "gathered_bytes": traffic.gathered_bytes,
        "largest_gather_bytes": max(traffic.gathers),
        "reductions": len(traffic.reductions),
        "reduced_bytes": traffic.reduced_bytes,
        "largest_reduction_bytes": max(traffic.reductions, default=0),
        "sent_bytes": traffic.sent_bytes,
        "written_bytes_measured": m.written_bytes,
        "gather_arena_bytes": plan.gather_bytes,
        "reduce_arena_bytes": plan.reduce_bytes,
        "arena_bytes": plan.arena_bytes,
        "planned_bytes": candidate.planned_bytes,
        "peak_resident_bytes": m.peak_resident_bytes or None,
        "recommended": int(candidate is recommended),
    }


def candidate_table(candidates: Sequence[Candidate]) -> str:
    """For people: milliseconds and MiB."""
    columns = ["cap MiB", "step ms [quartiles]", "exposed", "gathers x mean MiB", "reductions x mean MiB"]
    columns += ["padding", "arena MiB", "planned MiB", "peak RSS MiB"]

    def mean_mib(sizes: tuple[int, ...]) -> str:
        return f"{len(sizes)} x {statistics.fmean(sizes) / MIB:.2f}" if sizes else "0"

    rows = []
    for c in candidates:
        first, third = c.measured.step_quartiles
        exposed = c.measured.exposed_seconds
        rows.append(
            [
                c.name,
                f"{1e3 * c.measured.step_seconds:.1f} [{1e3 * first:.1f} {1e3 * third:.1f}]",
                "-" if exposed is None else f"{1e3 * exposed:.1f}",
                mean_mib(c.traffic.gathers),
                mean_mib(c.traffic.reductions),
                f"{100 * c.plan.padding_fraction:.3f} %",
                f"{c.plan.arena_bytes / MIB:.1f}",
                f"{c.planned_bytes / MIB:.1f}",
                f"{c.measured.peak_resident_bytes / MIB:.0f}" if c.measured.peak_resident_bytes else "-",
            ]
        )
    return table(columns, rows)


def fabric_text(fabric: Fabric) -> str:
    """The two lines, and the points they were fitted to."""
    lines = []
    for name, line in (("gathers", fabric.gather), ("reductions", fabric.reduce)):
        lines.append(
            f"{name}: latency {1e6 * line.alpha_seconds:.1f} us, {line.bytes_per_second / 1e9:.2f} GB/s per message, "
            f"relative residual {100 * line.rms_residual:.1f} % rms"
        )
    columns = ["KiB", "gather us", "residual", "KiB", "reduce us", "residual"]
    halves = [zip(line.sizes, line.seconds, line.residuals, strict=True) for line in (fabric.gather, fabric.reduce)]
    cells = [
        [
            text
            for size, seconds, residual in points
            for text in (f"{size / 1024:.0f}", f"{1e6 * seconds:.0f}", f"{100 * residual:+.1f} %")
        ]
        for points in zip(*halves, strict=True)
    ]
    return "\n".join([*lines, table(columns, cells, left=0)])


def prediction_table(predictions: Sequence[Prediction]) -> str:
    """One line per number of ranks and cap."""
    columns = ["ranks", "cap MiB", "step ms [all hidden, none]", "communication", "arena MiB"]
    rows = [
        [
            str(p.ranks),
            cap_name(p.cap_mb),
            f"{1e3 * p.step:.1f} [{1e3 * p.low:.1f} {1e3 * p.high:.1f}]",
            f"{1e3 * p.communication:.1f}",
            f"{p.plan.arena_bytes / MIB:.1f}",
        ]
        for p in predictions
    ]
    return table(columns, rows, left=0)


def report(
    cfg: Config,
    candidates: Sequence[Candidate],
    recommendation: Recommendation,
    fabric: Fabric | None,
    predictions: Sequence[Prediction],
    layers_note: str,
    directory: Path,
) -> None:
    """Logs everything and writes ``tune.csv``, ``tune.png`` and, where there are any, ``fabric.csv`` and
    ``predicted.csv`` into ``directory``.
    """
    logger.info("\n%s\n", candidate_table(candidates))
    fastest = min(candidates, key=lambda c: c.measured.step_seconds)
    rows = [candidate_row(c, fastest, recommendation.candidate) for c in candidates]
    write_csv(directory / "tune.csv", rows)
    written = [directory / "tune.csv"]
    if fabric is not None:
        logger.info(
            "the fabric, as the engine uses it, among %d ranks:\n%s\n", fabric.gather.world_size, fabric_text(fabric)
        )
        write_csv(directory / "fabric.csv", fabric_rows(fabric))
        written.append(directory / "fabric.csv")
    if predictions:
        logger.info("predicted, the batch per rank unchanged:\n%s\n", prediction_table(predictions))
        write_csv(directory / "predicted.csv", [prediction_row(p) for p in predictions])
        written.append(directory / "predicted.csv")
    if plot(directory / "tune.png", cfg, candidates, predictions, layers_note):
        written.append(directory / "tune.png")
    logger.info("written: %s", ", ".join(str(path) for path in written))
    chosen = recommendation.candidate
    value = "null" if chosen.cap_mb is None else chosen.name
    logger.info("recommended: %s; %s. In the YAML:", chosen.name, recommendation.why)
    logger.info("parallel:\n  bucket_cap_mb: %s", value)


def fabric_rows(fabric: Fabric) -> list[dict[str, Any]]:
    """One row per size and kind."""
    return [
        {
            "operation": name,
            "ranks": line.world_size,
            "bytes": size,
            "seconds": seconds,
            "fitted_seconds": line.predict(size, line.world_size),
            "relative_residual": residual,
            "alpha_seconds": line.alpha_seconds,
            "bytes_per_second": line.bytes_per_second,
        }
        for name, line in (("gather", fabric.gather), ("reduce", fabric.reduce))
        for size, seconds, residual in zip(line.sizes, line.seconds, line.residuals, strict=True)
    ]


def prediction_row(prediction: Prediction) -> dict[str, Any]:
    return {
        "ranks": prediction.ranks,
        "bucket_cap_mb": cap_name(prediction.cap_mb),
        "step_seconds": prediction.step,
        "all_hidden_seconds": prediction.low,
        "none_hidden_seconds": prediction.high,
        "communication_seconds": prediction.communication,
        "padding_fraction": prediction.plan.padding_fraction,
        "arena_bytes": prediction.plan.arena_bytes,
    }


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Plain text; the first ``left`` columns are left-aligned."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in range(len(columns))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows with the first one's keys; None is empty."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def plot(
    path: Path,
    cfg: Config,
    candidates: Sequence[Candidate],
    predictions: Sequence[Prediction],
    layers_note: str,
) -> bool:
    """Step time and memory over the cap; False, with a warning, where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        logger.warning("no %s: matplotlib is not installed (pip install matplotlib); the CSV has all numbers", path)
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [c.name for c in candidates]
    places = list(range(len(names)))
    middle = [1e3 * c.measured.step_seconds for c in candidates]
    low = [m - 1e3 * c.measured.step_quartiles[0] for m, c in zip(middle, candidates, strict=True)]
    high = [1e3 * c.measured.step_quartiles[1] - m for m, c in zip(middle, candidates, strict=True)]
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(10, 4))
    world_size = candidates[0].plan.world_size * cfg.parallel.tp_degree
    times.errorbar(places, middle, yerr=[low, high], marker="o", capsize=3, label=f"{world_size} ranks, measured")
    for ranks in dict.fromkeys(p.ranks for p in predictions):
        predicted = [1e3 * p.step for p in predictions if p.ranks == ranks]
        times.plot(places, predicted, linestyle="--", marker=".", label=f"{ranks} ranks, predicted")
    times.set_ylabel("step, ms (median, quartiles)")
    times.set_ylim(bottom=0)  # or noise would look like a difference
    times.legend(fontsize=8)
    memory.plot(places, [c.planned_bytes / MIB for c in candidates], marker="o", label="planned: shards and arena")
    memory.plot(places, [c.plan.arena_bytes / MIB for c in candidates], marker="s", label="of that, the arena")
    memory.set_ylabel("MiB per rank")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=8)
    for axes in (times, memory):
        axes.set_xticks(places, names)
        axes.set_xlabel("bucket_cap_mb")
    figure.suptitle(f"{cfg.model.name} ({layers_note}), {cfg.parallel.dtype}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return True
