"""Causal self-attention with grouped key/value heads.

Letters: B batch, T position, S position of a key, H query heads, K key/value heads, G = H / K query heads per key/value
head, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchtitan_npu.ops.documents import Documents
from torchtitan_npu.ops.flash_attention import check_attention_arguments, flash_attention


def attention(
    q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, flash: bool, documents: Documents | None = None
) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, where position t sees the positions 0..t, of its own document if they are given.

    In training S is T. Where keys and values of earlier positions were kept, the queries are those of the last T of S.

    Key/value heads are never repeated in memory: query head h reads key/value head ``h // (H // K)``.

    Args:
        q_BHTD: queries ``[B, H, T, D]``, any floating-point dtype.
        k_BKSD: keys ``[B, K, S, D]``; K divides H, S is at least T.
        v_BKSD: values ``[B, K, S, D]``.
        flash: True uses a fused kernel, see ``flash_attention`` (memory linear in T). False multiplies the matrices
            out, with the softmax in fp32 (memory T S); it is the reference, and the way for more keys than queries.
        documents: of the batch, where rows hold several; S is T.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``.

    Raises:
        ValueError: K does not divide H, or the shapes do not belong together.
    """
    T, S = q_BHTD.shape[2], k_BKSD.shape[2]
    if flash and S == T:
        return flash_attention(q_BHTD, k_BKSD, v_BKSD, documents)
    check_attention_arguments("attention", q_BHTD, k_BKSD, v_BKSD, documents, earlier_keys=max(0, S - T))
    return _plain_attention(q_BHTD, k_BKSD, v_BKSD, documents)


def _plain_attention(q_BHTD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, documents: Documents | None) -> Tensor:
    B, H, T, D = q_BHTD.shape
    K, S = k_BKSD.shape[1:3]
    G = H // K
    # The G query heads of a key/value head become G * T rows of one product, so k and v need not be expanded.
    q_BKRD = q_BHTD.reshape(B, K, G * T, D) * (1.0 / math.sqrt(D))
    scores_BKGTS = (q_BKRD @ k_BKSD.transpose(-2, -1)).view(B, K, G, T, S).float()
    if documents is None:
        hidden = torch.ones(T, S, dtype=torch.bool, device=q_BHTD.device).triu(1 + S - T)
    else:
        hidden = documents.hidden[:, None]
    weights_BKGTS = scores_BKGTS.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(v_BKSD.dtype)
    return (weights_BKGTS.view(B, K, G * T, S) @ v_BKSD).view(B, H, T, D)
