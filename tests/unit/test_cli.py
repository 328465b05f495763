"""The command line: what reaches trainer, planner and preparation, and what ends with status 2 (R39-R41)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu import cli
from torchtitan_npu.config import Config, RunArgs

ROOT = Path(__file__).resolve().parents[2]
ARTICLE = str(ROOT / "examples/train_config.yaml")
DEBUG = str(ROOT / "examples/llama3_debug.yaml")
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    logger = logging.getLogger("torchtitan_npu")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    for handler in logger.handlers:
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.level, logger.propagate = before


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, RunArgs]]:
    """What the trainer was asked to run; it returns 7."""
    calls: list[tuple[Config, RunArgs]] = []

    def run(config: Config, args: RunArgs) -> int:
        calls.append((config, args))
        return 7

    monkeypatch.setitem(sys.modules, "torchtitan_npu.train", fake_module("torchtitan_npu.train", run=run))
    return calls


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, int]]:
    """What the planner was asked to plan; its report is one line."""
    calls: list[tuple[Config, int]] = []

    def dry_run(config: Config, world_size: int) -> str:
        calls.append((config, world_size))
        return f"plan for {world_size}"

    name = "torchtitan_npu.planning.report"
    monkeypatch.setitem(sys.modules, "torchtitan_npu.planning", fake_module("torchtitan_npu.planning"))
    monkeypatch.setitem(sys.modules, name, fake_module(name, dry_run=dry_run))
    return calls


def fake_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def exit_status(arguments: list[str]) -> int:
    """``train_main``'s status, whether it returns it or argparse exits with it."""
    try:
        return cli.train_main(arguments)
    except SystemExit as error:
        assert isinstance(error.code, int)
        return error.code


def test_train_gets_configuration_and_paths(runs: list[tuple[Config, RunArgs]], tmp_path: Path) -> None:
    status = cli.train_main(
        [
            *("--training.max_steps", "5", "--config", DEBUG, "--data_dir", "data/*.jsonl"),
            *("--checkpoint_dir", str(tmp_path / "c"), "--log_dir", str(tmp_path / "l"), "--model.dim=128"),
        ]
    )
    assert status == 7
    ((config, args),) = runs
    assert args == RunArgs(data_dir="data/*.jsonl", checkpoint_dir=tmp_path / "c", log_dir=tmp_path / "l")
    assert (config.training.max_steps, config.model.dim) == (5, 128)


