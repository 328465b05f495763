"""What travels, computes and adds up in which dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of an FSDP model. Every field is optional; ``None`` keeps what the model has.

    Parameters and buffers of batch norms keep their dtype whatever the policy says: running statistics lose small
    updates in 16 bits, and torch wants both in float32 beside 16-bit inputs.
    """

    param_dtype: torch.dtype | None = None
    """Dtype of gathered floating-point parameters and of compute. The sharded master copy keeps the original dtype."""

    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients are summed over ranks. What travels is the narrower of it and ``param_dtype``; sums are
    formed in
    float32 and rounded to it once. ``None``: ``param_dtype``."""

    buffer_dtype: torch.dtype | None = None
    """Floating-point buffers are cast to it once, when the model is wrapped; state dicts keep the original dtype."""

    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the wrapped model are cast to it."""

    cast_forward_inputs: bool = True
    """Cast floating-point inputs of each unit to ``param_dtype``."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "cast_forward_inputs":
                if not isinstance(value, bool):
                    raise ValueError(f"MixedPrecisionPolicy.cast_forward_inputs must be True or False, got {value!r}")
            elif value is not None and (not isinstance(value, torch.dtype) or not value.is_floating_point):
                raise ValueError(
                    f"MixedPrecisionPolicy.{field.name} must be a floating-point torch.dtype or None, got {value!r}"
                )
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(
                    f"MixedPrecisionPolicy.{name}={value} is not supported: use float16, bfloat16 or float32"
                )


def keeps_dtype(module: nn.Module) -> bool:
    """Whether ``param_dtype`` and ``buffer_dtype`` pass over what the module holds directly."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
