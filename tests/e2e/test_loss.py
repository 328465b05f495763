"""The loss in chunks, and the z-loss, in the trainer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchtitan_npu.cli import train_main

from .conftest import Workspace


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# Of losses and gradient norms. 16 bits: what is rounded to them is the same, but sums of the output matrix's gradient.
TOLERANCE = {"fp32": 2e-6, "bf16": 5e-3, "fp16": 1e-3}


@pytest.mark.parametrize(
    "flags",
    [
        "--parallel.dtype fp32",
        "--parallel.dtype fp32 --model.tie_embeddings true --parallel.reshard_after_forward true",
        "--parallel.dtype fp32 --parallel.strategy ddp --training.activation_checkpointing true",
        "--parallel.dtype bf16 --training.activation_checkpointing selective",
        "--parallel.dtype bf16 --parallel.strategy ddp --model.tie_embeddings true",
        "--parallel.dtype fp16",
        "--parallel.dtype fp16 --parallel.strategy ddp",
    ],
)
def test_chunks_change_no_loss(make_workspace: Callable[..., Workspace], flags: str) -> None:
    """Micro-batches of 64 tokens: whole, in one chunk, in chunks of 24 with a rest; with a z-loss that shows."""
    options = [*flags.split(), "--training.z_loss_weight", "1e-2"]
    runs = []
    for chunk in ("0", "1024", "24"):
        run = make_workspace(chunk, *options, "--training.loss_chunk_tokens", chunk)
        assert train_main(run.arguments()) == 0
        runs.append(run.losses())
    tolerance = TOLERANCE[options[1]]
    for run in runs[1:]:
        for got, expected in zip(run, runs[0], strict=True):
            assert got == pytest.approx(expected, rel=tolerance)


def test_z_loss_is_not_in_the_logged_loss(make_workspace: Callable[..., Workspace]) -> None:
    """The first step's loss is that of the same weights; its gradient is another, and so are the next losses."""
    without, with_z = make_workspace("without"), make_workspace("with", "--training.z_loss_weight", "0.1")
    for run in (without, with_z):
        assert train_main(run.arguments()) == 0
    (loss, norm), (z_loss, z_norm) = without.losses()[0], with_z.losses()[0]
    assert loss == z_loss and abs(norm - z_norm) > 1e-3 * norm
    assert without.losses()[-1][0] != with_z.losses()[-1][0]
