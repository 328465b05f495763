"""The debug model's losses, as they were when somebody last meant to change them.

``golden_losses.json`` is written by ``python -m pytest tests/e2e/test_golden.py --write_golden``, on purpose only: a
change that is not meant to change numbers leaves it alone, one that is says so in its commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Workspace

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS = 20


def test_two_deterministic_runs_are_bit_identical_and_as_ever(
    make_workspace: Callable[..., Workspace], request: pytest.FixtureRequest
) -> None:
    """Loss and gradient norm of 20 steps of ``llama3_debug`` in fp32 on two ranks, once of torchrun's and once of ours;
    2e-4 is more than what another order of additions (AVX2, SSE instead of AVX-512) did to them by then."""
    flags = ["--model.dim", "256", "--model.n_layers", "6", "--model.n_heads", "8", "--model.n_kv_heads", "4"]
    flags += ["--model.ffn_dim", "688", "--training.deterministic", "true", "--training.max_steps", str(STEPS)]
    flags += ["--training.checkpoint.save_interval", "0", "--training.seed", "7", "--training.learning_rate", "1e-3"]
    runs = []
    for name in ("launch", "train"):
        work = make_workspace(name, *flags)
        result = getattr(work, name)(ranks=2)
        assert result.returncode == 0, result.stderr
        runs.append(work.losses())
    assert len(runs[0]) == STEPS and runs[0] == runs[1]
    if request.config.getoption("--write_golden"):
        GOLDEN.write_text(json.dumps([{"loss": loss, "grad_norm": norm} for loss, norm in runs[0]], indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert [loss for loss, _ in runs[0]] == pytest.approx([step["loss"] for step in golden], rel=2e-4)
    assert [norm for _, norm in runs[0]] == pytest.approx([step["grad_norm"] for step in golden], rel=2e-3)
