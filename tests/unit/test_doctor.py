"""``torchtitan-npu doctor``: what it finds on a machine that the tests make up, and its exit status (R56)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from torchtitan_npu import cli
from torchtitan_npu.launch import doctor
from torchtitan_npu.launch.doctor_probes import Probe, run_probe

NOTHING = {
    "torch": "2.13.0+cpu",
    "missing": "libascendcl.so was not found:\n  tried /x",
    "folders": ["/x"],
    "library": "",
}
CANN = NOTHING | {"missing": "", "library": "/cann/lib64/libascendcl.so"}
CARDS = {"cann": "8.5.0", "devices": ["Ascend910B2, 64.0 GiB, 63.0 GiB free"] * 2, "simulated": False}


class Machine:
    """What the doctor finds; change it before ``examine``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = root
        self.core = Probe(NOTHING)
        self.cards = Probe(error="not asked for")
        self.packages: dict[str, str] = {}
        self.env: dict[str, str] = {"PATH": str(root / "bin")}
        monkeypatch.setattr(doctor, "_ASCEND_FOLDER", root / "Ascend")
        monkeypatch.setattr(doctor, "_INSTALL_INFO", root / "ascend_install.info")
        monkeypatch.setattr(doctor, "_device_files", lambda: [])
        monkeypatch.setattr(doctor, "_installed", lambda package: self.packages.get(package, ""))
        monkeypatch.setattr(doctor, "probe_core", lambda env: self.core)
        monkeypatch.setattr(doctor, "probe_torch_npu", lambda env: self.cards)
        monkeypatch.setattr(doctor, "_npu_smi", lambda env: "")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def has_cards(self) -> None:
        self.core, self.cards, self.packages = Probe(CANN), Probe(CARDS), {"torch_npu": "2.13.0"}

    def examine(self) -> doctor.Examination:
        return doctor.examine(self.env)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_a_machine_without_npus_is_in_order(machine: Machine) -> None:
    found = machine.examine()
    assert found.problems == []
    text = found.describe()
    assert text.endswith("no NPU here, and nothing that expects one: training runs on the CPU")
    for fact in ("torch                      2.13.0+cpu", "driver                     not installed", "HCCL_BUFFSIZE"):
        assert fact in text


def test_a_machine_with_cards(machine: Machine) -> None:
    machine.has_cards()
    machine.write("Ascend/driver/version.info", "Version=24.1.rc2\nascendhal_version=7.35.19\n")
    machine.write("ascend_install.info", f"Firmware_Install_Path_Param={machine.root}/elsewhere\n")
    machine.write("elsewhere/firmware/version.info", "Version=7.3.0.1\n")
    machine.write("toolkit/x86_64-linux/ascend_toolkit_install.info", "package_name=x\nversion=8.5.0\n")
    machine.env["ASCEND_HOME_PATH"] = str(machine.root / "toolkit")
    found = machine.examine()
    assert found.problems == []
    facts = dict(found.sections["Ascend"])
    assert facts["driver"] == f"24.1.rc2 ({machine.root}/Ascend/driver/version.info)"
    assert facts["firmware"].startswith("7.3.0.1 ")
    assert facts["CANN"] == "8.5.0, libraries complete, /cann/lib64/libascendcl.so"
    assert facts["card 1"] == "Ascend910B2, 64.0 GiB, 63.0 GiB free"
    assert found.verdict == "2 NPUs can be used"
    assert "simulated" not in found.describe()


