"""Gradient clipping by the global norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu.fsdp.state import state_of


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of a wrapped model in place so that their norm over all parameters and ranks is at most ``max_norm``.

    Collective. Returns the norm before clipping: a 0-d float32 tensor, the same on all ranks. ``norm_type``: p >= 1, or ``inf``.
    Scaling is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be >= 1 or inf, got {norm_type}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}")
    state = state_of(model)
    grads = [p.sharded.grad for p in state.params if p.sharded.grad is not None and p.sharded.numel() > 0]
    norms = torch._foreach_norm(grads, norm_type, dtype=torch.float32) if grads else []
    if math.isinf(norm_type):
        total = torch.stack(norms).max() if norms else torch.zeros(())
        if state.ranks.group is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX, group=state.ranks.group)
    else:
        total = torch.stack(norms).pow(norm_type).sum() if norms else torch.zeros(())
        if state.ranks.group is not None:
            dist.all_reduce(total, group=state.ranks.group)
        total = total.pow(1.0 / norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, scale)
    return total
