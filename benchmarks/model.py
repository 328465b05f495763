"""The model of the step benchmark: a plain PyTorch Llama-like decoder that every engine trains unchanged.

Shape suffixes: B batch, T tokens, D model width, H heads, K head width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the model and of one rank's batch. The defaults are the shape that published numbers are for."""

    dim: int = 512
    layers: int = 8
    heads: int = 8
    ffn: int = 1376
    vocab: int = 8192
    seq: int = 256
    batch: int = 2

    def __post_init__(self) -> None:
        if self.dim % (2 * self.heads):
            raise ValueError(f"--dim {self.dim}: must be a multiple of 2 * --heads, {2 * self.heads}, for rotary pairs")

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        block = 4 * self.dim**2 + 3 * self.dim * self.ffn + 2 * self.dim
        return self.layers * block + 2 * self.vocab * self.dim + self.dim

    @property
    def step_bytes(self) -> int:
        """Rough peak of one process that trains it alone: weights, gradients, AdamW's two moments, activations."""
        per_token = 4 * (self.layers * (20 * self.dim + 5 * self.ffn) + 3 * self.vocab)
        return 16 * self.parameters + self.batch * self.seq * per_token + (300 << 20)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotary position embedding, half-split pairs."""
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-second, first), dim=-1) * sin_TK


class Block(nn.Module):
    """Pre-norm attention and SwiGLU."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.wq = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wk = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wv = nn.Linear(shape.dim, shape.dim, bias=False)
        self.wo = nn.Linear(shape.dim, shape.dim, bias=False)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)
        width = shape.dim // shape.heads
        frequencies = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_TK = torch.outer(torch.arange(shape.seq, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos_TK", angles_TK.cos(), persistent=False)
        self.register_buffer("sin_TK", angles_TK.sin(), persistent=False)

    def attention(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (w(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = self.cos_TK.to(q.dtype), self.sin_TK.to(q.dtype)
        out_BHTK = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.wo(out_BHTK.transpose(1, 2).flatten(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        h_BTD = self.ffn_norm(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


class Llama(nn.Module):
    """Token embedding, blocks, norm, untied head. ``forward(tokens_BT: int64) -> logits_BTV``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=1e-5)
        self.head = nn.Linear(shape.dim, shape.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.head(self.norm(x_BTD))


def loss_of(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
