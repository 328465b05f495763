"""What this machine has for NPUs, and what is wrong with it: ``torchtitan-npu doctor``.

Nothing here imports torch: with torch_npu installed and CANN broken, that import raises or crashes. Other processes try
it (``doctor_probes``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torchtitan_npu
from torchtitan_npu._autoload import environment_of_the_user
from torchtitan_npu.launch.doctor_probes import Probe, probe_core, probe_torch_npu
from torchtitan_npu.launch.environment import LaunchError, read_environment
from torchtitan_npu.launch.npu_variables import read_npu_variables
from torchtitan_npu.launch.timeouts import read_timeouts

_NPU_SMI_SECONDS = 30
_ASCEND_FOLDER = Path("/usr/local/Ascend")
_INSTALL_INFO = Path("/etc/ascend_install.info")
_VARIABLES = (
    "HCCL_CONNECT_TIMEOUT",
    "HCCL_EXEC_TIMEOUT",
    "HCCL_BUFFSIZE",
    "HCCL_WHITELIST_DISABLE",
    "ASCEND_RT_VISIBLE_DEVICES",
)
_OTHER_VARIABLES = (
    "ASCEND_HOME_PATH",
    "ASCEND_OPP_PATH",
    "ASCEND_TOOLKIT_HOME",
    "LD_LIBRARY_PATH",
    "TASK_QUEUE_ENABLE",
    "ASCEND_LAUNCH_BLOCKING",
    "PYTORCH_NPU_ALLOC_CONF",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "HCCL_IF_IP",
    "HCCL_SOCKET_IFNAME",
    "GLOO_SOCKET_IFNAME",
)


@dataclass
class Examination:
    """Facts by section, in order, and what is wrong."""

    sections: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    verdict: str = ""

    def fact(self, section: str, name: str, text: str) -> None:
        self.sections.setdefault(section, []).append((name, text))

    def problem(self, section: str, name: str, text: str) -> None:
        self.fact(section, name, f"PROBLEM: {text}")
        self.problems.append(f"{name}: {text}")

    def describe(self) -> str:
        """The whole report."""
        lines = []
        for section, facts in self.sections.items():
            lines.append(section)
            for name, text in facts:
                first, *rest = text.splitlines() or [""]
                lines.append(f"  {name:<26} {first}".rstrip())
                lines += [f"  {'':<26} {line}".rstrip() for line in rest]
        lines.append("")
        lines += [f"PROBLEM: {problem.splitlines()[0]}" for problem in self.problems]
        lines.append(self.verdict)
        return "\n".join(lines)


def examine(environ: Mapping[str, str] | None = None) -> Examination:
    """Look at everything; takes seconds, since it starts a Python with torch and one with torch_npu."""
    env = environment_of_the_user() if environ is None else environ
    found = Examination()
    core = probe_core(env)
    _software(found, core)
    torch_npu = _installed("torch_npu")
    expected = _expects_npu(env, core, torch_npu)
    cards = _ascend(found, env, core, torch_npu, expected=expected)
    _network(found, env)
    _environment(found, env)
    if found.problems:
        count = len(found.problems)
        found.verdict = f"{count} problem{'s' if count > 1 else ''}"
    elif cards:
        found.verdict = f"{cards} can be used"
    else:
        found.verdict = "no NPU here, and nothing that expects one: training runs on the CPU"
    return found


def _software(found: Examination, core: Probe) -> None:
    section = "software"
    found.fact(section, "system", f"{platform.system()} {platform.release()} {platform.machine()}")
    found.fact(section, "python", f"{platform.python_version()} ({sys.executable})")
    found.fact(section, "torchtitan-npu", f"{torchtitan_npu.__version__} ({Path(torchtitan_npu.__file__).parent})")
    if core.error:
        found.problem(section, "torch and the core", core.error)
    else:
        found.fact(section, "torch", str(core.facts["torch"]))
    torch_npu = _installed("torch_npu")
    if not torch_npu:
        found.fact(section, "torch_npu", "not installed")
    elif core.error:
        found.fact(section, "torch_npu", torch_npu)
    else:
        torch = str(core.facts["torch"]).partition("+")[0]
        if _series(torch) == _series(torch_npu):
            found.fact(section, "torch_npu", f"{torch_npu}, belongs to torch {torch}")
        else:
            found.problem(
                section,
                "torch_npu",
                f"{torch_npu} does not belong to torch {torch}: pip install torch_npu=={torch}",
            )


def _ascend(found: Examination, env: Mapping[str, str], core: Probe, torch_npu: str, *, expected: bool) -> str:
    """Driver, CANN and cards; returns the usable cards in words, empty if there are none."""
    section = "Ascend"
    for name in ("driver", "firmware"):
        found.fact(section, name, _version_info(name) or "not installed")
    found.fact(section, "device files", ", ".join(sorted(map(str, _device_files()))) or "none")
    npu_smi = _npu_smi(env)
    if npu_smi:
        found.fact(section, "npu-smi info", npu_smi)
    missing = str(core.facts.get("missing", ""))
    if core.error:
        found.fact(section, "CANN", "cannot be looked for without the core")
    elif missing and expected:
        found.problem(section, "CANN", missing)
    elif missing:
        found.fact(section, "CANN", f"not found, looked in the loader's path and {', '.join(core.facts['folders'])}")
    else:
        found.fact(section, "CANN", f"{_toolkit_version(env)}libraries complete, {core.facts['library']}")
    if not torch_npu:
        if expected:
            torch = str(core.facts.get("torch", "2.13.0")).partition("+")[0]
            found.problem(section, "cards", f"torch_npu is not installed: pip install torch_npu=={torch}")
        return ""
    if missing or core.error:
        return ""
    probe = probe_torch_npu(env)
    if probe.error:
        found.problem(section, "torch_npu", probe.error)
        return ""
    found.fact(section, "CANN, as torch_npu sees it", str(probe.facts["cann"]))
    simulated = bool(probe.facts["simulated"])
    if simulated:
        found.fact(section, "simulated Ascend", "yes: computed on the CPU; nothing here is true of a real card")
    devices = list(probe.facts["devices"])
    for index, device in enumerate(devices):
        found.fact(section, f"card {index}", ("simulated " if simulated else "") + str(device))
    if not devices:
        found.problem(
            section, "cards", "torch_npu finds none: see npu-smi info, the device files and ASCEND_RT_VISIBLE_DEVICES"
        )
        return ""
    kind = "simulated Ascend card" if simulated else "NPU"
    return f"{len(devices)} {kind}{'s' if len(devices) > 1 else ''}"


def _network(found: Examination, env: Mapping[str, str]) -> None:
    section = "network"
    host = socket.gethostname()
    found.fact(section, "hostname", f"{host} ({_resolve(host) or 'does not resolve'})")
    interfaces = []
    for _, name in socket.if_nameindex():
        state = Path(f"/sys/class/net/{name}/operstate")
        interfaces.append(f"{name} ({state.read_text().strip()})" if state.exists() else name)
    found.fact(section, "interfaces", ", ".join(interfaces) or "none")
    address = env.get("MASTER_ADDR")
    if address:
        resolved = _resolve(address)
        if resolved:
            found.fact(section, "MASTER_ADDR", f"{address} ({resolved})")
        else:
            found.problem(section, "MASTER_ADDR", f"{address} does not resolve: name the first node's address")
    for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = env.get(name, "").lstrip("=^")
        known = [interface for _, interface in socket.if_nameindex()]
        # HCCL's may list prefixes, "^" excludes: only what is surely wrong is a problem.
        if wanted and "^" not in env[name] and not any(k.startswith(w) for w in wanted.split(",") for k in known):
            found.problem(section, name, f"{env[name]} is no interface of this machine")


def _environment(found: Examination, env: Mapping[str, str]) -> None:
    section = "environment"
    values: dict[str, str] = {}
    problems: list[str] = []
    warnings: list[str] = []
    try:
        timeouts = read_timeouts(env)
        values["HCCL_CONNECT_TIMEOUT"] = f"{timeouts.connect_seconds} s"
        values["HCCL_EXEC_TIMEOUT"] = f"{timeouts.exec_seconds} s" if timeouts.exec_seconds else "0: no limit"
        warnings += timeouts.warnings
    except LaunchError as error:
        problems += str(error).splitlines()
    try:
        variables = read_npu_variables(env)
        visible = variables.visible_cards
        values["HCCL_BUFFSIZE"] = f"{variables.buffer_mb} MiB, twice that for each communicator"
        values["HCCL_WHITELIST_DISABLE"] = str(int(variables.whitelist_disabled))
        values["ASCEND_RT_VISIBLE_DEVICES"] = (
            "all cards" if visible is None else ",".join(map(str, visible)) or "no card"
        )
        warnings += variables.warnings
    except LaunchError as error:
        problems += str(error).splitlines()
    for name in _VARIABLES:
        if name in values:
            found.fact(section, name, values[name] + ("" if env.get(name) else " (not set)"))
    for warning in warnings:
        found.fact(section, _variable(warning), f"warning: {warning}")
    for problem in problems:
        found.problem(section, _variable(problem), problem)
    for name in _OTHER_VARIABLES:
        if env.get(name):
            found.fact(section, name, env[name])
    try:
        launch = read_environment(env)
        if launch.from_torchrun:
            found.fact(section, "launch", f"rank {launch.rank} of {launch.world_size}, local rank {launch.local_rank}")
    except LaunchError as error:
        found.problem(section, "launch", str(error))


def _variable(message: str) -> str:
    """The variable that a message of ours begins with."""
    return re.split(r"[=: ]", message)[0]


def _expects_npu(env: Mapping[str, str], core: Probe, torch_npu: str) -> bool:
    """Whether anything on this machine is only there because of NPUs."""
    return bool(
        torch_npu
        or _device_files()
        or _version_info("driver")
        or env.get("ASCEND_HOME_PATH")
        or env.get("ASCEND_RT_VISIBLE_DEVICES")
        or (not core.error and not core.facts["missing"])
    )


def _installed(package: str) -> str:
    """The version, empty if it is not installed."""
    if importlib.util.find_spec(package) is None:
        return ""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of unknown version"


def _series(version: str) -> str:
    """``2.13.0.post2`` and ``2.13.0+cpu`` are of the series ``2.13.0``."""
    found = re.match(r"\d+\.\d+\.\d+", version)
    return found[0] if found else version


def _version_info(what: str) -> str:
    """The version of the driver or the firmware, with the file that says so; empty if there is none."""
    folders = [_ASCEND_FOLDER]
    if _INSTALL_INFO.is_file():
        info = _INSTALL_INFO.read_text(errors="replace")
        folders += [Path(path.strip()) for path in re.findall(r"Install_Path_Param=(.+)", info)]
    for folder in folders:
        file = folder / what / "version.info"
        if file.is_file():
            version = re.search(r"^Version=(.*)$", file.read_text(errors="replace"), re.MULTILINE | re.IGNORECASE)
            return f"{version[1].strip() if version else 'of unknown version'} ({file})"
    return ""


def _toolkit_version(env: Mapping[str, str]) -> str:
    """``8.5.0, `` where the installed toolkit says so."""
    for root in filter(None, (env.get("ASCEND_HOME_PATH"), env.get("ASCEND_TOOLKIT_HOME"))):
        for file in sorted(Path(root).glob("*/ascend_toolkit_install.info")):
            version = re.search(r"^version=(.*)$", file.read_text(errors="replace"), re.MULTILINE)
            if version:
                return f"{version[1].strip()}, "
    return ""


def _device_files() -> list[Path]:
    return [path for path in Path("/dev").glob("davinci*") if re.fullmatch(r"davinci\d+", path.name)]


def _npu_smi(env: Mapping[str, str]) -> str:
    """What ``npu-smi info`` prints; empty without that program."""
    program = shutil.which("npu-smi", path=f"{env.get('PATH', os.defpath)}:/usr/local/sbin")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "info"], capture_output=True, text=True, errors="replace", timeout=_NPU_SMI_SECONDS, env=dict(env)
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"
    return (done.stdout if done.returncode == 0 else f"status {done.returncode}\n{done.stdout}{done.stderr}").strip()


def _resolve(host: str) -> str:
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    return ", ".join(dict.fromkeys(str(address[4][0]) for address in addresses))
