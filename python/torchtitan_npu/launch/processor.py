"""What this machine computes with."""

from __future__ import annotations

import platform
from pathlib import Path


def processor_name() -> str:
    """The processor's name as the kernel gives it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
