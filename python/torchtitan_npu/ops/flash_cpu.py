"""Flash attention on the CPU: the kernels that ``scaled_dot_product_attention`` chooses there, so with its results.

Called by the operators of flash_attention.py, always with layout BSND: strides are all that matters to these kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def forward(q: Tensor, k: Tensor, v: Tensor, ends_N: Tensor | None, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    """See flash_attention.py. One call per document."""
    assert layout == "BSND"
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q_BHTD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q, k, v))
    if ends_N is None:
        out_BHTD, high_BHT = kernel(q_BHTD, k_BKTD, v_BKTD, 0.0, True)
        return out_BHTD.transpose(1, 2), high_BHT.transpose(1, 2), high_BHT.new_empty(0)
    out_BTHD = torch.empty_like(q)
    high_BTH = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    for row, span in _rows_and_spans(ends_N, q.shape[1]):
        part, high = kernel(*(x[row : row + 1, :, span] for x in (q_BHTD, k_BKTD, v_BKTD)), 0.0, True)
        out_BTHD[row, span] = part[0].transpose(0, 1)
        high_BTH[row, span] = high[0].transpose(0, 1)
    return out_BTHD, high_BTH, high_BTH.new_empty(0)


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
    """See flash_attention.py. One call per document."""
    assert layout == "BSND"
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    inputs = [x.transpose(1, 2) for x in (grad, q, k, v, out, high)]
    if ends_N is None:
        dq, dk, dv = (g.transpose(1, 2) for g in kernel(*inputs, 0.0, True))
        return dq, dk, dv
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for row, span in _rows_and_spans(ends_N, q.shape[1]):
        parts = kernel(*(x[row : row + 1, :, span] for x in inputs), 0.0, True)
        for whole, part in zip((dq, dk, dv), parts, strict=True):
            whole[row, span] = part[0].transpose(0, 1)
    return dq, dk, dv


def _rows_and_spans(ends_N: Tensor, T: int) -> Iterator[tuple[int, slice]]:
    """Each document's row, and its places there."""
    start = 0
    for end in ends_N.tolist():
        row = start // T
        yield row, slice(start - row * T, end - row * T)
        start = end
