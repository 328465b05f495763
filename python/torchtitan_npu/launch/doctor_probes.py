"""What only a process with torch can find out. Each probe is a process of its own: it may raise, crash or hang."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_TIMEOUT_SECONDS = 120
# torch_npu prints, too.
_MARK = "torchtitan-npu doctor: "

_CORE = """
import json, os
import torch
from torchtitan_npu import _C
missing = _C.missing_from_cann()
with open("/proc/self/maps") as maps:
    loaded = [line.split()[-1] for line in maps if line.rstrip().endswith("libascendcl.so")]
facts = {"torch": torch.__version__, "missing": missing, "folders": _C.cann_folders(), "library": "".join(loaded[:1])}
print(MARK + json.dumps(facts), flush=True)
os._exit(0)
"""

_TORCH_NPU = """
import json, os
import torch, torch_npu
from torchtitan_npu.launch.simulated import is_simulated
devices = []
for index in range(torch.npu.device_count()):
    torch.npu.set_device(index)
    name = torch.npu.get_device_name(index)
    try:
        free, total = torch.npu.mem_get_info(index)
        devices.append(f"{name}, {total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free")
    except Exception as error:
        devices.append(f"{name}, but its memory cannot be asked for: {error}")
facts = {"cann": torch.npu.utils.get_cann_version(), "devices": devices, "simulated": is_simulated()}
print(MARK + json.dumps(facts), flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Probe:
    """What a probe found, or why it found nothing."""

    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def probe_core(environ: Mapping[str, str]) -> Probe:
    """torch's version, and what this package's core finds of CANN: ``torch``, ``missing``, ``folders``, ``library``."""
    return run_probe(_CORE, dict(environ) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def probe_torch_npu(environ: Mapping[str, str]) -> Probe:
    """torch_npu's view: ``cann``, ``devices`` (name and memory in words), ``simulated``."""
    # Imported by its name: as a plug-in of torch, its own error would hide behind torch's.
    return run_probe(_TORCH_NPU, dict(environ) | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


def run_probe(program: str, environ: Mapping[str, str], timeout_seconds: float = _TIMEOUT_SECONDS) -> Probe:
    """Run ``program`` in a Python of its own; its facts, or its end in words."""
    environment = dict(environ)
    # A rank of its own would make torch_npu and HCCL look for the others.
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"MARK = {_MARK!r}\n{program}"],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_seconds,
        )
    except subprocess.TimeoutExpired:
        return Probe(error=f"did not answer within {timeout_seconds:.0f} s")
    except OSError as error:
        return Probe(error=str(error))
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return Probe(json.loads(line.removeprefix(_MARK)))
    last = _last_words(done.stderr or done.stdout)
    if done.returncode < 0:
        return Probe(error=f"crashed ({signal.Signals(-done.returncode).name})\n{last}".strip())
    return Probe(error=last or f"ended with status {done.returncode}")


def _last_words(output: str) -> str:
    """The exception that ended a Python program, without its traceback; else the last lines."""
    lines = output.strip().splitlines()
    for index in range(len(lines) - 1, -1, -1):
        if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Exit)\b", lines[index]):
            return "\n".join(lines[index:])
    return "\n".join(lines[-4:])
