"""``torchtitan-npu report``: what it reads of runs, and the page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu.cli import main
from torchtitan_npu.report import ReportError, read_run, render
from torchtitan_npu.report.page import short_names
from torchtitan_npu.report.series import MOST_POINTS, draw

GIB = 1024**3
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def _record(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 10.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 100 * step,
        "step_time": 2.0,
        "data_time": 0.25,
        "comm_time": 0.5,
        "checkpoint_time": 1.0 if step == 3 else 0.0,
        "mem_bytes": 2 * GIB,
        "tokens_per_second": 50.0,
        "mfu": 0.4,
        "validation_loss": 3.0 if step % 2 == 0 else None,
        "loss_scale": None,
        "skipped_steps": None,
        **values,
    }


def _write_run(
    directory: Path, records: Iterable[dict[str, Any]], *, end: str = "", plan: dict[str, Any] | str | None = None
) -> Path:
    directory.mkdir(parents=True)
    with open(directory / "metrics.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.write(end)
    if plan is not None:
        (directory / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return directory


def _plan(**training: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "device": "the CPU",
        "world_size": 2,
        "model": {"name": "llama3_debug", "num_parameters": 45_264, "units": 3},
        "memory_bytes": {"parameters": 2**20, "total": 3 * 2**20, "capacity": 24 * GIB},
        "versions": {"torch": "2.13.0"},
        "configuration": {"training": {"learning_rate": 1e-3, "max_steps": 6, **training}, "data": {"pack": True}},
    }


def _data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def test_steps_become_lines_and_parts(tmp_path: Path) -> None:
    drawn = draw(read_run(_write_run(tmp_path / "run", map(_record, range(1, 5)), plan=_plan())))
    assert drawn["step"] == [1, 2, 3, 4]
    assert drawn["tokens"] == [100, 200, 300, 400]
    assert drawn["lines"]["loss"] == {"mean": [10.0, 5.0, 3.33333, 2.5]}
    assert drawn["lines"]["mfu"]["mean"] == [40.0] * 4
    assert drawn["lines"]["validation"]["mean"] == [None, 3.0, None, 3.0]
    assert drawn["lines"]["memory"]["mean"] == [2.0] * 4
    assert "loss_scale" not in drawn["lines"]
    # 2 s a step: 0.25 data, 0.5 communication, the rest; the save is on top of them
    assert drawn["parts"]["rest"] == [1.25] * 4
    assert drawn["parts"]["checkpoint"] == [0.0, 0.0, 1.0, 0.0]
    assert drawn["hours"][-1] == pytest.approx(9.0 / 3600, rel=1e-5)


def test_many_steps_become_few_points_that_keep_the_extremes(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 1.0, "step_time": 1.0} for step in range(1, 100_001)]
    records[54_321]["loss"] = 77.0
    drawn = draw(read_run(_write_run(tmp_path / "run", records)))
    assert len(drawn["step"]) == MOST_POINTS == len(drawn["lines"]["loss"]["mean"])
    assert drawn["step"][-1] == 100_000 and drawn["stepsPerPoint"] == 100
    # 99 x 1 and 77
    assert drawn["lines"]["loss"]["mean"][543] == pytest.approx(1.76)
    assert (drawn["lines"]["loss"]["low"][543], drawn["lines"]["loss"]["high"][543]) == (1.0, 77.0)
    assert drawn["hours"][-1] == pytest.approx(100_000 / 3600, rel=1e-5)


def test_torn_lines_and_numbers_that_are_not_finite_are_noted(tmp_path: Path) -> None:
    records = [_record(1), _record(2, loss=float("nan")), _record(3, grad_norm=float("inf")), _record(4)]
    end = '[1, 2]\n{"loss": 1}\n{"step": "x"}\n{"step": true}\n\n{"step": 5, "lo'
    run = read_run(_write_run(tmp_path / "run", records, end=end, plan="{torn"))
    assert run.column("loss") == [10.0, None, 10.0 / 3, 2.5]
    notes = "\n".join(run.notes)
    assert "5 line(s) left out" in notes
    assert "plan.json is left out" in notes
    assert "loss is not finite in 1 step(s), first in step 2" in notes
    assert "grad_norm is not finite in 1 step(s), first in step 3" in notes
    data = _data(render([run]))
    assert data["runs"][0]["lines"]["loss"]["mean"][1] is None
    assert data["plan"] == [] and data["configuration"] == []


def test_a_step_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    records = [*map(_record, (1, 2, 3)), _record(2, loss=7.0), _record(3, loss=6.0)]
    run = read_run(_write_run(tmp_path / "run", records))
    assert [record["step"] for record in run.records] == [1, 2, 3]
    assert run.column("loss") == [10.0, 7.0, 6.0]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_hardly_begun(tmp_path: Path, steps: int) -> None:
    data = _data(render([read_run(_write_run(tmp_path / "run", map(_record, range(1, steps + 1)), plan=_plan()))]))
    assert data["runs"][0]["step"] == list(range(1, steps + 1))
    assert dict(data["configuration"])["training.max_steps"] == "6"


def test_runs_are_compared(tmp_path: Path) -> None:
    directories = [
        _write_run(tmp_path / "a" / "logs", map(_record, (1, 2)), plan=_plan()),
        _write_run(tmp_path / "b" / "logs", map(_record, (1,)), plan=_plan(learning_rate=2e-3, seed=1)),
        _write_run(tmp_path / "c", map(_record, (1,))),
    ]
    data = _data(render([read_run(directory) for directory in directories]))
    assert [run["name"] for run in data["runs"]] == ["a/logs", "b/logs", "c"]
    assert ["training.learning_rate", "0.001", "0.002", ""] in data["differences"]
    assert ["training.seed", "", "1", ""] in data["differences"]
    rows = {row[0]: row[1:] for row in data["plan"]}
    assert rows["memory: parameters"] == ["1.0 MB", "1.0 MB", ""]
    assert list(rows).index("memory: capacity") > list(rows).index("memory: total")
    summary = {row[0]: row[1:] for row in data["summary"]}
    assert summary["peak memory"] == ["2.00 GB of 24 GB", "2.00 GB of 24 GB", "2.00 GB"]
    # of 2 x 2 s: 2 x 0.5 s
    assert summary["of it communication"][0] == "25.0 %"


def test_keys_that_are_the_same_are_no_difference(tmp_path: Path) -> None:
    runs = [read_run(_write_run(tmp_path / name, [], plan=_plan())) for name in "ab"]
    assert _data(render(runs))["differences"] == []


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    paths = [tmp_path / "x" / "logs", tmp_path / "y" / "logs", tmp_path / "z", tmp_path / "z"]
    names = short_names(paths)
    assert names[:2] == ["x/logs", "y/logs"]
    assert names[2].endswith("/z (3)") and names[3].endswith("/z (4)")


def test_the_page_loads_nothing_and_text_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><!--"
    directory = _write_run(tmp_path / "<b>run", map(_record, (1, 2)), plan=_plan(resume=evil))
    page = render([read_run(directory)])
    assert evil not in page and "<b>run" not in page
    assert dict(_data(page)["configuration"])["training.resume"] == evil
    assert set(re.findall(r"https?://[^\s\"'`]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\b(src|href)\s*=|@import|url\((?!#)", page)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = _write_run(tmp_path / "run", map(_record, (1, 2)), end="torn")
    output = tmp_path / "page.html"
    assert main(["report", str(directory), "--output", str(output)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{output}\n"
    assert "1 line(s) left out" in printed.err
    assert _data(output.read_text())["runs"][0]["step"] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "message"), [("missing", "no such directory"), ("file", "is a file"), ("empty", "holds neither")]
)
def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, message: str) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("")
    if kind == "empty":
        path.mkdir()
    with pytest.raises(ReportError, match=message):
        read_run(path)
    assert main(["report", str(path), "--output", str(tmp_path / "page.html")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_output_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = _write_run(tmp_path / "run", map(_record, (1, 2)))
    assert main(["report", str(directory), "--output", str(tmp_path / "no" / "page.html")]) == 1
    assert "name another file" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: chromium or google-chrome")
def test_a_browser_draws_every_chart(tmp_path: Path) -> None:
    assert CHROMIUM is not None
    directories = [
        _write_run(tmp_path / "many", map(_record, range(1, 50)), plan=_plan()),
        _write_run(tmp_path / "one", [_record(1)], plan=_plan(seed=1)),
    ]
    page = tmp_path / "page.html"
    page.write_text(render([read_run(directory) for directory in directories]))
    shown = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000"]
        + [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    ).stdout
    # loss, validation loss, norm, rate, throughput, MFU, memory, and a step's time for each run
    figures = re.findall(r"<figure.*?</figure>", shown, re.DOTALL)
    assert len(figures) == 9
    assert all(re.search(r"<(path|circle|rect)[^>]* (fill|stroke)=\"#", figure) for figure in figures)
    assert "NaN" not in "".join(figures)
    assert "training.seed" in shown
