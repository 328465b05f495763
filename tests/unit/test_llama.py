"""The Llama family: sizes, the first loss, initialisation, and the same numbers as transformers' implementation."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_npu.config import ModelConfig, preset
from torchtitan_npu.models import build_model
from torchtitan_npu.ops import Documents, cross_entropy


def _small(**overrides: object) -> ModelConfig:
    shape = {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96, "vocab_size": 200}
    return preset("llama3_debug", **(shape | {"max_seq_len": 32} | overrides))


def _seeded(cfg: ModelConfig, seed: int = 0) -> torch.nn.Module:
    model = build_model(cfg)
    torch.manual_seed(seed)
    model.init_weights()
    return model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama3_1b", 1_235_814_400),
        ("llama3_3b", 3_212_749_824),
        ("llama3_7b", 7_526_944_768),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_405b", 405_853_388_800),
        ("qwen3_0.6b", 596_049_920),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_32b", 32_762_123_264),
    ],
)
def test_parameter_count(name: str, expected: int) -> None:
    """R17, and what the released models have. For 7B: 2 * 128256 * 4096 + 4096 + 32 * (4 * 4096² + 3 * 4096 * 11008 +
    2 * 4096); for Qwen3 0.6B, tied: 151936 * 1024 + 1024 + 28 * (2 * 1024 * 2048 + 2 * 1024 * 1024 + 3 * 1024 * 3072 +
    2 * 1024 + 2 * 128).
    """
    with torch.device("meta"):
        model = build_model(preset(name))
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = build_model(_small(tie_embeddings=True)), build_model(_small())
    count = [sum(p.numel() for p in model.parameters()) for model in (tied, untied)]
    assert count[1] - count[0] == 200 * 64
    assert "output.weight" not in tied.state_dict()


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_same_numbers_as_transformers(tied: bool, flash: bool) -> None:
    transformers = pytest.importorskip("transformers")
    cfg = _small(tie_embeddings=tied, use_flash_attention=flash, rope_theta=10000.0)
    model = _seeded(cfg)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=cfg.dim,
            num_hidden_layers=cfg.n_layers,
            num_attention_heads=cfg.n_heads,
            num_key_value_heads=cfg.n_kv_heads,
            intermediate_size=cfg.ffn_dim,
            vocab_size=cfg.vocab_size,
            max_position_embeddings=cfg.max_seq_len,
            rope_theta=cfg.rope_theta,
            rms_norm_eps=cfg.norm_eps,
            tie_word_embeddings=tied,
        )
    )
    names = {
        "tok_embeddings": "model.embed_tokens",
        "layers.": "model.layers.",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wq": "self_attn.q_proj",
        "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj",
        "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "output": "lm_head",
    }
    state = {}
    for name, tensor in model.state_dict().items():
        renamed = "model.norm.weight" if name == "norm.weight" else name
        for ours, theirs in names.items():
            renamed = renamed.replace(ours, theirs)
        state[renamed] = tensor
    if tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    reference.load_state_dict(state)
    tokens = torch.randint(200, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), reference(tokens).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dim", [64, 1024])
def test_first_loss_is_near_the_uniform_one(dim: int, tied: bool) -> None:
    """Within 0.3 of ln(vocab) = ln 500 = 6.21, also where sqrt(dim) * 0.02 would be too much for the head."""
    cfg = _small(dim=dim, n_layers=2, vocab_size=500, tie_embeddings=tied)
    model = _seeded(cfg)
    tokens = torch.randint(500, (4, 33), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) / (4 * 32)
    assert loss.item() == pytest.approx(math.log(500), abs=0.3)


def test_meta_model_is_initialised_layer_by_layer_in_any_order() -> None:
    """Each layer's values depend on the random state alone, and the rotary tables on nothing."""
    with torch.device("meta"):
        model = build_model(_small())
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.to_empty(device="cpu")
    expected = _seeded(_small())
    owners = [
        (name, module)
        for name, module in expected.named_modules()
        if list(module.parameters(recurse=False)) or list(module.buffers(recurse=False))
    ]
    for seed, (name, module) in enumerate(reversed(owners)):
        torch.manual_seed(seed)
        module.reset_parameters()
        torch.manual_seed(seed)
        model.get_submodule(name).reset_parameters()
    for (name, wanted), actual in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(wanted, actual), name
    for wanted, actual in zip(expected.buffers(), model.buffers(), strict=True):
        assert torch.equal(wanted, actual)


def test_residual_matrices_shrink_with_depth() -> None:
    """Block i starts its two output matrices at 0.02 / sqrt(2 (i + 1)); 3 sigma cut-off leaves 0.987 of it."""
    model = _seeded(_small(dim=256, ffn_dim=512))
    for index, layer in enumerate(model.layers):
        expected = 0.987 * 0.02 / math.sqrt(2 * (index + 1))
        assert layer.attention.wo.weight.std().item() == pytest.approx(expected, rel=0.03)
        assert layer.feed_forward.w2.weight.std().item() == pytest.approx(expected, rel=0.03)
        assert layer.feed_forward.w1.weight.std().item() == pytest.approx(0.987 * 0.02, rel=0.03)


def test_a_position_does_not_see_later_ones() -> None:
    model = _seeded(_small(use_flash_attention=True))
    tokens = torch.randint(200, (1, 16), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 200
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 10], after[:, 10], atol=1e-3)


def test_too_long_an_input_is_refused() -> None:
    with pytest.raises(ValueError, match="33 positions, more than model.max_seq_len = 32"):
        _seeded(_small())(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("flash", [False, True])
def test_documents_of_a_row_do_not_see_each_other(flash: bool) -> None:
    """Logits are those of each document in a row of its own: positions that begin elsewhere change roundings only."""
    model = _seeded(_small(use_flash_attention=flash))
    tokens = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([[0] * 5 + [1] + [2] * 10, [0] * 16])
    with torch.no_grad():
        together = model(tokens, Documents.from_ids(ids))
        for row, start, end in ((0, 0, 5), (0, 5, 6), (0, 6, 16), (1, 0, 16)):
            alone = model(tokens[row : row + 1, start:end])
            torch.testing.assert_close(together[row : row + 1, start:end], alone, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(together[0, 6:], model(tokens)[0, 6:], atol=1e-2)
