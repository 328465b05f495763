"""What the page draws of a run: at most a thousand points, however many steps there are."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from torchtitan_npu.report.read import Run

MOST_POINTS = 1000

GIB = 1024**3

LINES: dict[str, tuple[str, float]] = {
    "loss": ("loss", 1),
    "validation": ("validation_loss", 1),
    "grad_norm": ("grad_norm", 1),
    "lr": ("lr", 1),
    "throughput": ("tokens_per_second", 1),
    "mfu": ("mfu", 100),
    "memory": ("mem_bytes", 1 / GIB),
    "loss_scale": ("loss_scale", 1),
}
"""The page's name of a line: the key in ``metrics.jsonl``, and by what it is multiplied."""

PARTS = ("data", "communication", "checkpoint", "rest")
"""Of the time per step, from the bottom up."""


def draw(run: Run) -> dict[str, Any]:
    """``{"step": […], "tokens": […], "hours": […], "lines": {name: {"mean", "low", "high"}}, "parts": {name: […]}}``.

    Steps are cut into runs of equal length, each of which becomes one point: the mean, and the range where there are
    several steps. A part's value is seconds per step. A point without a value is None.
    """
    size = -(-len(run.records) // MOST_POINTS) if run.records else 1
    cuts = range(0, len(run.records), size)

    def each(values: Sequence[float | None], pick: Any) -> list[float | None]:
        result = []
        for start in cuts:
            known = [value for value in values[start : start + size] if value is not None]
            result.append(_shorten(pick(known)) if known else None)
        return result

    lines = {}
    for name, (key, factor) in LINES.items():
        values = [None if value is None else value * factor for value in run.column(key)]
        if any(value is not None for value in values):
            lines[name] = {"mean": each(values, statistics.fmean)}
            if size > 1:
                lines[name] |= {"low": each(values, min), "high": each(values, max)}
    parts = time_parts(run)
    return {
        "step": [run.records[min(start + size, len(run.records)) - 1]["step"] for start in cuts],
        "tokens": each(run.column("tokens"), max),
        "hours": each(_elapsed_hours(parts), max),
        "stepsPerPoint": size,
        "lines": lines,
        "parts": {name: each(values, statistics.fmean) for name, values in parts.items()},
    }


def time_parts(run: Run) -> dict[str, list[float | None]]:
    """Seconds of each step by part; ``rest`` is what ``step_time`` has left, mostly computing."""
    steps, data, communication, checkpoint = (
        run.column(key) for key in ("step_time", "data_time", "comm_time", "checkpoint_time")
    )
    rest = [
        None if whole is None else max(0.0, whole - (d or 0.0) - (c or 0.0))
        for whole, d, c in zip(steps, data, communication, strict=True)
    ]
    return dict(zip(PARTS, (data, communication, checkpoint, rest), strict=True))


def _elapsed_hours(parts: dict[str, list[float | None]]) -> list[float | None]:
    hours, total = [], 0.0
    for seconds in zip(*parts.values(), strict=True):
        total += sum(part for part in seconds if part is not None)
        hours.append(total / 3600)
    return list(hours)


def _shorten(value: float) -> float:
    """To six digits; more cannot be seen. Whole numbers (tokens) stay as they are."""
    return value if value == int(value) else float(f"{value:.6g}")
