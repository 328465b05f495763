"""Whether the NPUs of this process are simulated ones: their results must never be called a real card's."""

from __future__ import annotations

import ctypes
import os


def is_simulated() -> bool:
    """Whether the libascendcl that this process has loaded is the simulator's (it says so by a name of its own)."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            files = {line.split(maxsplit=5)[-1].strip() for line in maps if "libascendcl.so" in line}
    except OSError:
        return False
    return any(os.path.exists(file) and hasattr(ctypes.CDLL(file), "simulated_ascend") for file in files)
