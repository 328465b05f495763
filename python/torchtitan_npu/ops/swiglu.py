"""The gated activation of SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_npu.ops.npu import fused_kernel


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, where ``silu(x) = x / (1 + exp(-x))`` (Shazeer, 2020, arXiv:2002.05202).

    On NPUs aclnnSwiGlu and its gradient, which take the two side by side: 3 launches with the concatenation (1 + 1, and
    1 in backward), where plain operators need 5 (2 + 3), and two tensors kept for backward instead of three.

    Args:
        gate: ``[..., F]``, any floating-point dtype.
        up: likewise.

    Returns:
        ``[..., F]``, likewise.

    Raises:
        ValueError: shapes or dtypes differ.
    """
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: gate {gate.dtype} {tuple(gate.shape)} and up {up.dtype} {tuple(up.shape)} must be alike"
        )
    fused = fused_kernel("npu_swiglu", gate)
    if fused is not None:
        return fused(torch.cat((gate, up), dim=-1), -1)
    return F.silu(gate) * up
