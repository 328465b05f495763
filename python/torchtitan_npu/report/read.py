"""A run as its ``--log_dir`` shows it: ``metrics.jsonl``, which may end in a torn line, and ``plan.json``."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
PLAN_FILE = "plan.json"

_PLAN_FORMAT = 1


class ReportError(ValueError):
    """A directory cannot be reported; the message says why."""


@dataclass
class Run:
    """One run."""

    directory: Path
    records: list[dict[str, Any]]
    """One per step, in the order of steps; of a step that was written twice (a resumed run), the last."""
    plan: dict[str, Any] | None
    """``plan.json``, or None where there is none (a run of an older version)."""
    notes: list[str] = field(default_factory=list)
    """What the reader of the page should know about these files."""

    def column(self, key: str) -> list[float | None]:
        """A number per step; None where the step has none, or one that is not finite."""
        return [finite(record.get(key)) for record in self.records]


def finite(value: object) -> float | None:
    """``value`` as a number, or None where it is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_run(directory: Path) -> Run:
    """Read the files of one run. What is torn or missing becomes a note.

    Raises:
        ReportError: there is no such directory, it holds no run, or a file cannot be read.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "no such directory"
        raise ReportError(f"{directory}: {what}; name the --log_dir of a run")
    run = Run(directory, [], None)
    found = False
    try:
        if (directory / METRICS_FILE).exists():
            found = True
            _read_records(run, directory / METRICS_FILE)
        if (directory / PLAN_FILE).exists():
            found = True
            _read_plan(run, directory / PLAN_FILE)
    except OSError as error:
        raise ReportError(f"{directory} cannot be read: {error}") from error
    if not found:
        raise ReportError(
            f"{directory} holds neither {METRICS_FILE} nor {PLAN_FILE}; name the --log_dir of a run that has begun"
        )
    if not run.records:
        run.notes.append(f"{METRICS_FILE} has no steps yet")
    if run.plan is None:
        run.notes.append(f"no usable {PLAN_FILE}: configuration and plan are not shown")
    _note_not_finite(run)
    return run


def _read_records(run: Run, path: Path) -> None:
    by_step: dict[int, dict[str, Any]] = {}
    damaged = 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                step = record["step"]
                if isinstance(step, bool) or not isinstance(step, int) or abs(step) > 2**53:
                    raise ValueError("the step is no number")
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged += 1
                continue
            by_step[step] = record
    run.records = [by_step[step] for step in sorted(by_step)]
    if damaged:
        run.notes.append(f"{METRICS_FILE}: {damaged} line(s) left out that are torn or no records")


def _read_plan(run: Run, path: Path) -> None:
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        if plan["format"] != _PLAN_FORMAT:
            raise ValueError(f"its format is {plan['format']!r}, and this version reads {_PLAN_FORMAT}")
        for section in ("configuration", "memory_bytes", "model"):
            if not isinstance(plan[section], dict):
                raise ValueError(f"{section} is no mapping")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        run.notes.append(f"{PLAN_FILE} is left out: {error}")
        return
    run.plan = plan


def _note_not_finite(run: Run) -> None:
    for key in ("loss", "grad_norm"):
        steps = [
            record["step"]
            for record in run.records
            if isinstance(record.get(key), float) and not math.isfinite(record[key])
        ]
        if steps:
            run.notes.append(f"{key} is not finite in {len(steps)} step(s), first in step {steps[0]}")
