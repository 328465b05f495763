"""Which gradients made the norm infinite or NaN: looked for only once it is."""

from __future__ import annotations

import torch
from torch import nn

from torchtitan_npu.launch import gather_texts

_NAMED = 3


def describe_nonfinite_gradients(model: nn.Module) -> str:
    """The parameters whose gradients are not finite, by rank, each rank looking at what it holds. Collective.

    ``layers.0.ffn_norm.weight (NaN) on rank 1``; ranks that found the same are said once. Before the gradients are
    scaled by the bad norm, which spoils all of them.
    """
    found = [
        (name, "NaN" if bool(torch.isnan(parameter.grad).any()) else "infinite")
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all())
    ]
    text = ", ".join(f"{name} ({what})" for name, what in found[:_NAMED])
    if len(found) > _NAMED:
        text += f" and {len(found) - _NAMED} more parameters"
    ranks: dict[str, list[int]] = {}
    texts = gather_texts(text)
    for rank, other in enumerate(texts):
        if other:
            ranks.setdefault(other, []).append(rank)
    if not ranks:
        return "none by itself: their norm overflows"
    if len(texts) == 1:
        return text
    return "; ".join(f"{what} on {_listed(holders)}" for what, holders in ranks.items())


def _listed(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
