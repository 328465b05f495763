"""Cross-entropy of next-token prediction, as a sum."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""A label that counts for nothing: padding, or the first token of the next document."""


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of ``-log softmax(logits)[label]`` over the labels that are not ``IGNORE_INDEX``.

    A sum, not a mean: micro-batches with different numbers of valid labels then add up correctly, and the caller
    divides once by the number of valid labels of the whole optimizer step.

    Args:
        logits_BTV: ``[B, T, V]``, any floating-point dtype; computed in fp32.
        labels_BT: int64 ``[B, T]`` in ``[0, V)``, or ``IGNORE_INDEX``.

    Returns:
        fp32 scalar, in nats; 0 when no label is valid.
    """
    return F.cross_entropy(
        logits_BTV.float().flatten(0, -2), labels_BT.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )


def z_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Sum of ``logsumexp(logits)²`` over the labels that are not ``IGNORE_INDEX`` (PaLM, arXiv:2204.02311, section 5).

    It keeps the softmax's denominator near 1, and with it the logits small. Arguments and result as ``cross_entropy``.
    """
    lse_BT = logits_BTV.float().logsumexp(dim=-1)
    return lse_BT.square().masked_fill(labels_BT == IGNORE_INDEX, 0.0).sum()
