"""Models that know nothing of FSDP: a stack of torch's encoder layers, and transformers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from twin import Twin, next_token_loss, tokens_for

VOCABULARY, HIDDEN, HEADS = 37, 24, 4


class EncoderModel(nn.Module):
    """Embedding and head in float32, encoder layers in ``dtype`` (R13, small)."""

    def __init__(self, dtype: torch.dtype, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                d_model=HIDDEN,
                nhead=HEADS,
                dim_feedforward=4 * HIDDEN,
                dropout=dropout,
                batch_first=True,
                dtype=dtype,
            )
            for _ in range(3)
        )
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x.to(self.layers[0].linear1.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.float())


@pytest.mark.parametrize("cap", [None, 0.001])
@on_ranks(1, 2, 3)
def test_encoder_layers_in_float32(cap: float | None) -> None:
    twin = Twin(lambda: EncoderModel(torch.float32), bucket_cap_mb=cap)
    assert [unit.name for unit in twin.state.plan.units] == ["root", "layers.0", "layers.1", "layers.2"]
    twin.train(3)


@on_ranks(1, 2, 3)
def test_encoder_layers_in_float16() -> None:
    """Mixed dtypes over the model. float16 sums are rounded once here and N times there: 2^-11 each."""
    twin = Twin(lambda: EncoderModel(torch.float16))
    for step in range(2):
        twin.model.zero_grad()
        twin.backward(step)
        twin.check_gradients(relative=0 if twin.size == 1 else twin.size * 2**-11)
    assert {p.dtype for p in twin.model.parameters()} == {torch.float32, torch.float16}


@on_ranks(2)
def test_encoder_layers_in_evaluation() -> None:
    """eval() takes torch's fused path, which reads the weights without calling the submodules."""
    twin = Twin(lambda: EncoderModel(torch.float32, dropout=0.1))
    twin.model.eval()
    twin.plain.eval()
    with torch.no_grad():
        assert torch.equal(twin.model(tokens_for(0, twin.rank)), twin.plain(tokens_for(0, twin.rank)))
    twin.model.train()
    assert next_token_loss(twin.model, tokens_for(0, twin.rank)).requires_grad


def make_transformer(kind: str) -> Any:
    import transformers

    common: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            n_embd=HIDDEN,
            n_layer=2,
            n_head=HEADS,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **common,
        )
        return transformers.GPT2LMHeadModel(config)
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": 52,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **sizes))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=6, **common, **sizes))


def labelled_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])
@on_ranks(2, timeout=120)
def test_transformers(kind: str) -> None:
    twin = Twin(lambda: make_transformer(kind), labelled_loss)
    assert len(twin.state.plan.units) == 3
    assert any(len(p.names) > 1 for p in twin.state.params) == (kind == "gpt2")
    twin.train(2)
    assert twin.counters.overflow_places == 0


@on_ranks(2, timeout=120)
def test_transformers_with_gradient_checkpointing() -> None:
    def make() -> Any:
        model = make_transformer("llama")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    twin = Twin(make, labelled_loss)
    twin.train(2)
    assert twin.counters.overflow_places == 0
