"""Flash attention on NPUs: aclnnFlashAttentionScore and its gradient, through torch_npu.

Called by the operators of flash_attention.py. Rows without documents go in as they lie, BSND or BNSD. With documents
the rows are laid end to end (layout TND) and the kernel is told where each document ends.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MAX_HEAD_DIM = 768
MAX_SEQUENCES = 2048
"""Documents of one launch."""

_LEFT_UP_CAUSAL = 2
"""``sparse_mode``: position t sees 0..t, counted in each sequence; the mask is the compressed one."""
_MASK_SIZE = 2048
MASK_BYTES = _MASK_SIZE**2
"""Of ``causal_mask``, which stays on the device."""


@functools.cache
def causal_mask(device: torch.device) -> Tensor:
    """The compressed causal mask: bool ``[2048, 2048]``, True above the diagonal: what may not be seen.

    One per device, 4 MiB, for all lengths. torch_npu's own ``is_causal`` builds it anew in every call.
    """
    mask = torch.ones(_MASK_SIZE, _MASK_SIZE, dtype=torch.bool, device=device).triu(1)
    torch.get_device_module("npu").current_stream(device).synchronize()  # once: calls may come from other streams
    return mask


def forward(q: Tensor, k: Tensor, v: Tensor, ends_N: Tensor | None, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See flash_attention.py; ``high`` and ``total`` are fp32, each number eight times: ``[B, H, T, 8]``, with
    documents ``[B T, H, 8]``.
    """
    options = _options(q, layout) | {"scale": q.shape[-1] ** -0.5}
    kernel = torch.ops.npu.npu_fusion_attention
    if ends_N is None:
        out, high, total = kernel(q, k, v, input_layout=layout, **options)[:3]
        return out, high, total
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    parts = [
        kernel(*(x[span] for x in rows), input_layout="TND", **lengths, **options)[:3]
        for span, lengths in _launches(ends_N)
    ]
    out, high, total = _joined(parts)
    return out.view(q.shape), high, total


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    high: Tensor,
    total: Tensor,
    ends_N: Tensor | None,
    layout: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """See flash_attention.py."""
    options = _options(q, layout) | {"scale_value": q.shape[-1] ** -0.5}
    if ends_N is None:
        dq, dk, dv = _gradients([q, k, v, grad, out, high, total], options | {"input_layout": layout})
        return dq, dk, dv
    tensors = [*(x.flatten(0, 1) for x in (q, k, v, grad, out)), high, total]
    parts = [
        _gradients([x[span] for x in tensors], options | lengths | {"input_layout": "TND"})
        for span, lengths in _launches(ends_N)
    ]
    dq, dk, dv = _joined(parts)
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _gradients(tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, ...]:
    q, k, v, grad, out, high, total = tensors
    kernel = torch.ops.npu.npu_fusion_attention_grad
    return kernel(q, k, v, grad, softmax_max=high, softmax_sum=total, attention_in=out, **options)[:3]


def _options(q: Tensor, layout: str) -> dict[str, Any]:
    heads = q.shape[2 if layout == "BSND" else 1]
    return {"head_num": heads, "atten_mask": causal_mask(q.device), "sparse_mode": _LEFT_UP_CAUSAL}


def _launches(ends_N: Tensor) -> Iterator[tuple[slice, dict[str, Any]]]:
    """The tokens of each launch, and the ends of its documents, counted from its first token."""
    start = 0
    for ends in ends_N.split(MAX_SEQUENCES):
        counted = (ends - start).tolist()
        yield slice(start, start + counted[-1]), {"actual_seq_qlen": counted, "actual_seq_kvlen": counted}
        start += counted[-1]


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return parts[0] if len(parts) == 1 else tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))
