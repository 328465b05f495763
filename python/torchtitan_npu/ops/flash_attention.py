"""Causal attention by fused kernels, whose memory is linear in the sequence length (Dao, 2023, arXiv:2307.08691).

Letters: B batch, T position, H query heads, K key/value heads, D head size, N documents.

The operators ``torchtitan_npu::flash_attention`` and ``…_backward`` run on NPUs (aclnnFlashAttentionScore and its
gradient, through torch_npu) and on CPUs (the kernels of ``scaled_dot_product_attention``). They take the layouts of the
NPU kernels: BSND is ``[B, T, H, D]``, BNSD is ``[B, H, T, D]``. On other devices ``scaled_dot_product_attention`` is
called itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_npu.ops import flash_cpu, flash_npu
from torchtitan_npu.ops.autocast import autocast_dtype
from torchtitan_npu.ops.documents import Documents
from torchtitan_npu.ops.npu import DTYPES, lies_by_position
from torchtitan_npu.ops.npu_shapes import stands_for_npu


def flash_attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, documents: Documents | None = None) -> Tensor:
    """softmax(q kᵀ / sqrt(D)) v, where position t sees the positions 0..t, of its own document if they are given.

    Key/value heads are not repeated: query head h reads key/value head ``h // (H // K)``. Under autocast the inputs are
    cast as ``scaled_dot_product_attention`` would.

    Args:
        q_BHTD: queries ``[B, H, T, D]``: float32, float16 or bfloat16, on the CPU also float64.
        k_BKTD: keys ``[B, K, T, D]`` in the dtype of the queries; K divides H.
        v_BKTD: values, likewise.
        documents: of the batch, where rows hold several.

    Returns:
        ``[B, H, T, D]`` in the dtype of the queries. A view of ``[B, T, H, D]`` if they are.

    Raises:
        ValueError: shapes or dtypes do not belong together, or the device has no kernel for them.
    """
    check_attention_arguments("flash_attention", q_BHTD, k_BKTD, v_BKTD, documents)
    device_type = q_BHTD.device.type
    if device_type not in ("npu", "cpu", "meta"):
        grouped = k_BKTD.shape[1] != q_BHTD.shape[1]
        if documents is None:
            return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, is_causal=True, enable_gqa=grouped)
        visible = documents.hidden.logical_not()
        return F.scaled_dot_product_attention(q_BHTD, k_BKTD, v_BKTD, attn_mask=visible, enable_gqa=grouped)
    dtype = autocast_dtype(device_type)
    if dtype is not None:
        q_BHTD, k_BKTD, v_BKTD = q_BHTD.to(dtype), k_BKTD.to(dtype), v_BKTD.to(dtype)
    _check_kernel(q_BHTD, k_BKTD, v_BKTD)
    # The CPU's kernel takes any strides, and the layout of the NPU's documents (TND) is BSND without rows.
    by_position = device_type in ("cpu", "meta") or documents is not None or lies_by_position(q_BHTD)
    ends_N = None if documents is None else documents.ends_N
    if not by_position:
        return _flash_attention(q_BHTD, k_BKTD, v_BKTD, ends_N, "BNSD")[0]
    q_BTHD, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))
    return _flash_attention(q_BTHD, k_BTKD, v_BTKD, ends_N, "BSND")[0].transpose(1, 2)


def check_attention_arguments(
    caller: str,
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents | None,
    *,
    earlier_keys: int = 0,
) -> None:
    """Raises ValueError where shapes do not belong together.

    ``earlier_keys``: keys, S of them, begin as many positions before the T queries.
    """
    B, H, T, D = q_BHTD.shape
    K = k_BKSD.shape[1]
    if k_BKSD.shape != (B, K, earlier_keys + T, D) or v_BKSD.shape != k_BKSD.shape:
        raise ValueError(
            f"{caller}: q {tuple(q_BHTD.shape)}, k {tuple(k_BKSD.shape)} and v {tuple(v_BKSD.shape)} do not belong "
            "together; k and v must be [B, K, T, D] with the B, T and D of q [B, H, T, D]"
        )
    if K == 0 or H % K != 0:
        raise ValueError(f"{caller}: {H} query heads cannot share {K} key/value heads; {K} must divide {H}")
    if documents is not None and earlier_keys:
        raise ValueError(f"not supported: {caller} inside documents with {earlier_keys} more keys than queries")
    if documents is not None and documents.ids_BT.shape != (B, T):
        raise ValueError(
            f"{caller}: documents of a batch {tuple(documents.ids_BT.shape)} do not fit q {tuple(q_BHTD.shape)}; they "
            f"must be those of [B, T] = {(B, T)}"
        )


def _check_kernel(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"flash_attention: q is {q.dtype}, k {k.dtype} and v {v.dtype}; cast them to one dtype")
    on_cpu = q.device.type in ("cpu", "meta")
    allowed = (*DTYPES, torch.float64) if on_cpu else DTYPES
    if q.dtype not in allowed:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ValueError(f"flash_attention: no kernel of {q.device.type} takes {q.dtype}; cast q, k and v to {names}")
    if not on_cpu and q.shape[-1] > flash_npu.MAX_HEAD_DIM:
        raise ValueError(
            f"flash_attention: D is {q.shape[-1]}, the NPU's kernel takes at most {flash_npu.MAX_HEAD_DIM}; use the "
            "plain attention (model.use_flash_attention: false)"
        )


# Argument and result names without a suffix are in the layout that the argument `layout` names.


@torch.library.custom_op("torchtitan_npu::flash_attention", mutates_args=())
def _flash_attention(
    q: Tensor, k: Tensor, v: Tensor, ends_N: Tensor | None, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and what backward needs of the softmax: ``exp(score - high) / total`` is a weight.

    On the CPU ``high`` is the logarithm of the sum, and ``total``, being 1 everywhere, is left empty. There the result
    lies like ``q``, on NPUs it is contiguous.
    """
    kernels = flash_npu if q.device.type == "npu" else flash_cpu
    return kernels.forward(q, k, v, ends_N, layout)


@torch.library.custom_op("torchtitan_npu::flash_attention_backward", mutates_args=())
def _flash_attention_backward(
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
    """Gradients of q, k and v, contiguous in the layout."""
    kernels = flash_npu if q.device.type == "npu" else flash_cpu
    return kernels.backward(grad, q, k, v, out, high, total, ends_N, layout)


@_flash_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, ends_N: Tensor | None, layout: str) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H = (q.shape[0], q.shape[1], q.shape[2]) if layout == "BSND" else (q.shape[0], q.shape[2], q.shape[1])
    if q.device.type == "npu" or stands_for_npu(q):
        shape = (B, H, T, 8) if ends_N is None else (B * T, H, 8)
        return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q), q.new_empty((B, T, H), dtype=wide), q.new_empty(0, dtype=wide)


@_flash_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, ends_N, ctx.layout = inputs
    ctx.set_materialize_grads(False)  # nothing depends on the softmax's parts; no zeros for them
    ctx.save_for_backward(q, k, v, *output, ends_N)


def _differentiate(ctx: Any, grad: Tensor, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    grads = _flash_attention_backward(grad, *ctx.saved_tensors, ctx.layout)
    return (*grads, None, None)


_flash_attention.register_autograd(_differentiate, setup_context=_save)
