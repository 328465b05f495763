"""Gradients of pieces, and torch's own clipping and unscaling of them.

``p.grad`` of a sharded parameter is this rank's part of the gradient. It is a tensor like any other but for two things:

* ``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` take the norm over all ranks, as they do for the model that
  is not sharded. Without that they would clip every rank by the norm of its own part.
* ``torch.amp.GradScaler`` finds an overflow where any rank has one. Without that one rank would skip its step alone.

Either way ranks would come apart silently. torch offers no hook for it, but its clipping asks each gradient for its
norm and combines the norms, its scaler calls one operator, and a subclass sees all of it.

It costs about 1.5 µs per parameter and look of an optimizer at ``p.grad`` in Python; kernels, foreach and fused ones
too, run as for plain tensors, and results of operations are plain tensors. An optimizer that is compiled works with
inductor; the backend aot_eager refuses subclasses in its check of the first call.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_npu import _C
from torchtitan_npu.fsdp.plan import FLOATING

_CLIPPING = "torch.nn.utils.clip_grad"

# Looked up once: an optimizer passes here several times per parameter.
_AsPlain = torch._C.DisableTorchFunctionSubclass
_VECTOR_NORM = torch.linalg.vector_norm
_FOREACH_NORM = torch._foreach_norm
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


@dataclass
class GradientsOfModel:
    """What the gradients of one model share."""

    process_groups: tuple[dist.ProcessGroup, ...] = ()
    """What adds up the parts, one after the other: the ranks of one replica, then each dimension of the tensor-parallel
    mesh. Empty: one rank alone.
    """
    deciding_groups: tuple[dist.ProcessGroup, ...] = ()
    """Who takes a step or skips it together, likewise: all replicas, and the tensor-parallel mesh."""
    unscaled: bool = False
    """Whether a gradient scaler has ever looked at them."""
    scaler_agrees: bool = False
    """The scaler at work lets all ranks know of an overflow itself."""


class GradientPiece(Tensor):
    """This rank's part of a parameter's gradient, in the shape of the piece."""

    model: GradientsOfModel
    copies: int
    """Ranks of the tensor-parallel mesh that hold the same elements, this one among them."""

    @staticmethod
    def of(tensor: Tensor, model: GradientsOfModel, copies: int = 1) -> GradientPiece:
        """``tensor``'s memory as a ``GradientPiece``."""
        piece = Tensor._make_subclass(GradientPiece, tensor)
        piece.model, piece.copies = model, copies
        return piece

    def plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        return self.detach()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _VECTOR_NORM and _called_by_clipping(sys._getframe(1)):
            return LocalNorm.of(*args)
        if func is _FOREACH_NORM and _called_by_clipping(sys._getframe(1)):
            tensors, norm_type = args
            return [
                LocalNorm.of(t, norm_type) if isinstance(t, GradientPiece) else torch.linalg.vector_norm(t, norm_type)
                for t in tensors
            ]
        with _AsPlain():
            if func is _UNSCALE:
                return _unscale(*args)
            return func(*args, **kwargs) if kwargs else func(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)


def _unscale(gradients: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
    groups = {g.model.deciding_groups: g.model for g in gradients if isinstance(g, GradientPiece)}
    for deciding, model in groups.items():
        model.unscaled = True
        for group in () if model.scaler_agrees else deciding:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)


def _called_by_clipping(frame: FrameType | None) -> bool:
    """Whether torch's clipping asks, and not the user, who gets the norm of the part that he asked for."""
    return frame is not None and frame.f_globals.get("__name__") == _CLIPPING


class LocalNorm(Tensor):
    """The norm of one rank's part of a gradient, on its way through torch's clipping, which may move it to a device,
    stacks it with the others and takes the norm of the norms.
    """

    process_groups: tuple[dist.ProcessGroup, ...]
    dtype_of_gradient: torch.dtype
    stacked: list[Tensor]
    """The norms that are stacked here, those of other gradients among them."""

    @staticmethod
    def of(gradient: GradientPiece, norm_type: float) -> LocalNorm:
        check_norm_type(norm_type)
        local = power_sum([gradient.plain()], norm_type, [gradient.copies])
        if not math.isinf(norm_type):
            local = local.pow(1.0 / norm_type)
        norm = Tensor._make_subclass(LocalNorm, local.to(gradient.device))
        norm.process_groups = gradient.model.process_groups
        norm.dtype_of_gradient = gradient.dtype
        return norm

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and isinstance(args[0], LocalNorm) and args[1:] == (args[0].device,):
            return args[0]
        if func is torch.stack:
            with _AsPlain():
                values = torch.stack([norm.double() for norm in args[0]])
            norms = Tensor._make_subclass(LocalNorm, values)
            norms.stacked = list(args[0])
            return norms
        if func is torch.linalg.vector_norm:
            return _combine(args[0].stacked, float(args[1]))
        with _AsPlain():
            return func(*args, **(kwargs or {}))


