"""What the kernel says about memory: of this process, and of this machine or the cgroup that it may use."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (
    ("memory.max", "memory.current"),  # version 2
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),  # version 1
)


def reset_peak() -> bool:
    """Lets ``peak_resident_bytes`` start anew from the present size; False where the kernel does not allow it."""
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_resident_bytes() -> int:
    """Largest resident set since the process started or since ``reset_peak``; shared pages count in full."""
    return _kib_field(_STATUS, "VmHWM:")


def capacity_bytes() -> int:
    """What the processes of this machine may use together: the cgroup's limit, or the RAM if that is less."""
    return min([_kib_field(_MEMINFO, "MemTotal:"), *(limit for limit, _ in _cgroup_limits())])


def available_bytes() -> int:
    """What new processes of this machine can still take: MemAvailable, or what the cgroup leaves if that is less."""
    left = [max(0, limit - used) for limit, used in _cgroup_limits()]
    return min([_kib_field(_MEMINFO, "MemAvailable:"), *left])


def _cgroup_limits() -> list[tuple[int, int]]:
    """Limit and use in bytes, of the cgroups that have a limit."""
    found = []
    for limit_name, used_name in _LIMITS:
        limit, used = _CGROUP / limit_name, _CGROUP / used_name
        if limit.is_file() and used.is_file():
            text = limit.read_text().strip()
            if text.isdecimal():  # version 2 says "max" for no limit, version 1 a huge number
                found.append((int(text), int(used.read_text())))
    return found


def _kib_field(path: Path, name: str) -> int:
    _, found, rest = f"\n{path.read_text()}".partition(f"\n{name}")  # without a list of lines: every step asks
    if not found:
        raise RuntimeError(f"{path} has no line {name}")
    return int(rest.split(None, 1)[0]) * 1024
