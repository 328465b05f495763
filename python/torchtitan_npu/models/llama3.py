"""The Llama 3 family (arXiv:2407.21783): pre-norm blocks of grouped-query attention with rotary embedding, and SwiGLU.

Letters of the shape suffixes:

    B batch    T position    M model dim    H query heads    K key/value heads    D head dim    F feed-forward dim
    V vocabulary   S position in a cache
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.models.kv_cache import KeyValueCache
from torchtitan_npu.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding
from torchtitan_npu.ops import Documents, RotaryScaling, attention, swiglu

Rotate = Callable[[Tensor], Tensor]
"""A ``RotaryEmbedding``, or one that begins at a later position."""

_INIT_STD = 0.02


def _residual_std(layer_index: int) -> float:
    """Standard deviation of the two matrices of block ``layer_index`` that add into the residual stream.

    Each block adds twice, so block i's output is scaled by 1 / sqrt(2 (i + 1)) and the stream's variance grows
    logarithmically with depth instead of linearly (torchtitan's ``depth_init``).
    """
    return _INIT_STD / (2 * (layer_index + 1)) ** 0.5


def _head_std(dim: int) -> float:
    """Standard deviation of the output matrix.

    The head reads a vector of unit variance, so a logit has variance ``std² dim`` and the first loss is
    ``ln V + std² dim / 2``. At most 0.5 / sqrt(dim) keeps it within 0.125 of ln V at any width.
    """
    return min(_INIT_STD, 0.5 * dim**-0.5)


def _rotary_scaling(cfg: ModelConfig) -> RotaryScaling | None:
    if cfg.rope_scaling_factor == 1:
        return None
    return RotaryScaling(
        cfg.rope_scaling_factor, cfg.rope_original_max_seq_len, cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
    )


class Attention(nn.Module):
    """Causal grouped-query self-attention, ``[B, T, M] -> [B, T, M]``; H D need not be M."""

    def __init__(self, cfg: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_dim = cfg.head_width
        self.flash = cfg.use_flash_attention
        self.wq = Linear(cfg.dim, cfg.n_heads * self.head_dim, init_std=_INIT_STD)
        self.wk = Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, init_std=_INIT_STD)
        self.wv = Linear(cfg.dim, cfg.n_kv_heads * self.head_dim, init_std=_INIT_STD)
        self.wo = Linear(cfg.n_heads * self.head_dim, cfg.dim, init_std=_residual_std(layer_index))

    def forward(
        self, x_BTM: Tensor, rope: Rotate, documents: Documents | None = None, *, cache: KeyValueCache | None = None
    ) -> Tensor:
        B, T, _ = x_BTM.shape
        # Under tensor parallelism each rank has some of the heads.
        q_BHTD = self.wq(x_BTM).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_BKTD = self.wk(x_BTM).view(B, T, -1, self.head_dim).transpose(1, 2)
        v_BKTD = self.wv(x_BTM).view(B, T, -1, self.head_dim).transpose(1, 2)
        q_BHTD, k_BKTD = self.prepare(q_BHTD, k_BKTD, rope)
        if cache is not None:
            k_BKTD, v_BKTD = cache.extend(self.layer_index, k_BKTD, v_BKTD)
        out_BHTD = attention(q_BHTD, k_BKTD, v_BKTD, flash=self.flash, documents=documents)
        return self.wo(out_BHTD.transpose(1, 2).reshape(B, T, -1))

    def prepare(self, q_BHTD: Tensor, k_BKTD: Tensor, rope: Rotate) -> tuple[Tensor, Tensor]:
        """What attention compares: here queries and keys that are rotated by their positions."""
        return rope(q_BHTD), rope(k_BKTD)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202): ``w2(silu(w1 x) * w3 x)``, ``[B, T, M] -> [B, T, M]``."""

    def __init__(self, cfg: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.w1 = Linear(cfg.dim, cfg.ffn_dim, init_std=_INIT_STD)
        self.w2 = Linear(cfg.ffn_dim, cfg.dim, init_std=_residual_std(layer_index))
        self.w3 = Linear(cfg.dim, cfg.ffn_dim, init_std=_INIT_STD)

    def forward(self, x_BTM: Tensor) -> Tensor:
        hidden_BTF = swiglu(self.w1(x_BTM), self.w3(x_BTM))
        return self.w2(hidden_BTF)


class TransformerBlock(nn.Module):
    """One layer, ``[B, T, M] -> [B, T, M]``."""

    attention_type: ClassVar[type[Attention]] = Attention

    def __init__(self, cfg: ModelConfig, layer_index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attention = self.attention_type(cfg, layer_index)
        self.ffn_norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.feed_forward = FeedForward(cfg, layer_index)

    def forward(
        self, x_BTM: Tensor, rope: Rotate, documents: Documents | None = None, *, cache: KeyValueCache | None = None
    ) -> Tensor:
        x_BTM = x_BTM + self.attention(self.attention_norm(x_BTM), rope, documents, cache=cache)
        return x_BTM + self.feed_forward(self.ffn_norm(x_BTM))


class Llama(nn.Module):
    """Decoder-only language model.

    With ``tie_embeddings`` the embedding matrix is also the output matrix: one parameter under one name, and no
    ``output`` module.
    """

    block_type: ClassVar[type[TransformerBlock]] = TransformerBlock

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        head_std = _head_std(cfg.dim)
        self.tok_embeddings = Embedding(cfg.vocab_size, cfg.dim, init_std=head_std if cfg.tie_embeddings else 1.0)
        self.rope = RotaryEmbedding(cfg.head_width, cfg.max_seq_len, theta=cfg.rope_theta, scaling=_rotary_scaling(cfg))
        self.layers = nn.ModuleList(self.block_type(cfg, i) for i in range(cfg.n_layers))
        self.norm = RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.output = None if cfg.tie_embeddings else Linear(cfg.dim, cfg.vocab_size, init_std=head_std)

    def init_weights(self) -> None:
        """Initialise every parameter and buffer in place, drawing from the current random state in module order."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def new_cache(self, batch_size: int, capacity: int) -> KeyValueCache:
        """Room for the keys and values of ``capacity`` positions; for a model that is whole in this process.

        Raises:
            ValueError: ``capacity`` is more than ``max_seq_len``.
        """
        if capacity > self.cfg.max_seq_len:
            raise ValueError(
                f"a cache of {capacity} positions is larger than model.max_seq_len = {self.cfg.max_seq_len}"
            )
        weight = self.tok_embeddings.weight
        return KeyValueCache(
            num_layers=self.cfg.n_layers,
            batch_size=batch_size,
            n_kv_heads=self.cfg.n_kv_heads,
            capacity=capacity,
            head_dim=self.cfg.head_width,
            dtype=weight.dtype,
            device=weight.device,
        )

    def forward(
        self,
        tokens_BT: Tensor,
        documents: Documents | None = None,
        head: Callable[[Tensor, Tensor], Any] | None = None,
        *,
        cache: KeyValueCache | None = None,
    ) -> Any:
        """Logits of the next token.

        Args:
            tokens_BT: int64 ``[B, T]`` in ``[0, V)``, T at most ``max_seq_len``.
            documents: keep attention inside them. Positions still count from the beginning of the row: attention
                depends on the distance of two positions alone.
            head: called with the last norm's result ``[B, T, M]`` and the output matrix ``[V, M]`` instead of
                multiplying them: a loss that never holds all logits. Inside forward, where the matrix is whole.
            cache: of :meth:`new_cache`; ``tokens_BT`` are those behind the ones it holds, and are held afterwards.

        Returns:
            ``[B, T, V]`` in the dtype of the parameters (under autocast, in autocast's), or what ``head`` returned.

        Raises:
            ValueError: T, with what the cache holds, is larger than ``max_seq_len``.
        """
        start, rope = (0, self.rope) if cache is None else (cache.length, partial(self.rope, start=cache.length))
        end = start + tokens_BT.shape[1]
        if self.cfg.max_seq_len < end:
            raise ValueError(f"the input has {end} positions, more than model.max_seq_len = {self.cfg.max_seq_len}")
        x_BTM = self.tok_embeddings(tokens_BT)
        for layer in self.layers:
            x_BTM = layer(x_BTM, rope, documents, cache=cache)
        if cache is not None:
            cache.length = end
        x_BTM = self.norm(x_BTM)
        if head is not None:
            return head(x_BTM, self.tok_embeddings.weight if self.output is None else self.output.weight)
        return F.linear(x_BTM, self.tok_embeddings.weight) if self.output is None else self.output(x_BTM)
