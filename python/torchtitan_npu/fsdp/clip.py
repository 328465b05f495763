"""Gradient clipping by the global norm."""

from __future__ import annotations

import torch
from torch import nn

from torchtitan_npu.fsdp.gradient import check_norm_type, over_ranks, power_sum, root
from torchtitan_npu.fsdp.state import state_of


def clip_grad_norm(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scales the gradients of a wrapped model in place so that their norm over all parameters and ranks is at most
    ``max_norm``.

    Collective. Returns the norm before clipping: 0-d, float32 (float64 if a parameter is), the same on all ranks.
    ``norm_type``: p > 0, or ``inf``. Scaling is ``min(1, max_norm / (norm + 1e-6))``, as in
    ``torch.nn.utils.clip_grad_norm_``. With ``error_if_nonfinite`` a norm that is infinite or NaN is a RuntimeError on
    all ranks, before anything is scaled.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}")
    norm = grad_norm(model, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; skip the "
            "step, or call with error_if_nonfinite=False to scale them all the same"
        )
    scale_gradients(model, max_norm, norm)
    return norm


def grad_norm(model: nn.Module, norm_type: float = 2.0) -> torch.Tensor:
    """What ``clip_grad_norm`` returns, without scaling anything. Collective."""
    check_norm_type(norm_type)
    state = state_of(model)
    with_grad = [p for p in state.params if p.sharded.grad is not None and p.sharded.numel() > 0]
    grads = [p.sharded.grad.detach() for p in with_grad if p.sharded.grad is not None]
    local = power_sum(grads, norm_type, [state.copies_of(p) for p in with_grad])
    norm = root(over_ranks(local, norm_type, state.gradients.process_groups), norm_type)
    is_double = any(p.sharded.dtype == torch.float64 for p in state.params)
    return norm if is_double else norm.float()


def scale_gradients(model: nn.Module, max_norm: float, norm: torch.Tensor) -> None:
    """Scales the gradients, whose norm is ``norm``, down to ``max_norm``."""
    params = [p.sharded for p in state_of(model).params]
    grads = [p.grad.detach() for p in params if p.grad is not None and p.numel() > 0]
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, scale)
