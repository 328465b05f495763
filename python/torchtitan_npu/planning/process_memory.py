"""What the kernel says about memory: of this process, and what is left on this machine."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_CGROUP = Path("/sys/fs/cgroup")


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


def available_bytes() -> int:
    """What new processes of this machine can still take: MemAvailable, or what the cgroup leaves if that is less."""
    available = _kib_field(Path("/proc/meminfo"), "MemAvailable:")
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file():
        text = limit.read_text().strip()
        if text.isdecimal():  # "max" is no limit
            available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _kib_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{path} has no line {name}")
