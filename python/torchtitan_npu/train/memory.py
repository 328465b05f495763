"""Memory that training has taken, and what there is: of an accelerator, or of the process and its machine."""

from __future__ import annotations

import torch

from torchtitan_npu.planning import process_memory

GIB = 1024**3


def peak_bytes(device: torch.device) -> int:
    """The most that this process has had of ``device`` so far: reserved by torch's allocator, or resident."""
    if device.type == "cpu":
        return process_memory.peak_resident_bytes()
    return int(torch.get_device_module(device).max_memory_reserved(device))


def peak_allocated_bytes(device: torch.device) -> int:
    """The most that tensors have used of what torch's allocator reserved on ``device``; 0 on the CPU."""
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated(device))


def capacity_bytes(device: torch.device) -> int:
    """What there is: of the accelerator for this rank, or of the machine for all its processes."""
    if device.type == "cpu":
        return process_memory.capacity_bytes()
    return int(torch.get_device_module(device).mem_get_info(device)[1])
