"""Out of memory: which errors are, and what the message says."""

from __future__ import annotations

import errno
import re
from typing import Any

import pytest
import torch

from torchtitan_npu import PeerError
from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.launch import Environment
from torchtitan_npu.planning import estimate_memory
from torchtitan_npu.planning.knobs import cheapest_knobs
from torchtitan_npu.planning.memory import memory_kinds
from torchtitan_npu.train import out_of_memory
from torchtitan_npu.train.out_of_memory import OutOfMemoryError, explain, explained_out_of_memory, is_out_of_memory

CPU = torch.device("cpu")


def _config(model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **training: Any) -> Config:
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", "max_seq_len": 1024, **(model or {})},
            "training": {"learning_rate": 1e-3, "max_steps": 1, "batch_size": 4, **training},
            "parallel": parallel or {},
        }
    )


def _from_torch() -> Exception:
    try:
        torch.empty(1 << 55)
    except RuntimeError as error:
        return error
    raise AssertionError("this machine has 2^57 bytes")


@pytest.mark.parametrize(
    "error",
    [
        _from_torch(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61.00 GiB total capacity)"),
        MemoryError("std::bad_alloc"),
        RuntimeError("mmap of 10 bytes: Cannot allocate memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_errors_that_mean_it(error: Exception) -> None:
    assert is_out_of_memory(error)
    with (
        pytest.raises(OutOfMemoryError, match="out of memory in step 3") as caught,
        explained_out_of_memory(_config(), Environment(), CPU, lambda: "in step 3"),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        OSError(errno.ENOSPC, "disk"),
        KeyError("memory"),
        PeerError("rank 1 died. See its log for the reason (out of memory? `dmesg`)"),
    ],
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explained_out_of_memory(_config(), Environment(), CPU, str):
        raise error
    assert caught.value is error


def test_message() -> None:
    cfg = _config(parallel={"dtype": "fp32"}, loss_chunk_tokens=0)
    text = explain(_from_torch(), cfg, Environment(), CPU, "in step 3")
    kinds = ["parameters", "gradients", "optimizer", "arena", "activations", "logits", "total"]
    assert re.findall(r"^  (.+?)  +[\d.]+ [MG]B", text, re.MULTILINE) == [*kinds, "peak so far"]
    assert "for the 1 rank(s) of this machine" in text
    assert "model.use_flash_attention=true saves about" in text
    assert "training.batch_size=2 with training.gradient_accumulation_steps=2 saves about" in text


def test_logits_are_what_the_vocabulary_adds_to_the_peak() -> None:
    """Held as a whole: in fp32 logits, their log-softmax and its gradient, 4 x 1,024 tokens x 32,000 ids. Not held: the
    gradient of the output matrix instead, 32,000 x 256, and 1,024 tokens x 32,000 ids; less what the peak without a
    vocabulary has elsewhere."""
    model = {"use_flash_attention": True, "vocab_size": 32_000}
    for chunk, expected in ((0, 12 * 4096 * 32_000), (1024, 4 * 32_000 * 256 + 4 * 1024 * 32_000)):
        cfg = _config(model, {"dtype": "fp32"}, loss_chunk_tokens=chunk)
        logits = memory_kinds(cfg, estimate_memory(cfg, 1))["logits"]
        assert logits == pytest.approx(expected, rel=0.15), chunk


def test_kinds_add_up() -> None:
    for checkpointing in (False, "selective", True):
        cfg = _config(activation_checkpointing=checkpointing)
        memory = estimate_memory(cfg, 2)
        assert sum(memory_kinds(cfg, memory).values()) == memory.total


def test_what_a_knob_saves_is_the_difference_of_the_estimates() -> None:
    cfg = _config()
    (knob, *_) = cheapest_knobs(cfg, 1)
    assert knob.settings == {"model.use_flash_attention": True}
    changed = _config(model={"use_flash_attention": True})
    assert knob.saved_bytes == estimate_memory(cfg, 1).total - estimate_memory(changed, 1).total > 0


@pytest.mark.parametrize(
    ("cfg", "expected"),
    [
        (_config(parallel={"strategy": "ddp"}), "parallel.strategy"),
        (
            _config(parallel={"reshard_after_forward": False, "bucket_cap_mb": 1}, batch_size=1, seq_len=32),
            "parallel.reshard_after_forward",
        ),
        (_config(model={"use_flash_attention": True}), "training.activation_checkpointing"),
        (_config(model={"vocab_size": 128_256}, loss_chunk_tokens=0), "training.loss_chunk_tokens"),
    ],
)
def test_knobs_fit_the_configuration(cfg: Config, expected: str) -> None:
    knobs = cheapest_knobs(cfg, 8, count=20)
    assert expected in {key for knob in knobs for key in knob.settings}
    assert all(knob.saved_bytes > 0 for knob in knobs)
    assert (
        not any(knob.settings.get("model.use_flash_attention") for knob in knobs) or not cfg.model.use_flash_attention
    )


def test_a_configuration_without_knobs() -> None:
    small = {"use_flash_attention": True, "max_seq_len": 1, "vocab_size": 2, "dim": 64, "n_layers": 1}
    cfg = _config(
        model=small,
        parallel={"prefetch": 0, "bucket_cap_mb": 1},
        batch_size=1,
        activation_checkpointing=True,
        optimizer_state_dtype="bf16",
    )
    assert cheapest_knobs(cfg, 1) == []
    assert "no setting saves much here" in explain(MemoryError(), cfg, Environment(), CPU, "in step 1")


def test_when_not_even_the_estimate_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(out_of_memory, "estimate_memory", fail)
    text = explain(MemoryError(), _config(), Environment(), CPU, "in step 1")
    assert text.startswith("out of memory in step 1 (MemoryError)\n") and "--dry_run" in text
