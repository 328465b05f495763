"""Gradient clipping by the global norm."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu import _C
from torchtitan_npu.fsdp.layout import sum_over
from torchtitan_npu.fsdp.plan import FLOATING
from torchtitan_npu.fsdp.state import FSDPState, ShardedParam, state_of


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scales the gradients of a wrapped model in place so that their norm over all parameters and ranks is at most
    ``max_norm``.

    Collective. Returns the norm before clipping: a 0-d float32 tensor, the same on all ranks. ``norm_type``: p >= 1, or
    ``inf``. Scaling is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``.
    """
    if not norm_type >= 1:
        raise ValueError(f"norm_type must be >= 1 or inf, got {norm_type}")
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be >= 0, got {max_norm}")
    state = state_of(model)
    with_grad = [p for p in state.params if p.sharded.grad is not None and p.sharded.numel() > 0]
    grads = [p.sharded.grad for p in with_grad if p.sharded.grad is not None]
    # In float64: how parameters are cut into pieces must not show in the result.
    if math.isinf(norm_type):
        total = torch.tensor(max((g.abs().max().item() for g in grads), default=0.0), dtype=torch.float64)
    else:
        if norm_type == 2.0:
            device = _C.HostDevice()
            parts = [device.sum_squares(g.data_ptr(), FLOATING[g.dtype], g.numel()) for g in grads]
        else:
            parts = [g.double().abs().pow(norm_type).sum().item() for g in grads]
        # Tensor-parallel ranks that hold the same elements count them once together.
        total = torch.tensor(
            sum(n / _copies(state, p) for n, p in zip(parts, with_grad, strict=True)), dtype=torch.float64
        )
    operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    if state.ranks.group is not None:
        dist.all_reduce(total, operation, group=state.ranks.group)
    sum_over(state.tensor_mesh, total, operation)
    if not math.isinf(norm_type):
        total = total.pow(1.0 / norm_type)
    total = total.float()
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if grads:
        torch._foreach_mul_(grads, scale)
    return total


def _copies(state: FSDPState, param: ShardedParam) -> int:
    if state.tensor_mesh is None:
        return 1
    return state.tensor_mesh.size() if param.layout is None else param.layout.copies
