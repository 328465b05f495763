"""Fused kernels of torch_npu.

torch_npu is never imported here: a tensor on an NPU exists only in a process that has loaded it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.npu_shapes import KERNELS, stands_for_npu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""What the fused kernels compute in."""


def fused_kernel(name: str, x: Tensor) -> Callable[..., Any] | None:
    """The operator ``torch.ops.npu.<name>`` if ``x`` lies on an NPU, has a dtype that the fused kernels take, and
    torch_npu has the operator; otherwise None, and the caller computes with plain operators.
    """
    if x.dtype not in DTYPES:
        return None
    if stands_for_npu(x):
        return KERNELS.get(name)
    if x.device.type != "npu":
        return None
    return getattr(torch.ops.npu, name, None)


def lies_by_position(x_BHTD: Tensor) -> bool:
    """Whether ``[B, H, T, D]`` is a view of contiguous ``[B, T, H, D]``, the kernels' layout BSND.

    Projections leave queries and keys that way. Kernels that are told so read them where they lie; told BNSD, they
    would copy them first.
    """
    return x_BHTD.transpose(1, 2).is_contiguous()
