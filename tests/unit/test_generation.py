"""Sampling: what is chosen, from which ids, and where it ends."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from torchtitan_npu.models.generation import generate, next_token


class Counting(nn.Module):
    """Says that after id i comes i + 1, of 8 ids."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return 10.0 * nn.functional.one_hot((tokens_BT + 1) % 8, 8).float()


def test_greedy_until_each_of_the_three_ends() -> None:
    def continued(**changes: int) -> list[int]:
        ends = {"max_new_tokens": 4, "max_seq_len": 100, "eos_id": 99} | changes
        return generate(Counting(), [5, 6], **ends)

    assert continued() == [7, 0, 1, 2]
    assert continued(max_seq_len=5) == [7, 0, 1]
    assert continued(eos_id=1) == [7, 0]
    assert continued(eos_id=7) == []
    # id 7 is padding of the vocabulary: all others are equally unlikely after 6, and the first of them is taken
    assert continued(num_ids=7) == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", [[], [1, 2, 3]])
def test_prompt_must_leave_room(prompt: list[int]) -> None:
    with pytest.raises(ValueError, match="at least 1 and fewer than 3"):
        generate(Counting(), prompt, max_new_tokens=1, max_seq_len=3)


def test_model_keeps_its_mode() -> None:
    model = Counting().train()
    modes = []
    generate(model, [1], max_new_tokens=1, max_seq_len=9, on_token=lambda token: modes.append(model.training))
    assert modes == [False] and model.training


@pytest.mark.parametrize(
    ("top_p", "temperature", "expected"),
    [
        # probabilities 0.4, 0.3, 0.2, 0.1 of ids 3, 0, 2, 1
        (1.0, 1.0, {3: 0.4, 0: 0.3, 2: 0.2, 1: 0.1}),
        (0.71, 1.0, {3: 4 / 9, 0: 3 / 9, 2: 2 / 9}),
        (0.69, 1.0, {3: 4 / 7, 0: 3 / 7}),
        (0.0, 1.0, {3: 1.0}),
        (1.0, 0.0, {3: 1.0}),
        (1.0, 0.5, {3: 16 / 30, 0: 9 / 30, 2: 4 / 30, 1: 1 / 30}),
    ],
)
def test_distribution(top_p: float, temperature: float, expected: dict[int, float]) -> None:
    """4,000 draws: a frequency is off by less than 0.04 = 5 standard deviations of at most 0.0079."""
    logits = torch.tensor([0.3, 0.1, 0.2, 0.4]).log()
    generator = torch.Generator().manual_seed(1)
    drawn = Counter(next_token(logits, temperature=temperature, top_p=top_p, generator=generator) for _ in range(4000))
    assert set(drawn) == set(expected)
    for token, probability in expected.items():
        assert abs(drawn[token] / 4000 - probability) < 0.04
