"""fp16 in the trainer: an overflow on one rank is a skipped step on all, under every strategy (R12)."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from torchtitan_npu.config import RunArgs, config_from_dict
from torchtitan_npu.launch import Environment
from torchtitan_npu.train.trainer import Trainer

OVERFLOWS = 3
"""The step at which the last rank's gradients overflow."""


def _train(strategy: str, folder: Path) -> Trainer:
    """Five steps; at one of them the last rank's loss is multiplied by too much before backward, not where it is logged."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "ffn_dim": 24, "vocab_size": 31, "max_seq_len": 16}
    cfg = config_from_dict(
        {
            "model": {"name": "llama3_debug", **shape},
            "training": {"learning_rate": 1e-2, "max_steps": 5, "lr_schedule": "constant"},
            "parallel": {"dtype": "fp16", "strategy": strategy, "replicate_degree": 2 if strategy == "hsdp" else 1},
        }
    )
    args = RunArgs(
        data_dir=str(folder / "data.jsonl"), checkpoint_dir=folder / strategy, log_dir=folder / f"{strategy}.log"
    )
    environment = Environment(rank=rank, local_rank=rank, world_size=size, local_world_size=size, from_torchrun=True)
    trainer = Trainer(cfg, args, environment, torch.device("cpu"))
    scale = trainer.scaler.scale

    def spoilt(loss: Any) -> Any:
        factor = 1e30 if rank == size - 1 and trainer.step + 1 == OVERFLOWS else 1.0
        return scale(loss) * factor

    trainer.scaler.scale = spoilt  # type: ignore[method-assign]
    assert trainer.train() == 0
    trainer.close()
    return trainer


@pytest.fixture
def folder(tmp_path: Path) -> str:
    documents = [[(i * 7 + j) % 31 for j in range(40)] for i in range(20)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in documents))
    return str(tmp_path)


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "hsdp"])
@on_ranks(2, 4)
def test_all_ranks_skip_the_step_of_one(strategy: str, folder: str) -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("torchtitan_npu.train.trainer")
    log.addHandler(handler)
    try:
        trainer = _train(strategy, Path(folder))
    finally:
        log.removeHandler(handler)
    said = [message for message in messages if "so no rank applied the update" in message]
    assert len(said) == 1 and said[0].startswith("step 3: the gradient overflowed at loss scale 65536"), messages
    mine = (trainer.scaler.skipped_steps, trainer.scaler.get_scale())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    assert everyone == [(1, 32768.0)] * dist.get_world_size()
    assert all(bool(p.isfinite().all()) for p in trainer.model.module.parameters())
    if dist.get_rank() == 0:
        lines = (Path(folder) / f"{strategy}.log" / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1]
        assert [record["grad_norm"] is None for record in records] == [False, False, True, False, False]
        assert [record["loss_scale"] for record in records] == [65536.0] * 2 + [32768.0] * 3
        assert all(math.isfinite(record["loss"]) for record in records)
