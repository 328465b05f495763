"""Training on several corpora: named in the log, continued bit by bit, and refused when the shares have changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest

from torchtitan_npu.cli import train_main

from .conftest import CONFIG, Workspace

MIXTURE = "data: {mixture: [{path: data.jsonl, weight: 3}, {path: more, weight: 1, name: little}]}\n"


def test_a_mixture(make_workspace: Callable[..., Workspace], capfd: pytest.CaptureFixture[str]) -> None:
    """24 samples, of which every fourth is from ``little``: 40 tokens, 39 targets, two samples of 32 an epoch."""
    whole, rest = make_workspace("whole", "--parallel.strategy", "ddp"), make_workspace("rest")
    folder = whole.data.parent
    (folder / "more").mkdir()
    (folder / "more" / "one.jsonl").write_text(json.dumps({"tokens": [5] * 40}) + "\n")
    whole.config.write_text(CONFIG + MIXTURE)
    whole.data = folder
    assert train_main(whole.arguments()) == 0
    output = capfd.readouterr()
    assert "little: 40 tokens in 1 documents: 2 samples of 32 tokens per epoch" in output.out
    assert "0.25 of all samples" in output.out and "epoch 2 of little is done" in output.out
    state = json.loads((whole.checkpoints / "step-00000006" / "meta.json").read_text())["data"]
    assert state["global_sample"] == 24 and state["shares"] == ["3/4", "1/4"] and len(state["fingerprints"]) == 2

    rest.data, rest.flags = folder, whole.flags
    shutil.copytree(whole.checkpoints / "step-00000003", rest.checkpoints / "step-00000003")
    assert train_main(rest.arguments("--data.num_workers", "0")) == 0
    assert rest.losses() == whole.losses()[3:]

    capfd.readouterr()
    whole.config.write_text(CONFIG + MIXTURE.replace("weight: 3", "weight: 7"))
    assert train_main(whole.arguments("--training.max_steps", "9")) == 1
    assert "data.mixture (shares) was 3/4, 1/4, is 7/8, 1/8" in capfd.readouterr().err
    whole.data = folder / "data.jsonl"
    assert train_main(whole.arguments("--training.max_steps", "9")) == 1
    assert "must be a directory" in capfd.readouterr().err
