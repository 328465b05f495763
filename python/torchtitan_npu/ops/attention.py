"""Causal self-attention with grouped key/value heads.

Letters: B batch, T position, H query heads, K key/value heads, G = H / K query heads per key/value head, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtitan_npu.ops.documents import Documents
from torchtitan_npu.ops.flash_attention import check_attention_arguments, flash_attention


def attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, flash: bool, documents: Documents | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, where position t sees the positions 0..t, of its own document if they are given.

    Key/value heads are never repeated in memory: query head h reads key/value head ``h // (H // K)``.

    Args:
        q_BHTD: queries ``[B, H, T, D]``, any floating-point dtype.
        k_BKTD: keys ``[B, K, T, D]``; K divides H.
        v_BKTD: values ``[B, K, T, D]``.
        flash: True uses a fused kernel, see ``flash_attention`` (memory linear in T). False multiplies the matrices
            out, with the softmax in fp32 (memory quadratic in T); it is the reference.
        documents: of the batch, where rows hold several.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``.

    Raises:
        ValueError: K does not divide H, or the shapes do not belong together.
    """
    if flash:
        return flash_attention(q_BHTD, k_BKTD, v_BKTD, documents)
    check_attention_arguments("attention", q_BHTD, k_BKTD, v_BKTD, documents)
    return _plain_attention(q_BHTD, k_BKTD, v_BKTD, documents)


def _plain_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Documents | None) -> Tensor:
    B, H, T, D = q_BHTD.shape
    K = k_BKTD.shape[1]
    G = H // K
    # The G query heads of a key/value head become G * T rows of one product, so k and v need not be expanded.
    q_BKRD = q_BHTD.reshape(B, K, G * T, D) * (1.0 / math.sqrt(D))
    scores_BKGTT = (q_BKRD @ k_BKTD.transpose(-2, -1)).view(B, K, G, T, T).float()
    if documents is None:
        hidden = torch.ones(T, T, dtype=torch.bool, device=q_BHTD.device).triu(1)
    else:
        hidden = documents.hidden[:, None]
    weights_BKGTT = scores_BKGTT.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v_BKTD.dtype)
    return (weights_BKGTT.view(B, K, G * T, T) @ v_BKTD).view(B, H, T, D)