def test_simulated_cards_are_called_so(machine: Machine) -> None:
    machine.has_cards()
    machine.cards = Probe(CARDS | {"simulated": True})
    found = machine.examine()
    assert found.verdict == "2 simulated Ascend cards can be used"
    assert dict(found.sections["Ascend"])["card 0"].startswith("simulated Ascend910B2")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"core": Probe(NOTHING)}, "CANN: libascendcl.so was not found"),
        ({"core": Probe(error="OSError: libtorch.so")}, "torch and the core: OSError: libtorch.so"),
        ({"packages": {"torch_npu": "2.12.0"}}, "torch_npu: 2.12.0 does not belong to torch 2.13.0"),
        ({"packages": {}}, "cards: torch_npu is not installed: pip install torch_npu==2.13.0"),
        ({"cards": Probe(error="crashed (SIGSEGV)")}, "torch_npu: crashed (SIGSEGV)"),
        ({"cards": Probe(CARDS | {"devices": []})}, "cards: torch_npu finds none"),
        ({"env": {"HCCL_EXEC_TIMEOUT": "soon"}}, "HCCL_EXEC_TIMEOUT: HCCL_EXEC_TIMEOUT=soon must be"),
        ({"env": {"HCCL_BUFFSIZE": "0"}}, "HCCL_BUFFSIZE: HCCL_BUFFSIZE=0 must be"),
        ({"env": {"ASCEND_RT_VISIBLE_DEVICES": "0-1"}}, "ASCEND_RT_VISIBLE_DEVICES: ASCEND_RT_VISIBLE_DEVICES=0-1"),
        ({"env": {"MASTER_ADDR": "no.such.host.invalid"}}, "MASTER_ADDR: no.such.host.invalid does not resolve"),
        ({"env": {"GLOO_SOCKET_IFNAME": "nosuch0"}}, "GLOO_SOCKET_IFNAME: nosuch0 is no interface"),
        ({"env": {"RANK": "0"}}, "launch: environment variables of the launch"),
    ],
)
def test_problems(machine: Machine, change: dict[str, Any], problem: str) -> None:
    machine.has_cards()
    for name, value in change.items():
        setattr(machine, name, value)
    found = machine.examine()
    assert len(found.problems) == 1
    assert found.problems[0].startswith(problem)
    lines = found.describe().splitlines()
    assert lines[-1] == "1 problem"
    assert lines[-2].startswith(f"PROBLEM: {problem}")


def test_a_driver_without_torch_npu_is_a_problem(machine: Machine) -> None:
    machine.write("Ascend/driver/version.info", "Version=24.1.rc2\n")
    problems = machine.examine().problems
    assert [problem.partition(":")[0] for problem in problems] == ["CANN", "cards"]


def test_low_timeouts_are_a_warning(machine: Machine) -> None:
    machine.env["HCCL_EXEC_TIMEOUT"] = "300"
    found = machine.examine()
    assert found.problems == []
    assert "warning: HCCL_EXEC_TIMEOUT=300 is below the default of 1836 s" in found.describe()


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["x"], 1)])
def test_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], problems: list[str], status: int
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Examination(problems=problems, verdict="verdict"))
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().out.endswith("verdict\n")
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "stray"])
    assert caught.value.code == 2


def test_npu_smi_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "npu-smi"
    program.write_text("#!/bin/sh\necho npu-smi $1 24.1.rc2\n")
    program.chmod(0o755)
    assert doctor._npu_smi({"PATH": str(tmp_path)}) == "npu-smi info 24.1.rc2"
    program.write_text("#!/bin/sh\necho dcmi model initialized failed >&2; exit 3\n")
    assert doctor._npu_smi({"PATH": str(tmp_path)}) == "status 3\ndcmi model initialized failed"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise ImportError('libhccl.so: cannot open')", "ImportError: libhccl.so: cannot open"),
        ("import os; os.abort()", "crashed (SIGABRT)"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "did not answer within 2 s"),
    ],
)
def test_a_probe_that_fails_says_how(program: str, error: str) -> None:
    probe = run_probe(program, {"RANK": "0"}, timeout_seconds=2)
    assert error in probe.error and probe.facts == {}


def test_a_probe_finds_its_facts_among_other_output() -> None:
    program = "import os; print('noise'); print(MARK + '{\"rank\": ' + str('RANK' in os.environ).lower() + '}')"
    assert run_probe(program, {"RANK": "0"}) == Probe({"rank": False})


def test_the_core_is_asked_in_a_process_of_its_own() -> None:
    probe = doctor.probe_core({})
    assert probe.error == ""
    assert str(probe.facts["torch"]).startswith("2.13.")
    assert probe.facts["missing"] == "" or "libascendcl.so" in probe.facts["missing"]
