"""Examples, run as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from .conftest import launch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/transformers_model.py"


def run(ranks: int, *flags: object) -> list[tuple[float, float]]:
    """Loss and gradient norm of the steps that were printed."""
    result = launch(EXAMPLE, *flags, torchrun=ranks)
    assert result.returncode == 0, result.stderr
    return [
        (float(loss), float(norm)) for loss, norm in re.findall(r"loss ([\d.]+), gradient norm ([\d.]+)", result.stdout)
    ]


def test_a_model_of_transformers_is_trained_and_saved_in_its_own_format(tmp_path: Path) -> None:
    flags = ("--steps", 10, "--seq_len", 64)
    two = run(2, *flags, "--batch_size", 2, "--output", tmp_path / "two")
    one = run(1, *flags, "--batch_size", 4, "--output", tmp_path / "one")
    assert len(two) == 2 and two[1][0] < two[0][0] - 0.5
    for ours, wanted in zip(two, one, strict=True):
        assert ours == pytest.approx(wanted, abs=2e-3)  # four and three digits are printed
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("two", "one")]
    assert all(isinstance(model, Qwen3ForCausalLM) for model in models)
    tokens = torch.tensor([list(EXAMPLE.read_bytes()[:64])])
    with torch.no_grad():
        loss, other = (float(model(input_ids=tokens, labels=tokens).loss) for model in models)
    assert loss == pytest.approx(other, abs=1e-3) and loss < two[0][0] - 0.5
