"""The dense Qwen3 family (arXiv:2505.09388): Llama's blocks, with queries and keys normalised in each head.

Letters of the shape suffixes are llama3.py's.
"""

from __future__ import annotations

from torch import Tensor

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.models.layers import RMSNorm
from torchtitan_npu.models.llama3 import Attention, Llama, Rotate, TransformerBlock


class Qwen3Attention(Attention):
    """Causal grouped-query self-attention, ``[B, T, M] -> [B, T, M]``.

    RMS norms over the head dimension, one weight ``[D]`` for all query heads and one for all key heads, bound what
    attention compares (QK-Norm, arXiv:2302.05442).
    """

    def __init__(self, cfg: ModelConfig, layer_index: int) -> None:
        super().__init__(cfg, layer_index)
        self.q_norm = RMSNorm(self.head_dim, eps=cfg.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=cfg.norm_eps)

    def prepare(self, q_BHTD: Tensor, k_BKTD: Tensor, rope: Rotate) -> tuple[Tensor, Tensor]:
        return super().prepare(self.q_norm(q_BHTD), self.k_norm(k_BKTD), rope)


class Qwen3Block(TransformerBlock):
    attention_type = Qwen3Attention


class Qwen3(Llama):
    """Decoder-only language model, used like :class:`~.llama3.Llama`."""

    block_type = Qwen3Block
