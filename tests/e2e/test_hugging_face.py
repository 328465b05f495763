"""Training between two visits to transformers: import, train on one and two ranks, export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from torchtitan_npu import cli

from .conftest import Workspace


def test_training_starts_from_an_imported_model(make_workspace: Callable[..., Workspace], tmp_path: Path) -> None:
    """Whole on one rank and sharded on two: the same losses, which are an imported model's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=61,
        max_position_embeddings=32,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        initializer_range=0.2,
    )
    theirs = LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf")
    losses = {}
    for name, ranks, flags in [
        ("one", 1, ["--training.gradient_accumulation_steps", "4", "--parallel.strategy", "ddp"]),
        ("two", 2, []),
    ]:
        work = make_workspace(name, "--training.max_steps", "2", *flags)
        assert cli.main(["import", str(tmp_path / "hf"), "--from", "hf", "--output", str(work.checkpoints)]) == 0
        result = work.train(ranks=ranks)
        assert result.returncode == 0, result.stderr
        assert "resumed from" in result.stdout and "step 0 of 2" in result.stdout
        losses[name] = [loss for loss, _ in work.losses()]
    assert losses["two"] == pytest.approx(losses["one"], rel=1e-5)
    # Far from ln 61 = 4.11, where a model that had not been imported would start.
    assert losses["one"][0] > 4.5

    # What two ranks trained goes back.
    two = tmp_path / "two" / "checkpoints"
    assert cli.main(["merge", str(two), "--output", str(tmp_path / "whole.safetensors")]) == 0
    assert cli.main(["export", str(two), "--to", "hf", "--output", str(tmp_path / "again")]) == 0
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again")
    whole = load_file(tmp_path / "whole.safetensors")
    assert torch.equal(again.model.layers[1].mlp.down_proj.weight, whole["layers.1.feed_forward.w2.weight"])
    moved = [(a - b).abs().max().item() for a, b in zip(again.parameters(), theirs.parameters(), strict=True)]
    # Two steps of AdamW at 1e-3 and 2e-3 (warm-up over two), each moving a weight by at most its rate, and decay.
    assert 1e-3 < max(moved) < 4e-3
