"""Text from a language model, token by token: greedy, or sampled from the most likely ids.

Letters: T position, M model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan_npu.models.kv_cache import KeyValueCache


def next_token(logits_V: Tensor, *, temperature: float, top_p: float, generator: torch.Generator | None = None) -> int:
    """Choose an id from the logits of one position.

    Args:
        logits_V: ``[V]``; ids with ``-inf`` are never chosen.
        temperature: 0 takes the most likely id; otherwise logits are divided by it.
        top_p: sample among the most likely ids that together have at least this probability (nucleus sampling, Holtzman
            et al., 2019, arXiv:1904.09751); 1 takes all.
        generator: of the draw.
    """
    if temperature == 0:
        return int(logits_V.argmax())
    probabilities_V, ids_V = torch.softmax(logits_V.float() / temperature, dim=0).sort(descending=True, stable=True)
    before_V = probabilities_V.cumsum(0) - probabilities_V  # of the ids that are more likely
    kept_V = torch.where(before_V < top_p, probabilities_V, 0.0)
    kept_V[0] = probabilities_V[0]
    return int(ids_V[torch.multinomial(kept_V, 1, generator=generator)])


def make_cache(model: nn.Module, positions: int) -> KeyValueCache | None:
    """Room for one sequence of ``positions``, or None for a model that keeps no keys and values.

    Raises:
        ValueError: ``positions`` is more than the model takes.
    """
    new_cache: Any = getattr(model, "new_cache", None)
    cache: KeyValueCache | None = None if new_cache is None else new_cache(1, positions)
    return cache


@torch.inference_mode()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    max_seq_len: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    eos_id: int | None = None,
    num_ids: int | None = None,
    generator: torch.Generator | None = None,
    cache: KeyValueCache | None = None,
    on_token: Callable[[int], object] = lambda token: None,
) -> list[int]:
    """Continue ``prompt`` until ``max_new_tokens``, ``max_seq_len`` or ``eos_id``; returns the new ids, without EOS.

    Args:
        model: from int64 ``[1, T]`` to logits ``[1, T, V]``, on the CPU.
        prompt: at least one id, and fewer than ``max_seq_len``.
        max_seq_len: of prompt and continuation together.
        temperature, top_p, generator: see :func:`next_token`.
        num_ids: ids from here on are padding of the vocabulary and are not chosen.
        cache: of ``make_cache``. Every forward reads the tokens behind those that it holds, which must be a beginning
            of ``prompt``; an empty one makes that the prompt and then one token at a time. Without it every token is
            one forward over everything before it.
        on_token: is called with every new id.

    Raises:
        ValueError: the prompt is empty, or too long, or the cache too small.
    """
    if not 0 < len(prompt) < max_seq_len:
        raise ValueError(f"the prompt has {len(prompt)} tokens; it must have at least 1 and fewer than {max_seq_len}")
    most = min(len(prompt) + max_new_tokens, max_seq_len)
    if cache is not None and not cache.length < len(prompt) <= most <= cache.capacity:
        raise ValueError(
            f"a cache of {cache.capacity} positions that holds {cache.length} does not serve a prompt of {len(prompt)} "
            f"and {most} positions in all: it must hold fewer than the prompt has, and have room for all"
        )
    ids = list(prompt)
    was_training = model.training
    model.eval()
    try:
        while len(ids) < most:
            logits_V = _last_logits(model, ids, cache)[:num_ids]
            token = next_token(logits_V, temperature=temperature, top_p=top_p, generator=generator)
            if token == eos_id:
                break
            ids.append(token)
            on_token(token)
    finally:
        model.train(was_training)
    return ids[len(prompt) :]


def _last_logits(model: nn.Module, ids: list[int], cache: KeyValueCache | None) -> Tensor:
    """``[V]``: of what comes after ``ids``."""
    logits: Tensor
    if cache is None:
        logits = model(torch.tensor([ids]))[0, -1]
    else:
        logits = model(torch.tensor([ids[cache.length :]]), head=_last_position, cache=cache)[0]
    return logits


def _last_position(x_BTM: Tensor, weight_VM: Tensor) -> Tensor:
    """Logits ``[B, V]``; those of all positions of a long prompt would be by far the largest tensor."""
    return F.linear(x_BTM[:, -1], weight_VM)
