"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864).

The two coordinates of a rotated pair are ``i`` and ``i + D/2`` (the layout of Hugging Face checkpoints), not ``2i`` and
``2i + 1`` (Meta's).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(
    head_dim: int, max_seq_len: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of ``t * theta ** (-2 i / D)``.

    Returns:
        Two fp32 tensors ``[max_seq_len, head_dim / 2]``. The angles are computed in fp64: in fp32 the angle of position
        8191 is already off by 5e-4.

    Raises:
        ValueError: ``head_dim`` is odd.
    """
    if head_dim % 2 != 0:
        raise ValueError(f"rotary_tables: head_dim is {head_dim}; rotary embedding rotates pairs, so it must be even")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim
    positions = torch.arange(max_seq_len, dtype=torch.float64, device=device)
    angles = torch.outer(positions, float(theta) ** -exponents)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x_BHTD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotate every pair of coordinates of ``x`` by the angle of its position.

    Args:
        x_BHTD: queries or keys ``[B, H, T, D]``.
        cos_TP: fp32 ``[T, D / 2]``, the rows of the positions of ``x``.
        sin_TP: likewise.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``x``; the arithmetic is done in the wider dtype of ``x`` and the tables.
    """
    first, second = x_BHTD.chunk(2, dim=-1)
    rotated = torch.cat((first * cos_TP - second * sin_TP, second * cos_TP + first * sin_TP), dim=-1)
    return rotated.to(x_BHTD.dtype)
