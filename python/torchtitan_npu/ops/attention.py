"""Causal self-attention with grouped key/value heads.

Letters: B batch, T position, H query heads, K key/value heads, G = H / K query heads per key/value head, D head size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, flash: bool) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, where position t sees the positions 0..t.

    Key/value heads are never repeated in memory: query head h reads key/value head ``h // (H // K)``.

    Args:
        q_BHTD: queries ``[B, H, T, D]``, any floating-point dtype.
        k_BKTD: keys ``[B, K, T, D]``; K divides H.
        v_BKTD: values ``[B, K, T, D]``.
        flash: True uses the fused kernel of ``scaled_dot_product_attention`` (memory linear in T). False multiplies the
            matrices out, with the softmax in fp32 (memory quadratic in T); it is the reference.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``.

    Raises:
        ValueError: K does not divide H, or the shapes do not belong together.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    if k_BKTD.shape != (B, K, T, D) or v_BKTD.shape != k_BKTD.shape:
        raise ValueError(
            f"attention: q {tuple(q_BHTD.shape)}, k {tuple(k_BKTD.shape)} and v {tuple(v_BKTD.shape)} do not belong "
            "together; k and v must be [B, K, T, D] with the B, T and D of q [B, H, T, D]"
        )
    if K == 0 or H % K != 0:
        raise ValueError(f"attention: {H} query heads cannot share {K} key/value heads; {K} must divide {H}")
    if flash:
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=K != H)
    return _plain_attention(q_BHTD, k_BKTD, v_BKTD)


def _plain_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    G = H // K
    # The G query heads of a key/value head become G * T rows of one product, so k and v need not be expanded.
    q_BKRD = q_BHTD.reshape(B, K, G * T, D) * (1.0 / math.sqrt(D))
    scores_BKGTT = (q_BKRD @ k_BKTD.transpose(-2, -1)).view(B, K, G, T, T).float()
    future_TT = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    weights_BKGTT = scores_BKGTT.masked_fill(future_TT, float("-inf")).softmax(dim=-1).to(v_BKTD.dtype)
    return (weights_BKGTT.view(B, K, G * T, T) @ v_BKTD).view(B, H, T, D)
