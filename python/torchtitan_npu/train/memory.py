"""Memory that training has taken, and what there is: of an accelerator, or of the process and its machine."""

from __future__ import annotations

from pathlib import Path

import torch

GIB = 1024**3
_CGROUP_V2 = Path("/sys/fs/cgroup/memory.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def peak_bytes(device: torch.device) -> int:
    """The most that this process has had of ``device`` so far: reserved by torch's allocator, or resident."""
    if device.type == "cpu":
        return peak_resident_bytes()
    return int(torch.get_device_module(device).max_memory_reserved(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that tensors have used of what torch's allocator reserved on ``device``; 0 on the CPU."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated(device))


def capacity_bytes(device: torch.device) -> int:
    """What there is: of the accelerator for this rank, or of the machine for all its processes."""
    if device.type == "cpu":
        return memory_capacity_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[1])


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
