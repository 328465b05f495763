"""The memory that is planned, against what torch's allocator is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from allocations import peak_of_micro_batch
from torch import nn

from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.models import build_model
from torchtitan_npu.planning.memory import activation_bytes, estimate_memory
from torchtitan_npu.train.optimizer import build_optimizer

SIZES = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 160, "vocab_size": 512, "max_seq_len": 128, "n_layers": 5}


def configuration(
    dtype: str, model: dict[str, Any], training: dict[str, Any], data: dict[str, Any] | None = None
) -> Config:
    values = {"learning_rate": 1e-3, "max_steps": 1, "batch_size": 2, "seq_len": 128} | training
    return config_from_dict(
        {"model": {"name": "llama3_debug"} | SIZES | model, "training": values, "parallel": {"dtype": dtype}}
        | {"data": data or {}}
    )


def measured_peak(config: Config) -> int:
    model: nn.Module = build_model(config.model)
    rope = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.parallel.dtype])
    for name, buffer in rope.items():  # mixed precision leaves buffers alone
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, buffer)
    return peak_of_micro_batch(model, config)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("mode", [False, True, "selective"])
@pytest.mark.parametrize("chunk", [0, 64])
def test_activations(dtype: str, flash: bool, mode: Any, chunk: int) -> None:
    """Within 2 %, where a scalar or a mask may be one tensor more; five layers are extrapolated from three."""
    config = configuration(
        dtype, {"use_flash_attention": flash}, {"activation_checkpointing": mode, "loss_chunk_tokens": chunk}
    )
    assert activation_bytes(config) == pytest.approx(measured_peak(config), rel=0.02)


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"dim": 96, "n_heads": 3, "n_kv_heads": 3, "ffn_dim": 64}, {"batch_size": 3, "seq_len": 40}),
        ({"vocab_size": 4000, "n_layers": 1}, {"batch_size": 1}),
        ({"vocab_size": 4000, "n_layers": 4, "tie_embeddings": True}, {"z_loss_weight": 1e-4}),
        ({"vocab_size": 4000, "n_layers": 4}, {"z_loss_weight": 1e-4, "loss_chunk_tokens": 0}),
        ({"name": "qwen3_debug", "head_dim": 40, "n_layers": 6}, {"activation_checkpointing": "selective"}),
    ],
)
def test_activations_of_other_shapes(model: dict[str, Any], training: dict[str, Any]) -> None:
    config = configuration("bf16", model, training)
    assert activation_bytes(config) == pytest.approx(measured_peak(config), rel=0.02)


@pytest.mark.parametrize("flash", [False, True])
def test_activations_with_attention_inside_documents(flash: bool) -> None:
    """One mask for all blocks; about two hundred documents in two rows."""
    config = configuration("bf16", {"use_flash_attention": flash}, {}, {"document_mask": True})
    assert activation_bytes(config) == pytest.approx(measured_peak(config), rel=0.02)


def test_planning_needs_no_memory_of_the_models_size() -> None:
    """A micro-batch of 70B at full length, two sequences of 8,192: of 80 blocks, in bf16, per token about four vectors
    of the feed-forward width, nine of the model's, three of all queries, three of all keys; 590 GB."""
    sizes = {"dim": 8192, "n_heads": 64, "n_kv_heads": 8, "ffn_dim": 28672, "vocab_size": 128256, "n_layers": 80}
    config = configuration("bf16", sizes | {"max_seq_len": 8192, "use_flash_attention": True}, {"seq_len": 8192})
    expected = 80 * 2 * 8192 * 2 * (4 * 28672 + 9 * 8192 + 3 * 8192 + 3 * 1024)
    assert activation_bytes(config) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
@pytest.mark.parametrize(
    ("training", "copies"),
    [
        ({}, 2),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sgd", "momentum": 0}, 0),
        ({"optimizer_state_dtype": "bf16"}, 1),
    ],
)
def test_optimizer_state(strategy: str, training: dict[str, Any], copies: int) -> None:
    """What the optimizer that is built for the model holds, per parameter."""
    training = {"learning_rate": 1e-3, "max_steps": 1, "seq_len": 128} | training
    config = config_from_dict(
        {"model": {"name": "llama3_debug", **SIZES}, "training": training, "parallel": {"strategy": strategy}}
    )
    estimate = estimate_memory(config, 1)
    assert estimate.optimizer == copies * estimate.parameters
    model = build_model(config.model)
    optimizer = build_optimizer(model.named_parameters(), frozenset(), config)
    held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    assert held == copies * sum(p.nbytes for p in model.parameters())
