"""What the NPU's fused kernels return and keep for backward, as shapes: for planning on the meta device, where there is
neither an NPU nor torch_npu. Results have the shapes of torch_npu's operators of the same names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_active: ContextVar[bool] = ContextVar("npu_shapes", default=False)


@contextlib.contextmanager
def npu_shapes() -> Iterator[None]:
    """Inside, operators on meta tensors go the way of tensors on an NPU."""
    token = _active.set(True)
    try:
        yield
    finally:
        _active.reset(token)


def stands_for_npu(x: Tensor) -> bool:
    """Whether ``x`` is a meta tensor inside :func:`npu_shapes`."""
    return x.is_meta and _active.get()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        return torch.empty_like(x), rstd

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _grad_rstd: Tensor | None) -> tuple[Tensor, Tensor, None]:
        x, weight, _rstd = ctx.saved_tensors
        wide = weight.new_empty(weight.shape, dtype=torch.float32)  # the kernel's, cast afterwards
        return torch.empty_like(x), wide.to(weight.dtype), None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, both: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(both)
        return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (both,) = ctx.saved_tensors
        return torch.empty_like(both), None


KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": _RmsNorm.apply,
    "npu_swiglu": _SwiGlu.apply,
    "npu_rotary_mul": lambda x, cos, sin: torch.empty_like(x),
}
"""By the names of ``torch.ops.npu``."""
