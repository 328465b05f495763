"""Kinds of optimizers and settings of parameter groups in the trainer, and what a checkpoint holds of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_npu.cli import train_main

from .conftest import Workspace


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


SGD = ("--training.optimizer", "sgd", "--training.learning_rate", "0.5")


def saved_names(checkpoint: Path) -> set[str]:
    return {str(name) for name in dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata}


@pytest.mark.parametrize(
    "flags",
    [
        (*SGD, "--parallel.strategy", "fsdp"),
        (*SGD, "--parallel.strategy", "ddp"),
        (*SGD, "--training.momentum", "0"),
        (*SGD, "--parallel.strategy", "ddp", "--training.momentum", "0", "--training.optimizer_impl", "foreach"),
        ("--training.optimizer_impl", "foreach"),
        ("--training.optimizer_state_dtype", "bf16"),
        ("--training.optimizer_state_dtype", "bf16", "--parallel.strategy", "ddp"),
    ],
)
def test_continues_bit_by_bit(make_workspace: Callable[..., Workspace], flags: tuple[str, ...]) -> None:
    """Six steps at once, and three with three more; the loss falls."""
    whole, rest = make_workspace("whole", *flags), make_workspace("rest", *flags)
    assert train_main(whole.arguments()) == 0
    losses = whole.losses()
    assert losses[-1][0] < losses[0][0] - 0.1
    step_3 = whole.checkpoints / "step-00000003"
    kept = {name.rpartition(".")[2] for name in saved_names(step_3) if name.startswith("optimizer.")}
    if "sgd" not in flags:
        assert kept == {"step", "exp_avg", "exp_avg_sq"}
    else:
        assert kept == (set() if "--training.momentum" in flags else {"momentum_buffer"})
    rest.checkpoints.mkdir()
    step_3.rename(rest.checkpoints / step_3.name)
    assert train_main(rest.arguments()) == 0
    assert rest.losses() == losses[3:]


def test_another_optimizer_does_not_continue(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    work = make_workspace("run", *SGD, "--training.max_steps", "1")
    assert train_main(work.arguments()) == 0
    for flags, other in (
        (("--training.optimizer", "adamw"), "adamw"),
        (("--training.momentum", "0"), "sgd without momentum"),
    ):
        assert train_main(work.arguments(*flags, "--training.max_steps", "2")) != 0
        assert f"was trained with sgd with momentum, and {other} cannot continue from that" in capfd.readouterr().err


def test_parameter_groups(make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]) -> None:
    """A factor of 0 keeps the embedding and norms at their first values; a rule without parameters is an error."""
    groups = "[{match: tok_embeddings.weight, learning_rate_scale: 0}, {match: '*norm*', learning_rate_scale: 0}]"
    work = make_workspace("run", "--training.parameter_groups", groups, "--training.checkpoint.save_interval", "1")
    work.flags += ["--training.checkpoint.max_keep", "0"]
    assert train_main(work.arguments()) == 0
    saved: list[dict[str, torch.Tensor]] = []
    for step in (1, 6):
        path = work.checkpoints / f"step-{step:08d}"
        metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(metadata[name].size) for name in saved_names(path) if name.startswith("model.")}
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
        saved.append(tensors)
    same = {name for name, tensor in saved[0].items() if torch.equal(tensor, saved[1][name])}
    assert same == {name for name in saved[0] if "tok_embeddings" in name or "norm" in name}

    wrong = make_workspace("wrong", "--training.parameter_groups", "[{match: 'layers.2.*'}]")
    for mode in ((), ("--dry_run",)):
        assert train_main(wrong.arguments(*mode)) != 0
        assert "training.parameter_groups: item 1: match: 'layers.2.*' matches no parameter" in capfd.readouterr().err