def _combine(norms: list[Tensor], norm_type: float) -> Tensor:
    """The norm over all ranks; gradients of other models count as every rank has them, once."""
    local = [norm for norm in norms if isinstance(norm, LocalNorm)]
    groups = local[0].process_groups
    if any(_ranks(norm.process_groups) != _ranks(groups) for norm in local):
        raise RuntimeError(
            "not supported: one norm over gradients of FSDP models that are sharded over different groups of ranks; "
            "clip each model by itself with model.clip_grad_norm_(…)"
        )
    dtype = torch.promote_types(torch.float32, local[0].dtype_of_gradient)
    for norm in norms:
        dtype = torch.promote_types(dtype, norm.dtype_of_gradient if isinstance(norm, LocalNorm) else norm.dtype)
    with _AsPlain():
        everywhere = over_ranks(power_sum(local, norm_type), norm_type, groups)
        here = power_sum([norm for norm in norms if not isinstance(norm, LocalNorm)], norm_type)
        total = torch.maximum(everywhere, here) if math.isinf(norm_type) else everywhere + here
        return root(total, norm_type).to(dtype)


def _ranks(groups: tuple[dist.ProcessGroup, ...]) -> list[list[int]]:
    return [dist.get_process_group_ranks(group) for group in groups]


# ---- the arithmetic of norms, in float64: how parameters are cut into pieces must not show in the result -------------


def check_norm_type(norm_type: float) -> None:
    """Raises ValueError for a norm that does not add up over pieces."""
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type must be > 0 or inf, got {norm_type}")


def power_sum(tensors: Sequence[Tensor], norm_type: float, copies: Sequence[int] = ()) -> Tensor:
    """Sum of |x|^p, or the largest |x| for p = inf: 0-d float64 on the CPU; 0 without elements, NaN if one is NaN.

    ``copies``: for each tensor, how many ranks hold the same elements and count them once together; default: 1.
    """
    total = torch.zeros((), dtype=torch.float64)
    elsewhere, copies_elsewhere = [], []
    for tensor, held in zip(tensors, copies or [1] * len(tensors), strict=True):
        if tensor.numel() == 0:
            continue
        if tensor.device.type != "cpu":
            elsewhere.append(tensor)
            copies_elsewhere.append(held)
        elif math.isinf(norm_type):
            total = torch.maximum(total, tensor.abs().max().double())
        elif norm_type == 2.0 and tensor.dtype in FLOATING and tensor.is_contiguous():
            squares = _C.HostDevice().sum_squares(tensor.data_ptr(), FLOATING[tensor.dtype], tensor.numel())
            total = total + squares / held
        else:
            total = total + tensor.double().abs().pow(norm_type).sum() / held
    if elsewhere:  # norms of the tensors in the accelerator's own precision, and one wait for all of them
        norms = torch.stack([norm.float() for norm in torch._foreach_norm(elsewhere, norm_type)]).double().cpu()
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms.pow(norm_type) / torch.tensor(copies_elsewhere, dtype=torch.float64)).sum()
    return total


def over_ranks(total: Tensor, norm_type: float, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The power sum of all ranks, over one group after the other. Collective."""
    if not math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(total, dist.ReduceOp.SUM, group=group)
        return total
    # The maximum with a NaN depends on the order in which ranks are compared.
    both = torch.stack([total.nan_to_num(nan=0.0, posinf=math.inf), total.isnan().double()])
    for group in groups:
        dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.full_like(total, math.nan) if both[1] else both[0]


def root(total: Tensor, norm_type: float) -> Tensor:
    """The norm whose power sum is ``total``."""
    return total if math.isinf(norm_type) else total.pow(1.0 / norm_type)