def test_notes_are_logged_before_training(
    runs: list[tuple[Config, RunArgs]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--config", ARTICLE, "--data_dir", "x", "--log_dir", str(tmp_path)]
    cli.train_main([*flags, "--parallel.dp_degree", "-1", "--model.dim", "2048"])
    out, err = capsys.readouterr()
    assert out == "model.dim: 2048 replaces llama3_7b's 4096\n"
    assert err == ""
    assert (tmp_path / "train.log").read_text().splitlines() == [out.strip()]


def test_train_checks_the_world_size_first(
    runs: list[tuple[Config, RunArgs]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.train_main(["--config", ARTICLE, "--data_dir", "x", "--log_dir", str(tmp_path / "logs")]) == 2
    assert runs == []
    assert "4 x parallel.tp_degree 1 = 4, but WORLD_SIZE is 1" in capsys.readouterr().err
    assert not (tmp_path / "logs").exists()


def test_train_names_launch_variables_that_are_missing(
    runs: list[tuple[Config, RunArgs]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert cli.train_main(["--config", DEBUG, "--data_dir", "x"]) == 2
    assert runs == []
    assert "LOCAL_RANK is not set" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "variable", "expected"),
    [
        ([], None, 4),  # the file's dp_degree 4 x tp_degree 1
        ([], "4", 4),
        (["--parallel.dp_degree", "-1"], None, 1),
        (["--parallel.dp_degree", "-1"], "8", 8),
        (["--parallel.dp_degree", "-1", "--world_size", "16"], "8", 16),
    ],
)
def test_dry_run_plans_for_the_world_size(
    plans: list[tuple[Config, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    variable: str | None,
    expected: int,
) -> None:
    if variable is not None:
        monkeypatch.setenv("WORLD_SIZE", variable)
    assert cli.train_main(["--config", ARTICLE, "--dry_run", *flags]) == 0
    ((config, world_size),) = plans
    assert (config.model.name, world_size) == ("llama3_7b", expected)
    out, err = capsys.readouterr()
    assert out == f"plan for {expected}\n"
    assert err == ""


def test_dry_run_reports_once_a_machine(
    plans: list[tuple[Config, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cli.train_main(["--config", ARTICLE, "--dry_run"]) == 0
    assert plans == []
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", DEBUG], "--data_dir is missing"),
        (["--data_dir", "x"], "the following arguments are required: --config"),
        (["--config", DEBUG, "--data_dir", "x", "--world_size", "2"], "--world_size goes with --dry_run"),
        (["--config", DEBUG, "--dry_run", "--world_size", "0"], "'0' is not a whole number >= 1"),
        (["--config", DEBUG, "--dry_run", "--max_steps", "3"], "did you mean --training.max_steps?"),
        (["--config", DEBUG, "--dry_run", "--data-dir=x"], "did you mean --data_dir?"),
        (["--config", DEBUG, "--dry_run", "stray"], "unrecognized arguments: stray"),
        (["--config", DEBUG, "--dry_run", "--checkpoint", "x"], "unrecognized arguments: --checkpoint x"),
        (["--config", "none.yaml", "--dry_run"], "none.yaml: 1 problem\n  --config: no such file"),
        (["--config", DEBUG, "--dry_run", "--training.seed"], "--training.seed: needs a value"),
        (["--config", DEBUG, "--dry_run", "--parallel.dp_degree", "3", "--world_size", "2"], "but WORLD_SIZE is 2"),
        (["--config", DEBUG, "--dry_run", "--data_dir", "none.jsonl"], "--data_dir: 'none.jsonl' does not exist"),
    ],
)
def test_wrong_usage_is_one_message_and_status_2(
    plans: list[tuple[Config, int]],
    runs: list[tuple[Config, RunArgs]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_status(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err
    # A second rank of the same machine ends the same way without repeating the message.
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert exit_status(arguments) == 2
    assert capsys.readouterr() == ("", "")
    assert (plans, runs) == ([], [])


def test_a_wrong_world_size_variable_is_named(
    plans: list[tuple[Config, int]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert cli.train_main(["--config", DEBUG, "--dry_run"]) == 2
    assert capsys.readouterr().err == "environment: 1 problem\n  WORLD_SIZE: 'two' is not a whole number >= 1\n"


def test_plan_is_a_dry_run(plans: list[tuple[Config, int]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--config", DEBUG, "--world_size", "2"]) == 0
    assert capsys.readouterr().out == "plan for 2\n"
    assert cli.main(["plan"]) == 2
    assert capsys.readouterr().err.startswith("usage: torchtitan-npu plan --config FILE")


def test_prepare_gets_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def prepare(arguments: list[str]) -> int:
        calls.append(arguments)
        return 3

    name = "torchtitan_npu.cli_prepare"
    monkeypatch.setitem(sys.modules, name, fake_module(name, main=prepare))
    assert cli.main(["prepare", "--help", "--input", "a.b"]) == 3
    assert calls == [["--help", "--input", "a.b"]]


def test_train_subcommand(runs: list[tuple[Config, RunArgs]], tmp_path: Path) -> None:
    assert cli.main(["train", "--config", DEBUG, "--data_dir", "x", "--log_dir", str(tmp_path)]) == 7
    assert len(runs) == 1


def test_unknown_and_missing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["combine", "--config", "x"])
    assert caught.value.code == 2
    assert "invalid choice: 'combine'" in capsys.readouterr().err
    assert cli.main([]) == 2
    assert "prepare   turn text into token files" in capsys.readouterr().err


def test_bare_train_py_prints_usage_and_an_example() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: train.py --config FILE --data_dir PATH")
    assert "torchrun --nproc_per_node=2 train.py --config" in done.stderr


def test_configuration_errors_come_without_loading_torch() -> None:
    """A typo is answered at once: config, its errors and the parser must not pull in torch."""
    script = (
        "import sys; from torchtitan_npu.cli import train_main; "
        f"status = train_main(['--config', {DEBUG!r}, '--dry_run', '--training.max_stps', '1']); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr.splitlines()[1:]) == (
        2,
        ["  --training.max_stps: unknown key; did you mean training.max_steps?"],
    )
