"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

The two coordinates of a rotated pair are ``i`` and ``i + D/2`` (the layout of Hugging Face checkpoints), not ``2i`` and
``2i + 1`` (Meta's).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.npu import fused_kernel, lies_by_position


@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3.1 stretches the rotation to longer sequences (its reference code, ``apply_scaling``)."""

    factor: float
    """By how much slow rotations become slower; 1 changes nothing."""
    original_max_seq_len: int
    low_freq_factor: float
    """Rotations of fewer turns in ``original_max_seq_len`` are slow."""
    high_freq_factor: float
    """Those of more turns are left alone; in between, linearly by the number of turns."""

    def apply(self, frequencies: Tensor) -> Tensor:
        """Angles per position, scaled."""
        turns = self.original_max_seq_len * frequencies / (2 * math.pi)
        kept = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rotary_tables(
    head_dim: int,
    max_seq_len: int,
    theta: float,
    device: torch.device | None = None,
    scaling: RotaryScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``t * theta ** (-2 i / D)``, the frequency scaled where ``scaling`` says so.

    Returns:
        Two fp32 tensors ``[max_seq_len, head_dim]``, whose column ``i + D/2`` equals column ``i``: the fused kernel
        wants the angle of every coordinate. The angles are computed in fp64: in fp32 the angle of position 8191 is
        already off by 5e-4.

    Raises:
        ValueError: ``head_dim`` is odd.
    """
    if head_dim % 2 != 0:
        raise ValueError(f"rotary_tables: head_dim is {head_dim}; rotary embedding rotates pairs, so it must be even")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    positions = torch.arange(max_seq_len, dtype=torch.float64, device=device)
    frequencies = float(theta) ** -exponents
    angles = torch.outer(positions, frequencies if scaling is None else scaling.apply(frequencies)).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate every pair of coordinates of ``x`` by the angle of its position.

    On NPUs aclnnRotaryPositionEmbedding, which takes one dtype: for fp32 1 launch in forward and 2 in backward (the
    other way round, and the sines' sign), where plain operators need 7 and 8; for half precisions, which are widened
    and narrowed, 3 and 4 instead of 8 and 13.

    Args:
        x_BHTD: queries or keys ``[B, H, T, D]``.
        cos_TD: fp32 ``[T, D]``, the rows of ``rotary_tables`` for the positions of ``x``.
        sin_TD: likewise.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``x``; the arithmetic is done in the wider dtype of ``x`` and the tables. On
        NPUs a view of ``[B, T, H, D]`` if ``x`` is.
    """
    fused = fused_kernel("npu_rotary_mul", x_BHTD)
    if fused is not None and _kernel_takes(x_BHTD):
        return _FusedRotary.apply(x_BHTD, cos_TD, sin_TD)
    P = x_BHTD.shape[-1] // 2
    cos_TP, sin_TP = cos_TD[:, :P], sin_TD[:, :P]
    first, second = x_BHTD.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_TP - second * sin_TP, second * cos_TP + first * sin_TP), dim=-1)
    return rotated.to(x_BHTD.dtype)


def _kernel_takes(x_BHTD: Tensor) -> bool:
    """The documented limits of the kernel; beyond the last it is slower than plain operators."""
    B, H, T, D = x_BHTD.shape
    return B < 1000 and H < 1000 and D < 896 and (lies_by_position(x_BHTD) or B * H <= 8 * T)


class _FusedRotary(torch.autograd.Function):
    """torch_npu's own gradient keeps the input and computes gradients of the tables; a rotation needs neither: its
    gradient is rotated back.
    """

    @staticmethod
    def forward(ctx: Any, x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return _rotate(x_BHTD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Tensor) -> tuple[Tensor, None, None]:
        cos_TD, sin_TD = ctx.saved_tensors
        return _rotate(grad_BHTD, cos_TD, -sin_TD), None, None


def _rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    wide = torch.promote_types(x_BHTD.dtype, cos_TD.dtype)
    by_position = lies_by_position(x_BHTD)
    x = x_BHTD.transpose(1, 2) if by_position else x_BHTD
    cos, sin = (table.to(wide).unsqueeze(0).unsqueeze(2 if by_position else 1) for table in (cos_TD, sin_TD))
    kernel = fused_kernel("npu_rotary_mul", x)
    assert kernel is not None, "apply_rotary has asked"
    rotated = kernel(x.to(wide), cos, sin).to(x.dtype)
    return rotated.transpose(1, 2) if by_position else rotated
