"""fp16 and activation checkpointing in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchtitan_npu.cli import train_main
from torchtitan_npu.config import Config
from torchtitan_npu.train import parallelize

from .conftest import Workspace, workspace_maker


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Six steps on one rank."""
    work = workspace_maker(tmp_path_factory.mktemp("fp32"))("run")
    assert train_main(work.arguments()) == 0
    return work


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_fp16_skips_overflows_and_continues_bit_by_bit(
    make_workspace: Callable[..., Workspace],
    fp32: Workspace,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
) -> None:
    """From a loss scale of 2^30: the first steps overflow, most others train."""
    start = 2.0**30
    monkeypatch.setattr(parallelize, "INITIAL_LOSS_SCALE", start)
    flags = ("--parallel.dtype", "fp16", "--parallel.strategy", strategy, "--training.max_steps", "30")
    flags += ("--training.checkpoint.save_interval", "20")
    whole = make_workspace("whole", *flags)
    assert train_main(whole.arguments()) == 0
    log = capfd.readouterr().err
    records = whole.metrics()
    skipped = [record["step"] for record in records if record["grad_norm"] is None]
    assert skipped[:2] == [1, 2] and len(skipped) < 20, "the test must see both kinds of steps"
    so_far = [sum(1 for other in skipped if other <= step) for step in range(1, 31)]
    assert [record["skipped_steps"] for record in records] == so_far
    assert [record["loss_scale"] for record in records] == [start / 2**count for count in so_far]
    assert log.count("the gradient overflowed at loss scale") == len(skipped)
    assert f"step 2: the gradient overflowed at loss scale {start / 2:g}, so no rank applied the update" in log
    # The first step's loss is that of the same weights.
    assert records[0]["loss"] == pytest.approx(fp32.metrics()[0]["loss"], rel=0.02 if strategy == "ddp" else 2e-3)
    assert records[-1]["loss"] < records[0]["loss"] - 0.1

    rest = make_workspace("rest", *flags)
    (rest.checkpoints).mkdir()
    (whole.checkpoints / "step-00000020").rename(rest.checkpoints / "step-00000020")
    monkeypatch.setattr(parallelize, "INITIAL_LOSS_SCALE", 1.0)  # comes from the checkpoint
    assert train_main(rest.arguments()) == 0
    keys = ("step", "loss", "grad_norm", "loss_scale", "skipped_steps")
    assert [[r[k] for k in keys] for r in rest.metrics()] == [[r[k] for k in keys] for r in records[20:]]


def test_fp16_on_two_ranks(make_workspace: Callable[..., Workspace]) -> None:
    """Near the same run with fp32; nothing overflows at the usual scale."""
    one, two = (make_workspace(dtype, "--parallel.dtype", dtype) for dtype in ("fp32", "fp16"))
    assert one.train(ranks=2).returncode == 0
    result = two.train(ranks=2)
    assert result.returncode == 0, result.stderr
    assert [loss for loss, _ in two.losses()] == pytest.approx([loss for loss, _ in one.losses()], rel=5e-3)
    assert {record["loss_scale"] for record in two.metrics()} == {65536.0}
    assert {record["skipped_steps"] for record in two.metrics()} == {0}


def test_overflow_at_every_scale_ends_the_run(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallelize, "INITIAL_LOSS_SCALE", 1.0)
    work = make_workspace("endless", "--parallel.dtype", "fp16", "--parallel.strategy", "ddp")

    def make(cfg: Config, model: Any) -> Any:
        scaler: Any = parallelize.make_scaler(cfg, model)
        unscale = scaler.unscale_

        def unscale_(optimizer: Any) -> None:
            for p in model.module.parameters():
                p.grad.fill_(float("inf"))
            unscale(optimizer)

        scaler.unscale_ = unscale_
        return scaler

    monkeypatch.setattr("torchtitan_npu.train.trainer.make_scaler", make)
    assert train_main(work.arguments()) != 0
    assert (
        "step 1: the gradient overflows float16 even at loss scale 1, with every loss finite" in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("mode", "flags"), [("true", []), ("selective", []), ("selective", ["--model.use_flash_attention", "true"])]
)
def test_activation_checkpointing_changes_no_number(
    make_workspace: Callable[..., Workspace], fp32: Workspace, mode: str, flags: list[str]
) -> None:
    work = make_workspace(mode, "--training.activation_checkpointing", mode, *flags)
    assert train_main(work.arguments()) == 0
    want = fp32
    if flags:
        want = make_workspace("flash", *flags)
        assert train_main(want.arguments()) == 0
    assert work.losses() == want.losses()


@pytest.mark.parametrize("mode", ["true", "selective"])
def test_activation_checkpointing_of_replicas(make_workspace: Callable[..., Workspace], mode: str) -> None:
    runs = [
        make_workspace(f"ddp-{m}", "--parallel.strategy", "ddp", "--training.activation_checkpointing", m)
        for m in ("false", mode)
    ]
    for run in runs:
        assert train_main(run.arguments()) == 0
    assert runs[0].losses() == runs[1].losses()
