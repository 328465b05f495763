"""What goes wrong for users: one clear message, a status ≠ 0, nothing lost."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan_npu.cli import train_main
from torchtitan_npu.models import Llama
from torchtitan_npu.train import Trainer

from .conftest import Workspace


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert not torch.distributed.is_initialized()


def _fails(work: Workspace, capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """Run in this process; return the message of the failure."""
    assert train_main(work.arguments("--parallel.strategy", "ddp", *flags)) != 0
    message = capfd.readouterr().err
    assert "Traceback" not in message
    return message


def test_data_file_is_missing(make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]) -> None:
    work = make_workspace("missing")
    work.data.unlink()
    assert str(work.data) in _fails(work, capfd)


def test_token_id_beyond_the_vocabulary(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    work = make_workspace("beyond")
    with open(work.data, "a") as file:
        file.write(json.dumps({"tokens": [1, 61], "length": 2}) + "\n")
    message = _fails(work, capfd)
    assert f"{work.data}:121" in message
    assert "61" in message
    assert "model.vocab_size" in message


def test_data_file_is_torn(make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]) -> None:
    work = make_workspace("torn")
    work.data.write_bytes(work.data.read_bytes()[:-7])
    assert f"{work.data}:120" in _fails(work, capfd)


def mark(jsonl: Path, tokenizer: str, vocab_size: int = 61) -> None:
    """What prepare writes beside a JSONL."""
    values = {
        "name": tokenizer,
        "fingerprint": tokenizer,
        "vocab_size": vocab_size,
        "jsonl_bytes": jsonl.stat().st_size,
    }
    jsonl.with_name(jsonl.name + ".tokenizer").write_text(json.dumps(values))


def test_data_of_different_tokenizers(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    """In one directory, in the corpora of a mixture, in training and held-out data; and ids that the model has not."""
    work = make_workspace("tokenizers")
    folder = work.data.parent
    other = folder / "held" / "out.jsonl"
    other.parent.mkdir()
    other.write_bytes(work.data.read_bytes())
    mark(work.data, "one")
    mark(other, "two")
    both = f"{work.data} was prepared with one, {other} with two"
    held_out = ["--validation.interval", "2", "--validation.data_dir", str(other)]
    message = _fails(work, capfd, *held_out)
    assert f"--data_dir and validation.data_dir: files of different tokenizers: {both}" in message
    single, work.data = work.data, f"{folder}/**/*.jsonl"  # type: ignore[assignment]
    assert f"--data_dir: files of different tokenizers: {both}" in _fails(work, capfd)
    work.data = folder
    mixture = "data: {mixture: [{path: data.jsonl}, {path: held}]}\n"
    plain = work.config.read_text()
    work.config.write_text(plain + mixture)
    assert f"data.mixture: files of different tokenizers: {both}" in _fails(work, capfd)
    work.config.write_text(plain)
    work.data = single
    mark(work.data, "one", vocab_size=62)
    message = _fails(work, capfd)
    assert f"{work.data} was prepared with one, whose ids go up to 61, but model.vocab_size = 61" in message
    assert (
        f"Set model.vocab_size to 62 or more, or prepare the data with the model's tokenizer; or remove {work.data}"
        in (message)
    )
    assert not (work.logs / "metrics.jsonl").exists()


def test_checkpoint_directory_cannot_be_written(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    work = make_workspace("unwritable")
    work.checkpoints.write_text("a file, where a directory should be")
    message = _fails(work, capfd)
    assert f"--checkpoint_dir {work.checkpoints} cannot be written" in message
    # It is found before any work is done.
    assert not (work.logs / "metrics.jsonl").exists()


def test_resume_from_what_is_not_there(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    work = make_workspace("resume")
    assert "/nowhere: no such directory" in _fails(work, capfd, "--training.resume", "/nowhere")


@pytest.fixture
def trained(make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]) -> Workspace:
    """A finished run of six steps with checkpoints at 3 and 6."""
    work = make_workspace("trained")
    assert train_main(work.arguments("--parallel.strategy", "ddp")) == 0, capfd.readouterr().err
    capfd.readouterr()
    return work


def test_checkpoint_of_another_model(trained: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    message = _fails(trained, capfd, "--model.ffn_dim", "96", "--training.max_steps", "9")
    assert "model.ffn_dim: 88 in the checkpoint, 96 now" in message
    # The shapes would fit, the numbers would not.
    message = _fails(trained, capfd, "--model.rope_theta", "1000", "--training.max_steps", "9")
    assert "model.rope_theta: 500000.0 in the checkpoint, 1000.0 now" in message


def test_a_fresh_start_among_other_checkpoints_is_refused(
    trained: Workspace, capfd: pytest.CaptureFixture[str]
) -> None:
    message = _fails(trained, capfd, "--training.resume", "none")
    assert "newest: step 6" in message
    assert sorted(path.name for path in trained.checkpoints.iterdir()) == ["step-00000003", "step-00000006"]


def test_a_damaged_checkpoint_is_passed_over(trained: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    newest = trained.checkpoints / "step-00000006"
    tensors = next(newest.glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    losses = trained.losses()
    assert train_main(trained.arguments("--parallel.strategy", "ddp")) == 0
    output = capfd.readouterr()
    assert f"{newest} is passed over: its file {tensors.name} has" in output.err
    assert "resumed from" in output.out and "step-00000003" in output.out
    # Steps 4 to 6 again, the same, and the damaged checkpoint is replaced.
    assert trained.losses() == losses
    assert (newest / "COMPLETE").is_file()


def test_data_that_changed_since_the_checkpoint(trained: Workspace, capfd: pytest.CaptureFixture[str]) -> None:
    with open(trained.data, "a") as file:
        file.write(json.dumps({"tokens": [1, 2, 3], "length": 3}) + "\n")
    assert "fingerprint" in _fails(trained, capfd, "--training.max_steps", "9")


def test_only_the_newest_checkpoints_are_kept(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    """R32: six steps, saved at each, two kept."""
    work = make_workspace("keep", "--training.checkpoint.save_interval", "1", "--training.checkpoint.max_keep", "2")
    assert train_main(work.arguments("--parallel.strategy", "ddp")) == 0
    assert sorted(path.name for path in work.checkpoints.iterdir()) == ["step-00000005", "step-00000006"]


def test_a_save_that_fails_costs_nothing(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]
) -> None:
    """R60: a file stands where the checkpoint of step 3 is to be written. Training goes on, saves step 6, and tells."""
    work = make_workspace("blocked")
    work.checkpoints.mkdir()
    blocker = work.checkpoints / "step-00000003"
    blocker.write_text("not a directory")
    assert train_main(work.arguments("--parallel.strategy", "ddp")) == 1
    output = capfd.readouterr()
    assert "the checkpoint of step 3 was not saved: rank 0" in output.err
    assert "1 checkpoint(s) could not be saved, of step(s) 3" in output.err
    assert "step-00000006" in output.out.strip().splitlines()[-1]
    assert blocker.read_text() == "not a directory"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_not_a_number_stops_all_ranks_before_the_update(
    make_workspace: Callable[..., Workspace], strategy: str
) -> None:
    """A learning rate of 1e38 ruins the weights in step 1: they are not saved, and step 2 stops the run."""
    work = make_workspace("nan", "--parallel.strategy", strategy)
    flags = ["--training.learning_rate", "1e38", "--training.warmup_steps", "0"]
    start = work.launch if strategy == "fsdp" else work.train  # through torchrun, and without
    result = start(*flags, "--training.checkpoint.save_interval", "1", ranks=2)
    assert result.returncode != 0
    assert "step 2: " in result.stderr and "not finite" in result.stderr
    assert "the checkpoint of step 1 was not saved: " in result.stderr and ".weight is not finite" in result.stderr
    assert "there is no checkpoint" in result.stderr
    assert "unexpected" not in result.stderr
    metrics = work.metrics()
    assert [record["step"] for record in metrics] == [1]
    assert math.isfinite(metrics[0]["loss"])
    assert list(work.checkpoints.iterdir()) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_gradient_that_is_not_finite_is_named(
    make_workspace: Callable[..., Workspace],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    strategy: str,
) -> None:
    """At step 2 one element of one gradient is infinite: the message names its parameter and no other."""
    work = make_workspace("inf", "--parallel.strategy", strategy, "--training.checkpoint.save_interval", "1")
    accumulate = Trainer._accumulate_gradients

    def spoil(trainer: Trainer, batches: Any, valid_labels: int) -> float:
        loss = accumulate(trainer, batches, valid_labels)
        if trainer.step == 1:
            parameter = dict(trainer.model.module.named_parameters())["layers.1.attention.wq.weight"]
            assert parameter.grad is not None
            parameter.grad[3, 5] = math.inf
        return loss

    monkeypatch.setattr(Trainer, "_accumulate_gradients", spoil)
    assert train_main(work.arguments()) == 1
    error = capfd.readouterr().err
    assert "step 2: the gradient (every loss is finite; layers.1.attention.wq.weight (infinite)) is not finite" in error
    assert f"the last checkpoint is {work.checkpoints / 'step-00000001'}" in error


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_rank_stops_the_other(make_workspace: Callable[..., Workspace], strategy: str) -> None:
    """``kill -9`` of rank 1 after step 1: rank 0 ends by itself, with a message and a status ≠ 0."""
    work = make_workspace("killed", "--parallel.strategy", strategy)
    flags = ("--training.max_steps", "1000000", "--training.checkpoint.save_interval", "0")
    with work.start_ranks(2, *flags) as ranks:
        deadline = time.monotonic() + 60
        log = work.logs / "metrics.jsonl"
        while not (log.exists() and log.stat().st_size > 0):
            assert time.monotonic() < deadline and ranks[0].returncode is None, ranks.output()
            time.sleep(0.1)
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks.wait(30) == [1, -signal.SIGKILL]
    output = ranks.output()[0]
    assert "[rank 0] ERROR: stopped, because another rank" in output
    assert "Traceback" not in output


def test_a_failure_of_one_rank_is_told_by_the_other(make_workspace: Callable[..., Workspace]) -> None:
    """Rank 1 does not find its data: rank 0 stops, too, and says whose fault it is."""
    work = make_workspace("different", "--parallel.strategy", "ddp")
    with work.start_ranks(2, rank_1_flags=["--data_dir", "/nowhere.jsonl"]) as ranks:
        assert ranks.wait(60) == [1, 1], ranks.output()
    outputs = ranks.output()
    assert "[rank 0] ERROR: stopped, because another rank failed: rank 1: " in outputs[0]
    assert all("/nowhere.jsonl" in output for output in outputs)
    assert not any("Traceback" in output for output in outputs)


def test_out_of_memory_says_what_needs_less(
    make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R53: the allocator's error in the middle of training becomes a table and the settings that help."""
    work = make_workspace("memory", "--training.checkpoint.save_interval", "2")
    forward, calls = Llama.forward, []

    def hungry(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not args[1].is_meta:  # planning runs it as well
            calls.append(1)
            if len(calls) > 6:  # two micro-batches a step
                torch.empty(1 << 55)
        return forward(*args, **kwargs)

    monkeypatch.setattr(Llama, "forward", hungry)
    error = _fails(work, capfd)
    assert "out of memory in step 4" in error and "Traceback" not in error
    assert f"the last checkpoint is {work.checkpoints / 'step-00000002'}" in error
    assert "logits" in error
    assert "model.use_flash_attention=true saves about" in error
