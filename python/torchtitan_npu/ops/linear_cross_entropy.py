"""The output projection and the cross-entropy in one, without the logits of all tokens at once.

Letters of the shape suffixes:

    N tokens of the micro-batch    C tokens of one chunk    M model dim    V vocabulary, under tensor parallelism
    this rank's part of it
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from torchtitan_npu.ops.autocast import autocast_dtype, no_autocast
from torchtitan_npu.ops.cross_entropy import IGNORE_INDEX
from torchtitan_npu.ops.vocabulary import VocabularyPart, part_of_vocabulary


def linear_cross_entropy(
    hidden: Tensor,
    weight_VM: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    z_loss_weight: float = 0.0,
    gradient_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """``cross_entropy(hidden @ weightᵀ, labels)`` and its z-loss, with ``chunk_tokens`` rows of logits at a time.

    The forward walks over chunks of tokens and makes the gradients of ``hidden`` and ``weight`` with them, which
    backward only scales: three matrix products as without chunks, where recomputing the logits would take a fourth.
    Products are computed in the dtype of ``hidden`` (under autocast in autocast's), softmax and sums in fp32; the
    gradient of ``weight`` is added up over chunks in fp32.

    Kept from forward to backward: the gradients, ``N M`` in the dtype of the products and ``V M`` in fp32. Under
    ``torch.no_grad`` they are not made.

    Where tensor-parallel ranks share the rows of ``weight``, as DTensors tell, each has the logits of its rows only. It
    sends three numbers per token and gets the others' (one collective per chunk; without gradients one in all), so
    that the softmax is that of the whole vocabulary. The results are the same bits on all ranks, which all must call.

    Args:
        hidden: ``[..., M]``, floating point; may be a DTensor that every rank has whole, whose gradient is then a
            partial sum on each.
        weight_VM: ``[V, M]``; may be the token embedding's, or a DTensor that is cut into equal rows.
        labels: int64 ``[...]`` in ``[0, V)``, or ``IGNORE_INDEX``.
        chunk_tokens: at least 1.
        z_loss_weight: of ``logsumexp(logits)²``, summed over the valid labels (arXiv:2204.02311).
        gradient_scale: what the loss will be multiplied by before ``backward``, loss scaling included. The result does
            not depend on it, but with float16 what is lost to its narrow range does: that is as without chunks, where
            it is right.

    Returns:
        ``(objective, cross_entropy)``, fp32 scalars in nats: what to call ``backward`` on, once, and the sum without
        the z-loss, which has no gradient.

    Raises:
        ValueError: shapes do not fit, or DTensors are cut otherwise.
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if weight_VM.ndim != 2 or hidden.shape[-1] != weight_VM.shape[1] or hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight_VM.shape)} and labels {tuple(labels.shape)} do not "
            "fit: they must be [..., M], [V, M] and [...]"
        )
    device_type = hidden.device.type
    dtype = autocast_dtype(device_type) or hidden.dtype
    if not torch.is_grad_enabled():  # of which a Function's needs_input_grad knows nothing
        hidden, weight_VM = hidden.detach(), weight_VM.detach()
    hidden, weight_VM, part = part_of_vocabulary(hidden, weight_VM)
    hidden_NM, labels_N = hidden.flatten(0, -2), labels.flatten()
    with no_autocast(device_type):
        return _LinearCrossEntropy.apply(
            hidden_NM, weight_VM, labels_N, part, dtype, chunk_tokens, z_loss_weight, gradient_scale
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        labels_N: Tensor,
        part: VocabularyPart,
        dtype: torch.dtype,
        chunk_tokens: int,
        z_loss_weight: float,
        gradient_scale: float,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if isinstance(hidden_NM, AsyncCollectiveTensor):  # gathered along the sequence, and perhaps not yet
            hidden_NM = hidden_NM.wait()
        weight = weight_VM.to(dtype)
        d_hidden_NM = torch.empty_like(hidden_NM, dtype=dtype) if needs_hidden else None
        d_weight_VM = torch.zeros_like(weight_VM, dtype=torch.float32) if needs_weight else None
        needs_gradient = needs_hidden or needs_weight
        N, V = hidden_NM.shape[0], weight.shape[0]
        here_N, index_N = part.local_labels(labels_N, V)
        valid_N1 = (labels_N != IGNORE_INDEX).unsqueeze(1)
        softmax_3N1 = torch.empty(3, N, 1, dtype=torch.float32, device=hidden_NM.device)
        for start in range(0, N, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CM = hidden_NM[rows].to(dtype)
            here_C1, index_C1 = here_N[rows].unsqueeze(1), index_N[rows].unsqueeze(1)
            exp_CV = F.linear(hidden_CM, weight).float()  # the logits, and then in their place what they become
            label_C1 = torch.where(here_C1, exp_CV.gather(1, index_C1), 0.0)
            top_C1 = exp_CV.amax(1, keepdim=True)
            exp_CV.sub_(top_C1).exp_()
            local_3C1 = torch.stack((top_C1, exp_CV.sum(1, keepdim=True), label_C1))
            softmax_3N1[:, rows] = local_3C1
            if not needs_gradient:
                del exp_CV
                continue
            if part.group is not None:
                softmax_3N1[:, rows] = part.combine(local_3C1)
            whole_top_C1, sum_C1, _ = softmax_3N1[:, rows]
            factor_C1 = torch.where(valid_N1[rows], gradient_scale, 0.0).float()  # of the softmax in the gradient
            one_C1 = torch.where(here_C1, -factor_C1, 0.0)  # of the label in the gradient
            if z_loss_weight:
                factor_C1 = factor_C1 * (1.0 + 2.0 * z_loss_weight * (whole_top_C1 + sum_C1.log()))
            factor_C1 = factor_C1 * (top_C1 - whole_top_C1).exp() / sum_C1
            gradient_CV = exp_CV.mul_(factor_C1).scatter_add_(1, index_C1, one_C1).to(dtype)
            del exp_CV  # as nothing of V columns is held longer than it is needed, nor through the next chunk
            if d_hidden_NM is not None:
                torch.mm(gradient_CV, weight, out=d_hidden_NM[rows])
            if d_weight_VM is not None:
                if dtype == torch.float32:
                    d_weight_VM.addmm_(gradient_CV.t(), hidden_CM)
                else:
                    d_weight_VM += gradient_CV.t() @ hidden_CM
            del gradient_CV
        top_N1, sum_N1, label_N1 = softmax_3N1 if needs_gradient else part.combine(softmax_3N1)
        log_sum_N1 = sum_N1.log()
        total = torch.where(valid_N1, (top_N1 - label_N1) + log_sum_N1, 0.0).sum()
        objective = total.clone()
        if z_loss_weight:
            objective += z_loss_weight * torch.where(valid_N1, (top_N1 + log_sum_N1).square(), 0.0).sum()
        ctx.gradients = d_hidden_NM, d_weight_VM
        ctx.gradient_scale = gradient_scale
        ctx.dtypes = hidden_NM.dtype, weight_VM.dtype
        ctx.mark_non_differentiable(total)
        return objective, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_objective: Tensor, _grad_total: Tensor | None) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward through linear_cross_entropy: it keeps its gradients for one; call the model again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        ratio = grad_objective / ctx.gradient_scale
        d_hidden, d_weight = (
            None if gradient is None else gradient.mul_(ratio).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        )
        return d_hidden, d_weight, None, None, None, None, None, None
