"""Root-mean-square normalisation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from torchtitan_npu.ops.npu import fused_kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) * weight`` over the last dimension (Zhang and Sennrich, 2019, arXiv:1910.07467).

    On NPUs aclnnRmsNorm and its gradient: 2 launches, where torch_npu's ``F.rms_norm`` needs 18.

    Args:
        x: ``[..., M]``, any floating-point dtype; the mean is computed in fp32 for half precisions.
        weight: ``[M]``.
        eps: added to the mean square.

    Returns:
        ``[..., M]`` in the dtype of ``x``.

    Raises:
        ValueError: ``weight`` is not 1-D of x's last size.
    """
    if weight.ndim != 1 or weight.shape[0] != x.shape[-1]:
        raise ValueError(f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}")
    weight = weight.to(x.dtype)
    fused = fused_kernel("npu_rms_norm", x)
    if fused is not None:
        return fused(x, weight, eps)[0]
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
