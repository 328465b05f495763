"""Training from end to end."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan_npu.report import read_run, render

from .conftest import Workspace, workspace_maker

LINE = re.compile(
    r"^\[Step (\d+)\] loss=(\d+\.\d{2}|nan|inf), lr=(\d(?:\.\d+)?e-?\d+|0), throughput=(\d+) tokens/s, "
    r"mem=(\d+\.\d)GB/(\d+)GB$",
    re.MULTILINE,
)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_one_process(make_workspace: Callable[..., Workspace], strategy: str) -> None:
    """R41, R49, R50: without torchrun; the log, the files, the end; and a second run that has nothing to do."""
    work = make_workspace("one", "--parallel.strategy", strategy)
    result = work.launch() if strategy == "ddp" else work.train()
    assert result.returncode == 0, result.stderr
    lines = LINE.findall(result.stdout)
    assert [int(line[0]) for line in lines] == [1, 2, 3, 4, 5, 6]
    assert LINE.findall((work.logs / "train.log").read_text()) == lines
    # 2 * 61 * 48 + 48 + 2 * (2 * 48² + 2 * 48 * 24 + 3 * 48 * 88 + 2 * 48) parameters
    assert "45,264 parameters" in result.stdout
    # 2 sequences x 1 rank x 2 micro-batches x 32 tokens
    assert "= 128 tokens per step; 6 steps, 768 tokens in total" in result.stdout

    metrics = work.metrics()
    assert [record["step"] for record in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[0]["loss"] == pytest.approx(math.log(61), abs=0.3)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.1
    assert metrics[-1]["tokens"] == 768
    assert any((work.logs / "tensorboard").iterdir())
    # Training stood still for a save after step 3, and the line of step 4 is the next that is written.
    assert max(metrics, key=lambda record: record["checkpoint_time"])["step"] == 4
    for record in metrics:
        parts = [record[f"{name}_time"] for name in ("data", "forward", "backward", "optimizer")]
        assert min(parts) > 0 and sum(parts) <= record["step_time"]
        assert record["mfu"] > 0 and record["mem_allocated_bytes"] is None

    plan = json.loads((work.logs / "plan.json").read_text())
    assert plan["model"]["num_parameters"] == 45_264
    assert plan["total_tokens"] == 768
    # fp32: 4 bytes each, and the moments are two more
    assert plan["memory_bytes"]["parameters"] >= 4 * 45_264
    assert plan["memory_bytes"]["optimizer"] == 2 * plan["memory_bytes"]["parameters"]
    assert plan["configuration"]["training"]["max_steps"] == 6
    assert metrics[2]["mfu"] == pytest.approx(
        plan["flops_per_token"] * metrics[2]["tokens_per_second"] / plan["peak_flops"], rel=1e-12
    )

    run = read_run(work.logs)
    assert run.notes == [] and run.plan == plan
    assert "llama3_debug" in render([run])

    last = result.stdout.strip().splitlines()[-1]
    assert str(work.checkpoints / "step-00000006") in last
    assert str(work.logs / "metrics.jsonl") in last
    assert str(work.logs / "tensorboard") in last

    again = work.train()
    assert again.returncode == 0, again.stderr
    assert "nothing to do" in again.stdout
    assert work.metrics() == metrics


def test_attention_inside_documents(make_workspace: Callable[..., Workspace]) -> None:
    """``data.document_mask`` is the same with both attentions and strategies, and not the same as without it."""
    runs = {
        "plain": ["--data.document_mask", "true", "--parallel.strategy", "ddp"],
        "flash": ["--data.document_mask", "true", "--model.use_flash_attention", "true"],
        "without": [],
    }
    losses = {}
    for name, flags in runs.items():
        work = make_workspace(name, *flags)
        result = work.train()
        assert result.returncode == 0, result.stderr
        losses[name] = [loss for loss, _ in work.losses()]
    assert losses["flash"] == pytest.approx(losses["plain"], rel=1e-4)
    assert losses["without"] != pytest.approx(losses["plain"], rel=1e-4)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, str]:
    """Six steps of ``strategy: fsdp`` on two ranks of torchrun's, and what they printed: the run that others are
    compared with."""
    work = workspace_maker(tmp_path_factory.mktemp("sharded"))("run")
    result = work.launch(ranks=2)
    assert result.returncode == 0, result.stderr
    return work, result.stdout


def _continued(work: Workspace, step_3: Path, *flags: str, ranks: int) -> str:
    """Run ``work`` from a copy of the checkpoint ``step_3``."""
    shutil.copytree(step_3, work.checkpoints / step_3.name)
    result = work.train(*flags, ranks=ranks)
    assert result.returncode == 0, result.stderr
    assert "resumed from" in result.stdout
    assert [record["step"] for record in work.metrics()] == [4, 5, 6]
    return result.stdout


def test_two_ranks_continue_bit_by_bit(
    make_workspace: Callable[..., Workspace], sharded: tuple[Workspace, str]
) -> None:
    """Six steps, against the last three of them again from the checkpoint of step 3."""
    whole, output = sharded
    assert len(LINE.findall(output)) == 6
    rest = make_workspace("rest")
    _continued(rest, whole.checkpoints / "step-00000003", ranks=2)
    assert rest.losses() == whole.losses()[3:]


def test_two_replicas_continue_bit_by_bit(make_workspace: Callable[..., Workspace]) -> None:
    whole, rest = (make_workspace(name, "--parallel.strategy", "ddp") for name in ("whole", "rest"))
    assert whole.train(ranks=2).returncode == 0
    _continued(rest, whole.checkpoints / "step-00000003", ranks=2)
    assert rest.losses() == whole.losses()[3:]


def test_a_checkpoint_of_two_ranks_continues_on_one(
    make_workspace: Callable[..., Workspace], sharded: tuple[Workspace, str]
) -> None:
    """R48: from the same global sample. Two ranks x 2 micro-batches, then one rank x 4: the same batches."""
    two, _ = sharded
    one = make_workspace("one", "--training.gradient_accumulation_steps", "4")
    output = _continued(one, two.checkpoints / "step-00000003", ranks=1)
    # 3 steps x 8 sequences
    assert "global sample 24" in output
    assert [loss for loss, _ in one.losses()] == pytest.approx([loss for loss, _ in two.losses()[3:]], rel=1e-5)


def test_replicas_of_a_sharded_model(make_workspace: Callable[..., Workspace], sharded: tuple[Workspace, str]) -> None:
    """``strategy: hsdp`` on 2 x 2 ranks: 4 x 2 sequences a step are the 2 x 2 x 2 of ``sharded``. It continues bit by
    bit.
    """
    hybrid = ["--parallel.strategy", "hsdp", "--parallel.replicate_degree", "2"]
    four = [*hybrid, "--training.gradient_accumulation_steps", "1"]
    whole, rest = (make_workspace(name, *four) for name in ("whole", "rest"))
    result = whole.train(ranks=4)
    assert result.returncode == 0, result.stderr
    assert "2 x 2 ranks" in result.stdout + result.stderr
    assert [loss for loss, _ in whole.losses()] == pytest.approx([loss for loss, _ in sharded[0].losses()], rel=1e-5)
    _continued(rest, whole.checkpoints / "step-00000003", ranks=4)
    assert rest.losses() == whole.losses()[3:]


def test_result_does_not_depend_on_ranks_or_how_the_batch_is_cut(
    make_workspace: Callable[..., Workspace], sharded: tuple[Workspace, str]
) -> None:
    """R58: 8 sequences a step as 2 x 2 ranks x 2 micro-batches (``sharded``), 4 x 2 ranks x 1, and 8 x 1 x 1."""
    losses = {}
    for strategy, ranks, batch_size in (("fsdp", 1, 8), ("ddp", 2, 4)):
        flags = ["--parallel.strategy", strategy, "--training.batch_size", str(batch_size)]
        work = make_workspace(strategy, *flags, "--training.gradient_accumulation_steps", "1")
        result = work.train(ranks=ranks)
        assert result.returncode == 0, result.stderr
        losses[strategy] = [loss for loss, _ in work.losses()]
    expected = [loss for loss, _ in sharded[0].losses()]
    assert losses["fsdp"] == pytest.approx(expected, rel=1e-5)
    # The two strategies draw other random numbers for the first weights: only near.
    assert losses["ddp"] == pytest.approx(expected, rel=0.02)


def test_bf16_trains(make_workspace: Callable[..., Workspace], sharded: tuple[Workspace, str]) -> None:
    """Mixed precision and sharding together: near the fp32 run, but not equal to it."""
    work = make_workspace("bf16", "--parallel.dtype", "bf16")
    result = work.train(ranks=2)
    assert result.returncode == 0, result.stderr
    losses, expected = ([loss for loss, _ in run.losses()] for run in (work, sharded[0]))
    assert losses == pytest.approx(expected, rel=0.01)
    assert losses != expected


def test_qwen3_on_two_ranks_is_the_same_as_on_one(make_workspace: Callable[..., Workspace]) -> None:
    """A second family through the whole trainer: queries and keys with norms of their own, heads wider than dim / H."""
    flags = ["--model.name", "qwen3_debug", "--model.head_dim", "16", "--model.tie_embeddings", "true"]
    one = make_workspace("one", *flags, "--training.batch_size", "4", "--training.gradient_accumulation_steps", "1")
    two = make_workspace("two", *flags, "--training.gradient_accumulation_steps", "1")
    for work, ranks in ((one, 1), (two, 2)):
        result = work.train(ranks=ranks)
        assert result.returncode == 0, result.stderr
        # 61 * 48 + 48 + 2 * (2 * 48 * 64 + 2 * 48 * 32 + 3 * 48 * 88 + 2 * 48 + 2 * 16) parameters
        assert "47,008 parameters" in result.stdout
    for ours, wanted in zip(two.losses(), one.losses(), strict=True):
        assert ours == pytest.approx(wanted, rel=1e-5)
