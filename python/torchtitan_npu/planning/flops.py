"""Floating-point operations of training, from the model's shape."""

from __future__ import annotations

from torchtitan_npu.config import ModelConfig


def flops_per_token(cfg: ModelConfig, seq_len: int, num_parameters: int) -> float:
    """Forward and backward of one token: ``6 N + 12 L H Q T`` (PaLM, appendix B, arXiv:2204.02311).

    N are the parameters that multiply: all but the table of embeddings, which is only looked up, unless it is the
    output matrix as well (``tie_embeddings``). L blocks of H heads of width Q attend over T = ``seq_len`` positions.
    A multiplication and its addition are two operations; backward takes twice the forward. As in PaLM and torchtitan,
    attention counts as if it were *not* causal, and what activation checkpointing computes again does not count: the
    number says what the model needs, not what a program does.

    Args:
        cfg: the model's shape.
        seq_len: tokens per sequence in training.
        num_parameters: of the whole model, the table of embeddings included.
    """
    looked_up = 0 if cfg.tie_embeddings else cfg.vocab_size * cfg.dim
    attended = cfg.n_layers * cfg.n_heads * cfg.head_width * seq_len
    return 6.0 * (num_parameters - looked_up) + 12.0 * attended
