"""The output projection and the cross-entropy in one, without the logits of all tokens at once.

Letters of the shape suffixes:

    N tokens of the micro-batch    C tokens of one chunk    M model dim    V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from torchtitan_npu.ops.autocast import autocast_dtype, no_autocast
from torchtitan_npu.ops.cross_entropy import IGNORE_INDEX


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

    Args:
        hidden: ``[..., M]``, floating point.
        weight_VM: ``[V, M]``; may be the token embedding's.
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
        ValueError: shapes do not fit.
    """
    if isinstance(weight_VM, DTensor) or isinstance(hidden, DTensor):
        raise ValueError("not supported yet: linear_cross_entropy of DTensors; use cross_entropy of the logits")
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
    hidden_NM, labels_N = hidden.flatten(0, -2), labels.flatten()
    with no_autocast(device_type):
        return _LinearCrossEntropy.apply(
            hidden_NM, weight_VM, labels_N, dtype, chunk_tokens, z_loss_weight, gradient_scale
        )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NM: Tensor,
        weight_VM: Tensor,
        labels_N: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
        z_loss_weight: float,
        gradient_scale: float,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight = weight_VM.to(dtype)
        d_hidden_NM = torch.empty_like(hidden_NM, dtype=dtype) if needs_hidden else None
        d_weight_VM = torch.zeros_like(weight_VM, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_NM.device)
        z_total = torch.zeros_like(total)
        for start in range(0, hidden_NM.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CM = hidden_NM[rows].to(dtype)
            labels_C = labels_N[rows]
            valid_C1 = (labels_C != IGNORE_INDEX).unsqueeze(1)
            index_C1 = torch.where(valid_C1, labels_C.unsqueeze(1), 0)
            logits_CV = F.linear(hidden_CM, weight).float()
            chosen_C1 = logits_CV.gather(1, index_C1)
            log_p_CV = torch.log_softmax(logits_CV, dim=1)
            del logits_CV
            nll_C1 = -log_p_CV.gather(1, index_C1)
            total += torch.where(valid_C1, nll_C1, 0.0).sum()
            factor_C1 = torch.where(valid_C1, gradient_scale, 0.0).float()  # of the softmax in the gradient
            one_C1 = -factor_C1  # of the label in the gradient
            if z_loss_weight:
                lse_C1 = chosen_C1 + nll_C1
                z_total += torch.where(valid_C1, lse_C1.square(), 0.0).sum()
                factor_C1 = factor_C1 * (1.0 + 2.0 * z_loss_weight * lse_C1)
            gradient_CV = None
            if needs_hidden or needs_weight:
                gradient_CV = log_p_CV.exp_().mul_(factor_C1).scatter_add_(1, index_C1, one_C1).to(dtype)
            del log_p_CV  # as nothing of V columns is held longer than it is needed, nor through the next chunk
            if gradient_CV is not None and d_hidden_NM is not None:
                torch.mm(gradient_CV, weight, out=d_hidden_NM[rows])
            if gradient_CV is not None and d_weight_VM is not None:
                if dtype == torch.float32:
                    d_weight_VM.addmm_(gradient_CV.t(), hidden_CM)
                else:
                    d_weight_VM += gradient_CV.t() @ hidden_CM
            del gradient_CV
        ctx.gradients = d_hidden_NM, d_weight_VM
        ctx.gradient_scale = gradient_scale
        ctx.dtypes = hidden_NM.dtype, weight_VM.dtype
        objective = total + z_loss_weight * z_total if z_loss_weight else total.clone()
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
        return d_hidden, d_weight, None, None, None, None, None
