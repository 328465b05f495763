"""Layers that own parameters or buffers.

Each has ``reset_parameters()``, whose result depends on the random generator's state and on nothing else: a model built
on the meta device can be initialised layer by layer, in any grouping, after its parameters have been sharded. On the
meta device it does nothing: torch's own initialisers would import its compiler there, for a second or two.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchtitan_npu.ops import RotaryScaling, apply_rotary, rms_norm, rotary_tables


class Linear(nn.Linear):
    """``x Wᵀ`` without bias; W ``[out_features, in_features]`` starts as a normal of ``init_std``, cut at 3 sigma."""

    def __init__(self, in_features: int, out_features: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        nn.init.trunc_normal_(self.weight, std=self.init_std, a=-3 * self.init_std, b=3 * self.init_std)


class Embedding(nn.Embedding):
    """Rows of W ``[num_embeddings, embedding_dim]``; W starts as a normal of ``init_std``."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, init_std: float) -> None:
        self.init_std = init_std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        nn.init.normal_(self.weight, std=self.init_std)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, scaled by a weight ``[dim]`` that starts at 1."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.weight.is_meta:
            return
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys by their position.

    Blocks get this module, not its tables: mixed precision casts the tensors that a block is called with, and angles
    rounded to bf16 lose the relative position at long context.
    """

    cos_TD: Tensor
    sin_TD: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, *, theta: float, scaling: RotaryScaling | None = None) -> None:
        super().__init__()
        self.head_dim, self.max_seq_len, self.theta, self.scaling = head_dim, max_seq_len, theta, scaling
        # Not saved: the tables follow from the configuration.
        self.register_buffer("cos_TD", torch.empty(max_seq_len, head_dim), persistent=False)
        self.register_buffer("sin_TD", torch.empty(max_seq_len, head_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.cos_TD.is_meta:
            return
        cos_TD, sin_TD = rotary_tables(self.head_dim, self.max_seq_len, self.theta, self.cos_TD.device, self.scaling)
        self.cos_TD.copy_(cos_TD)
        self.sin_TD.copy_(sin_TD)

    def forward(self, x_BHTD: Tensor, start: int = 0) -> Tensor:
        """``start``: the position of the first of the T."""
        end = start + x_BHTD.shape[-2]
        return apply_rotary(x_BHTD, self.cos_TD[start:end], self.sin_TD[start:end])
