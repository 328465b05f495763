"""Memory of the process and of the machine, on the CPU."""

from __future__ import annotations

from pathlib import Path

GIB = 1024**3
_CGROUP_V2 = Path("/sys/fs/cgroup/memory.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_resident_bytes() -> int:
    """The largest resident set size this process has had (VmHWM), including shared pages it touched."""
    return _kib_field(Path("/proc/self/status"), "VmHWM:")


def memory_capacity_bytes() -> int:
    """What the processes of this machine may use together: the cgroup's limit, or the RAM if that is less."""
    ram = _kib_field(Path("/proc/meminfo"), "MemTotal:")
    limits = [ram]
    for path in (_CGROUP_V2, _CGROUP_V1):
        if path.is_file():
            text = path.read_text().strip()
            # Version 2 says "max" for no limit; version 1 says a huge number.
            if text.isdecimal():
                limits.append(int(text))
    return min(limits)


def _kib_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no line {name}")
