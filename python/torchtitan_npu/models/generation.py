"""Text from a language model, token by token: greedy, or sampled from the most likely ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


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
    on_token: Callable[[int], object] = lambda token: None,
) -> list[int]:
    """Continue ``prompt`` until ``max_new_tokens``, ``max_seq_len`` or ``eos_id``; returns the new ids, without EOS.

    Every token is one forward over everything before it: nothing is cached, and memory is that of one forward.

    Args:
        model: from int64 ``[1, T]`` to logits ``[1, T, V]``, on the CPU.
        prompt: at least one id, and fewer than ``max_seq_len``.
        max_seq_len: of prompt and continuation together.
        temperature, top_p, generator: see :func:`next_token`.
        num_ids: ids from here on are padding of the vocabulary and are not chosen.
        on_token: is called with every new id.

    Raises:
        ValueError: the prompt is empty, or too long.
    """
    if not 0 < len(prompt) < max_seq_len:
        raise ValueError(f"the prompt has {len(prompt)} tokens; it must have at least 1 and fewer than {max_seq_len}")
    ids = list(prompt)
    was_training = model.training
    model.eval()
    try:
        while len(ids) < min(len(prompt) + max_new_tokens, max_seq_len):
            logits_V = model(torch.tensor([ids]))[0, -1, :num_ids]
            token = next_token(logits_V, temperature=temperature, top_p=top_p, generator=generator)
            if token == eos_id:
                break
            ids.append(token)
            on_token(token)
    finally:
        model.train(was_training)
    return ids[len(prompt) :]
