"""The collectives of sequence parallelism as shapes: for planning on the meta device, without other ranks.

Each allocates what DTensor's redistribution allocates, in the same order, and computes nothing. Letters of the shape
suffixes are llama3.py's; R is the number of tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def gather_input(module: nn.Module, ranks: int) -> None:
    """Let ``module`` take ``[B, T/R, M]`` and compute with the whole sequence, ``[B, T, M]``."""
    module.register_forward_pre_hook(lambda _module, args: (_Gather.apply(args[0], ranks), *args[1:]))


def gather_output(module: nn.Module, ranks: int) -> None:
    """Let ``module`` return the whole sequence, ``[B, T, M]``, of its ``[B, T/R, M]``."""
    module.register_forward_hook(lambda _module, _args, output: _Gather.apply(output, ranks))


def scatter_output(module: nn.Module, ranks: int) -> None:
    """Let ``module`` return its part of the sequence, ``[B, T/R, M]``, of the ranks' sum of its ``[B, T, M]``."""
    module.register_forward_hook(lambda _module, _args, output: _Scatter.apply(output, ranks))


def localize_tokens(module: nn.Module) -> None:
    """Let an embedding of some of the rows take all tokens: they are copied, to be numbered by its rows."""
    module.register_forward_pre_hook(lambda _module, args: (args[0].clone(),))


def _gathered(part_BTM: Tensor, ranks: int) -> Tensor:
    B, T, M = part_BTM.shape
    one_after_another = part_BTM.contiguous().new_empty(ranks * B, T, M)
    if B == 1:
        return one_after_another.view(1, ranks * T, M)
    return one_after_another.new_empty(B, ranks * T, M)  # a copy


def _scattered(whole_BTM: Tensor, ranks: int) -> Tensor:
    B, T, M = whole_BTM.shape
    one_after_another = whole_BTM.contiguous().new_empty(ranks * B, T // ranks, M)
    return one_after_another.new_empty(B, T // ranks, M)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part_BTM: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _gathered(part_BTM, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_BTM: Tensor) -> tuple[Tensor, None]:
        return _scattered(gradient_BTM, ctx.ranks), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole_BTM: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return _scattered(whole_BTM, ranks)

    @staticmethod
    def backward(ctx: Any, gradient_BTM: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient_BTM, ctx.ranks), None
