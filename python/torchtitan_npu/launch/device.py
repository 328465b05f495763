"""Which device a rank trains on."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

from torchtitan_npu.launch.environment import Environment, LaunchError

BACKENDS = {"cpu": "gloo", "npu": "cpu:gloo,npu:hccl"}
"""``torch.distributed`` backends by device type. What the hosts tell each other goes through gloo everywhere."""


def choose_device(wanted: str, env: Environment) -> torch.device:
    """The device of this rank, made the current one.

    Args:
        wanted: ``"cpu"``, ``"npu"``, or ``"auto"``: an NPU where torch_npu finds one, else the CPU.

    Raises:
        LaunchError: NPUs cannot be used (the message says what is missing and where it was looked for), or there are
            fewer of them than ranks on this machine.
    """
    if wanted == "cpu":
        return torch.device("cpu")
    missing = why_no_npu()
    if missing:
        if wanted == "auto":
            return torch.device("cpu")
        raise LaunchError(f"parallel.device is npu, but {missing}")
    npu: Any = torch.get_device_module("npu")
    count = npu.device_count()
    if env.local_world_size > count:
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        limit = f" (ASCEND_RT_VISIBLE_DEVICES={visible})" if visible else ""
        raise LaunchError(
            f"{env.local_world_size} ranks were started on this machine, which has {count} NPU(s){limit}; start "
            f"torchrun with --nproc_per_node={count}, or make more of them visible"
        )
    npu.set_device(env.local_rank)
    return torch.device("npu", env.local_rank)


def why_no_npu() -> str:
    """Why this process cannot use an NPU, as the end of a sentence; empty if it can."""
    from torchtitan_npu import _C

    if importlib.util.find_spec("torch_npu") is None:
        reason = f"torch_npu is not installed: pip install torch_npu=={torch.__version__.partition('+')[0]}"
        missing = _C.missing_from_cann()
        return f"{reason}\n{missing}" if missing else reason
    if not hasattr(torch, "npu"):
        missing = _C.missing_from_cann()
        switched_off = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0"
        reason = "torch_npu is installed but not loaded" + (
            " (TORCH_DEVICE_BACKEND_AUTOLOAD=0: unset it, or `import torch_npu` first)" if switched_off else ""
        )
        return f"{reason}\n{missing}" if missing else reason
    npu: Any = torch.get_device_module("npu")
    if not npu.is_available():
        return "torch_npu finds no card: `npu-smi info` shows those of this machine; `torchtitan-npu doctor` says more"
    return ""
