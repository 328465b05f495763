"""Which device a rank trains on."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Any

import torch

from torchtitan_npu import _autoload
from torchtitan_npu.launch.environment import Environment, LaunchError
from torchtitan_npu.launch.npu_variables import read_npu_variables

logger = logging.getLogger(__name__)

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
            if importlib.util.find_spec("torch_npu") is not None and env.local_rank == 0:
                logger.warning("parallel.device is auto and training is on the CPU: %s", missing)
            return torch.device("cpu")
        read_npu_variables()  # a wrong list of cards may be why there are none
        raise LaunchError(f"parallel.device is npu, but {missing}")
    read_npu_variables().check_ranks(env.local_world_size)
    npu: Any = torch.get_device_module("npu")
    count = npu.device_count()
    if env.local_world_size > count:
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        limit = f" (ASCEND_RT_VISIBLE_DEVICES={visible})" if visible else ""
        raise LaunchError(
            f"{env.local_world_size} ranks were started on this machine, which has {count} NPU(s){limit}; start "
            f"torchrun with --nproc_per_node={count}, or make more of them visible. LOCAL_RANK, which counts the ranks "
            "of one machine, is the number of a rank's card; RANK is not"
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
        if _autoload.switched_off:
            reason = "torch_npu is installed but not loaded, because CANN was not found"
        elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
            reason = (
                "torch_npu is installed but not loaded (TORCH_DEVICE_BACKEND_AUTOLOAD=0: unset it, or "
                "`import torch_npu` first)"
            )
        else:
            reason = "torch_npu is installed but not loaded"
        return f"{reason}\n{missing}" if missing else reason
    npu: Any = torch.get_device_module("npu")
    if not npu.is_available():
        return "torch_npu finds no card: `npu-smi info` shows those of this machine; `torchtitan-npu doctor` says more"
    return ""
