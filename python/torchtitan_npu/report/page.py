"""The page: tables and curves of runs, as one HTML file that loads nothing."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_npu.report.read import Run
from torchtitan_npu.report.series import GIB, PARTS, draw, time_parts

_ASSETS = Path(__file__).parent

_MEMORY_KINDS = ("total", "capacity")
"""Kinds of ``memory_bytes`` that come last in the table."""


def render(runs: Sequence[Run]) -> str:
    """The HTML text for at least one run, in the given order."""
    names = short_names([run.directory for run in runs])
    content = {
        "runs": [{"name": name, "notes": run.notes, **draw(run)} for name, run in zip(names, runs, strict=True)],
        "parts": PARTS,
        "summary": _summary(runs),
        "differences": differences(runs),
        "configuration": _configuration(runs[0]) if len(runs) == 1 else [],
        "plan": _plan(runs),
    }
    # Inside <script>, only "<" could end the element or begin a comment.
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = (_ASSETS / "page.html").read_text(encoding="utf-8")
    for name in ("page.css", "chart.js", "page.js"):
        page = page.replace(f"@{name}@", (_ASSETS / name).read_text(encoding="utf-8"))
    return page.replace("@data@", data)


def short_names(directories: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart; the number as well where nothing does."""
    parts = [directory.absolute().parts for directory in directories]
    names = []
    for index, mine in enumerate(parts):
        length = 1
        others = [other for i, other in enumerate(parts) if i != index]
        while length < len(mine) and any(other[-length:] == mine[-length:] for other in others):
            length += 1
        name = "/".join(mine[-length:])
        names.append(f"{name} ({index + 1})" if any(other == mine for other in others) else name)
    return names


def differences(runs: Sequence[Run]) -> list[list[str]]:
    """Rows ``[key, value in each run…]`` of the configuration's keys that are not the same in all runs."""
    if len(runs) < 2:
        return []
    flat = [dict(_configuration(run)) for run in runs]
    keys = {key: None for values in flat for key in values}
    rows = [[key, *(values.get(key, "") for values in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _configuration(run: Run) -> list[tuple[str, str]]:
    """Key and value, as text, with the sections' names."""

    def walk(section: dict[str, Any], prefix: str) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for key, value in section.items():
            if isinstance(value, dict):
                rows += walk(value, f"{prefix}{key}.")
            else:
                rows.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)))
        return rows

    return walk(run.plan["configuration"], "") if run.plan is not None else []


def _summary(runs: Sequence[Run]) -> list[list[str]]:
    """Rows ``[what, value of each run…]``."""
    columns = [_summary_of(run) for run in runs]
    return [[what, *(column[what] for column in columns)] for what in columns[0]]


def _summary_of(run: Run) -> dict[str, str]:
    plan = run.plan or {}
    known = {key: [value for value in run.column(key) if value is not None] for key in _SUMMARISED}
    parts = {name: sum(value or 0.0 for value in values) for name, values in time_parts(run).items()}
    total = sum(parts.values())
    capacity = (plan.get("memory_bytes") or {}).get("capacity")
    last = run.records[-1] if run.records else {}
    return {
        "device": str(plan.get("device", "")),
        "ranks": str(plan.get("world_size", "")),
        "last step": f"{last['step']:,}" if last else "",
        "tokens": f"{known['tokens'][-1]:,.0f}" if known["tokens"] else "",
        "last loss": f"{known['loss'][-1]:.4f}" if known["loss"] else "",
        "lowest loss": f"{min(known['loss']):.4f}" if known["loss"] else "",
        "tokens/s, median": f"{statistics.median(known['tokens_per_second']):,.0f}"
        if known["tokens_per_second"]
        else "",
        "MFU, median": f"{100 * statistics.median(known['mfu']):.1f} %" if known["mfu"] else "",
        "peak memory": f"{max(known['mem_bytes']) / GIB:.2f} GB" + (f" of {capacity / GIB:.0f} GB" if capacity else "")
        if known["mem_bytes"]
        else "",
        "time in these steps": _duration(total) if run.records else "",
        **{f"of it {name}": f"{100 * parts[name] / total:.1f} %" if total else "" for name in PARTS},
        "skipped steps": f"{known['skipped_steps'][-1]:.0f}" if known["skipped_steps"] else "",
    }


_SUMMARISED = ("tokens", "loss", "tokens_per_second", "mfu", "mem_bytes", "skipped_steps")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def _plan(runs: Sequence[Run]) -> list[list[str]]:
    """Rows ``[what, value of each run…]`` from ``plan.json``; none where no run has one."""
    plans = [run.plan for run in runs]
    if not any(plans):
        return []
    rows: list[list[str]] = []

    def row(what: str, values: list[Any], form: str = "{:,}") -> None:
        if any(value is not None for value in values):
            texts = ["" if v is None else form.format(v) if isinstance(v, (int, float)) else str(v) for v in values]
            rows.append([what, *texts])

    def of(section: str | None, key: str) -> list[Any]:
        sections = [p if section is None or p is None else p.get(section) for p in plans]
        return [s.get(key) if isinstance(s, dict) else None for s in sections]

    row("model", of("model", "name"))
    row("parameters", of("model", "num_parameters"))
    for key in ("units", "buckets"):
        row(key, of("model", key))
    row("tokens per step", of(None, "tokens_per_step"))
    row("total tokens", of(None, "total_tokens"))
    row("operations per token", of(None, "flops_per_token"), "{:.4g}")
    row("peak of all devices, FLOP/s", of(None, "peak_flops"), "{:.4g}")
    kinds = {kind: None for plan in plans if plan for kind in plan["memory_bytes"] if kind not in _MEMORY_KINDS}
    for kind in (*kinds, *_MEMORY_KINDS):
        values = of("memory_bytes", kind)
        row(
            f"memory: {kind}",
            [None if v is None or not isinstance(v, (int, float)) else v / 2**20 for v in values],
            "{:,.1f} MB",
        )
    libraries = {name: None for plan in plans if plan for name in plan.get("versions") or {}}
    for name in libraries:
        row(name, of("versions", name))
    return rows
