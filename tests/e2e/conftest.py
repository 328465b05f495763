"""A tiny corpus, a tiny model, and ways to train: ``launch`` as a user does, ``train`` and ``start_ranks`` without the
seconds that each Python spends on imports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from processes import Ranks, clean_environment, run

TRAIN_PY = Path(__file__).resolve().parents[2] / "train.py"
TRAIN_MAIN = "torchtitan_npu.cli:train_main"
TIMEOUT_SECONDS = 200

CONFIG = """
model:
  {name: llama3_debug, dim: 48, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 88, vocab_size: 61, max_seq_len: 32}
training:
  {batch_size: 2, seq_len: 32, gradient_accumulation_steps: 2, learning_rate: 2e-3, warmup_steps: 2, max_steps: 6,
   lr_schedule: constant, log_interval: 1, checkpoint: {save_interval: 3}}
parallel: {dtype: fp32}
"""


def launch(script: Path, *arguments: object, torchrun: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script by itself, or as so many ranks of ``torchrun``."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", torchrun) if torchrun else ()
    return subprocess.run(
        [str(part) for part in (sys.executable, *launcher, script, *arguments)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


@dataclass
class Workspace:
    """One run's files, and how to start it."""

    root: Path
    data: Path
    config: Path
    flags: list[str] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def arguments(self, *flags: str) -> list[str]:
        paths = ["--config", self.config, "--data_dir", self.data]
        paths += ["--checkpoint_dir", self.checkpoints, "--log_dir", self.logs]
        return [*map(str, paths), *self.flags, *flags]

    def launch(self, *flags: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """Run train.py: by itself for one rank, through torchrun for more."""
        return launch(TRAIN_PY, *self.arguments(*flags), torchrun=ranks if ranks > 1 else 0)

    def train(self, *flags: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
        """What ``launch`` does, in copies of a process that has imported everything."""
        return run(TRAIN_MAIN, self.arguments(*flags), ranks=ranks, timeout=TIMEOUT_SECONDS)

    def start_ranks(self, ranks: int, *flags: str, rank_1_flags: Sequence[str] = ()) -> Ranks:
        """Start the ranks without torchrun, which would end the others when one fails."""
        arguments = [self.arguments(*flags, *(rank_1_flags if rank == 1 else ())) for rank in range(ranks)]
        return Ranks(TRAIN_MAIN, arguments, self.root)

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.logs / "metrics.jsonl").read_text().splitlines()]

    def losses(self) -> list[tuple[float, float]]:
        """Loss and gradient norm of every step, in full precision."""
        return [(record["loss"], record["grad_norm"]) for record in self.metrics()]


def workspace_maker(directory: Path) -> Callable[..., Workspace]:
    """Write a corpus of 120 documents of ids below 61, and return ``make(name, *flags)``: a run of its own on it."""
    data = directory / "data.jsonl"
    with open(data, "w") as file:
        for document in range(120):
            tokens = [(document * 7 + position * 3) % 61 for position in range(5 + document * 11 % 60)]
            file.write(json.dumps({"tokens": tokens, "length": len(tokens)}) + "\n")
    config = directory / "tiny.yaml"
    config.write_text(CONFIG)

    def make(name: str, *flags: str) -> Workspace:
        root = directory / name
        root.mkdir()
        return Workspace(root, data, config, list(flags))

    return make


@pytest.fixture
def make_workspace(tmp_path: Path) -> Callable[..., Workspace]:
    """``workspace_maker`` in the test's own directory."""
    return workspace_maker(tmp_path)
