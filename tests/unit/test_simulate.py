"""``torchtitan-npu simulate``: where the simulator is looked for, the environment it sets, and its errors."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu import cli, cli_simulate
from torchtitan_npu.cli_simulate import SimulatorError, find_simulator, simulated_environment


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TT_SIMULATOR_DIR", "TT_SIM_NPUS", "TT_SIM_MEMORY_MB", "LOCAL_RANK", "ASCEND_CUSTOM_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def has_torch_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def simulator_in(folder: Path) -> Path:
    (folder / "lib64").mkdir(parents=True)
    (folder / "lib64" / "libascendcl.so").touch()
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    """What would have replaced this process."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    return calls


def test_the_command_runs_in_the_simulators_environment(
    has_torch_npu: None,
    started: list[tuple[str, list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = simulator_in(tmp_path / "cann")
    monkeypatch.setenv("TT_SIMULATOR_DIR", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/before")
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", "/real/operators")
    cli.main(["simulate", "--npus", "3", "--memory_mb", "512", "--", "sh", "-c", "x", "--", "--npus"])
    ((program, arguments, environment),) = started
    assert os.path.isabs(program) and os.path.basename(program) == "sh"
    assert arguments == [program, "-c", "x", "--", "--npus"]
    assert environment["ASCEND_HOME_PATH"] == str(folder)
    assert environment["ASCEND_OPP_PATH"] == f"{folder}/opp"
    assert environment["LD_LIBRARY_PATH"] == f"{folder}/lib64:/before"
    assert (environment["TT_SIM_NPUS"], environment["TT_SIM_MEMORY_MB"]) == ("3", "512")
    assert environment["PATH"].split(":")[0] == os.path.dirname(os.path.abspath(sys.executable))
    assert "ASCEND_CUSTOM_OPP_PATH" not in environment
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("simulation: sh runs on 3 simulated Ascend cards, computed on this machine's CPU")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("outer", "npus", "expected"), [({}, None, "8"), ({"TT_SIM_NPUS": "2"}, None, "2")])
def test_number_of_cards_without_the_option(outer: dict[str, str], npus: int | None, expected: str) -> None:
    environment = simulated_environment(outer, Path("/cann"), npus=npus, memory_mb=None)
    assert environment["TT_SIM_NPUS"] == expected
    assert "TT_SIM_MEMORY_MB" not in environment
    assert environment["LD_LIBRARY_PATH"] == "/cann/lib64"  # no empty element, which would be the current directory


def test_places_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "root" / "python" / "torchtitan_npu"
    monkeypatch.setattr(cli_simulate, "__file__", str(package / "cli_simulate.py"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SimulatorError) as caught:
        find_simulator({})
    assert f"\n  {package}/_simulator/cann\n" in str(caught.value)
    for way in ("make simulator", "pip install . -C cmake.define.TT_SIMULATOR=ON", "TT_SIMULATOR_DIR"):
        assert way in str(caught.value)

    built = simulator_in(tmp_path / "root" / "build" / "simulator" / "simulator" / "cann")
    with pytest.raises(SimulatorError):
        find_simulator({})  # not a source tree of ours
    (tmp_path / "root" / "simulator").mkdir()
    (tmp_path / "root" / "simulator" / "CMakeLists.txt").touch()
    assert find_simulator({}) == built
    installed = simulator_in(package / "_simulator" / "cann")
    assert find_simulator({}) == installed
    named = simulator_in(tmp_path / "named")
    assert find_simulator({"TT_SIMULATOR_DIR": str(named)}) == named
    with pytest.raises(SimulatorError, match="TT_SIMULATOR_DIR=/nowhere is no simulator"):
        find_simulator({"TT_SIMULATOR_DIR": "/nowhere"})


def test_the_source_tree_in_which_it_is_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli_simulate, "__file__", str(tmp_path / "site-packages/torchtitan_npu/cli_simulate.py"))
    (tmp_path / "tree" / "simulator").mkdir(parents=True)
    (tmp_path / "tree" / "simulator" / "CMakeLists.txt").touch()
    built = simulator_in(tmp_path / "tree" / "build" / "simulator" / "simulator" / "cann")
    monkeypatch.chdir(tmp_path / "tree")
    assert find_simulator({}) == built


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--npus", "2"], "no command: write it after --"),
        (["--npus", "2", "--"], "no command: write it after --"),
        (["python", "x.py"], "unrecognized arguments: python x.py"),
        (["--npus", "0", "--", "true"], "'0' is not a whole number in 1..64"),
        (["--npus", "65", "--", "true"], "'65' is not a whole number in 1..64"),
        (["--memory_mb", "2", "--", "true"], "'2' is not a whole number in 4..1048576"),
    ],
)
def test_wrong_usage(
    has_torch_npu: None,
    started: list[Any],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["simulate", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert started == []


def test_without_arguments_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate"]) == 2
    assert "torchtitan-npu simulate --npus 2 -- torchrun" in capsys.readouterr().err


def test_a_command_that_does_not_exist(
    has_torch_npu: None,
    started: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TT_SIMULATOR_DIR", str(simulator_in(tmp_path / "cann")))
    assert cli.main(["simulate", "--", "no-such-command"]) == 127
    assert capsys.readouterr().err == "command not found: no-such-command\n"
    assert started == []


def test_without_torch_npu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["simulate", "--", "true"]) == 2
    assert "torch_npu is not installed" in (err := capsys.readouterr().err)
    assert "pip install torch_npu==2.13.0" in err
