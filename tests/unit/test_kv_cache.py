"""Cached keys and values: the same numbers and tokens as without, for less work, in memory that is known before."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from torchtitan_npu.config import preset
from torchtitan_npu.models import Llama, build_model
from torchtitan_npu.models.generation import generate, make_cache
from torchtitan_npu.ops import Documents, attention

SMALL = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 200, "max_seq_len": 32}
MODELS = {
    "llama": ("llama3_debug", {}),
    "llama_tied_flash": ("llama3_debug", {"tie_embeddings": True, "use_flash_attention": True}),
    "llama_scaled": ("llama3_debug", {"rope_scaling_factor": 8.0, "rope_original_max_seq_len": 8}),
    "qwen3": ("qwen3_0.6b", {"head_dim": 24}),
    "qwen3_flash": ("qwen3_0.6b", {"head_dim": 24, "use_flash_attention": True}),
}


def seeded(kind: str) -> Llama:
    name, overrides = MODELS[kind]
    model = build_model(preset(name, **(SMALL | overrides)))
    torch.manual_seed(0)
    model.init_weights()
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_same_logits_as_the_whole_sequence(kind: str) -> None:
    """A prompt of 7, single tokens, and several at once behind them; two rows."""
    model = seeded(kind)
    tokens_BT = torch.randint(200, (2, 32), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, 32)
    ends = [0, 7, 8, 9, 14, 15, 32]
    with torch.no_grad():
        whole_BTV = model(tokens_BT)
        for start, end in pairwise(ends):
            part_BTV = model(tokens_BT[:, start:end], cache=cache)
            assert cache.length == end
            torch.testing.assert_close(part_BTV, whole_BTV[:, start:end], rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("kind", MODELS)
def test_same_tokens(kind: str, temperature: float) -> None:
    model = seeded(kind)
    lengths: list[int] = []
    model.tok_embeddings.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))

    def continued(cached: bool) -> list[int]:
        return generate(
            model,
            [5, 6, 7],
            max_new_tokens=24,
            max_seq_len=32,
            temperature=temperature,
            generator=torch.Generator().manual_seed(3),
            cache=make_cache(model, 27) if cached else None,
        )

    assert continued(True) == continued(False)
    # 24 tokens: one forward over the prompt and 23 over one token; without, each over all before it.
    assert lengths == [3, *[1] * 23, *range(3, 27)]


def test_samples_share_the_prompt() -> None:
    """The cache forgets what is behind the prompt; only the prompt's last token is read again."""
    model = seeded("llama")
    lengths: list[int] = []
    model.tok_embeddings.register_forward_pre_hook(lambda module, inputs: lengths.append(inputs[0].shape[1]))
    prompt, cache = [5, 6, 7, 8], make_cache(model, 8)
    assert cache is not None
    results = []
    for _ in range(2):
        cache.length = min(cache.length, 3)
        results.append(generate(model, prompt, max_new_tokens=4, max_seq_len=32, cache=cache))
    assert results[0] == results[1]
    assert lengths == [4, 1, 1, 1] + [1, 1, 1, 1]


def test_the_memory_is_known_before() -> None:
    """2 x 3 layers x 2 rows x 2 heads x 20 positions x 24 numbers of 4 bytes."""
    assert seeded("qwen3").new_cache(2, 20).num_bytes == 2 * 3 * 2 * 2 * 20 * 24 * 4
    assert seeded("qwen3").bfloat16().new_cache(2, 20).num_bytes == 2 * 3 * 2 * 2 * 20 * 24 * 2
    with pytest.raises(ValueError, match="33 positions is larger than model.max_seq_len = 32"):
        seeded("llama").new_cache(1, 33)


def test_a_model_without_a_cache() -> None:
    class Counting(nn.Module):
        def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
            return 10.0 * nn.functional.one_hot((tokens_BT + 1) % 8, 8).float()

    model = Counting()
    assert make_cache(model, 10) is None
    assert generate(model, [5], max_new_tokens=2, max_seq_len=9, cache=make_cache(model, 3)) == [6, 7]


@torch.no_grad()
def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = seeded("llama")
    cache = model.new_cache(1, 8)
    tokens_BT = torch.arange(40)[None]
    expected = model(tokens_BT[:, :8])
    model(tokens_BT[:, :6], cache=cache)
    with pytest.raises(ValueError, match="room for 8 positions, and 9 are needed"):
        model(tokens_BT[:, 6:9], cache=cache)
    with pytest.raises(ValueError, match="36 positions, more than model.max_seq_len = 32"):
        model(tokens_BT[:, 6:36], cache=cache)
    assert cache.length == 6
    torch.testing.assert_close(model(tokens_BT[:, 6:8], cache=cache), expected[:, 6:], rtol=0, atol=1e-5)
    for prompt, new in (([1] * 8, 1), ([1] * 9, 1), ([1] * 2, 7)):  # held already; too long; too little room
        with pytest.raises(ValueError, match="cache of 8 positions that holds 8 does not serve a prompt"):
            generate(model, prompt, max_new_tokens=new, max_seq_len=32, cache=cache)


def test_more_keys_than_queries() -> None:
    q, k, v = (torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    whole = attention(q, k, v, flash=False)
    for flash in (False, True):
        torch.testing.assert_close(attention(q[:, :, 4:], k, v, flash=flash), whole[:, :, 4:], rtol=0, atol=1e-6)
        with pytest.raises(ValueError, match="do not belong together"):
            attention(q, k[:, :, :4], v[:, :, :4], flash=flash)
    with pytest.raises(ValueError, match="inside documents with 4 more keys than queries"):
        attention(q[:, :, 4:], k, v, flash=False, documents=Documents.from_ids(torch.zeros(1, 2, dtype=torch.int64)))
