"""One optimizer step does not depend on how its batch is cut into micro-batches, ranks, padding and chunks (R58)."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks

from torchtitan_npu.config import Config, config_from_dict, validate_world
from torchtitan_npu.data import PackedLoader, open_dataset
from torchtitan_npu.fsdp import FSDP, StateDictType, materialize
from torchtitan_npu.models import build_model
from torchtitan_npu.ops import IGNORE_INDEX
from torchtitan_npu.train.loss import StepLoss, count_valid_labels
from torchtitan_npu.train.optimizer import build_optimizer
from torchtitan_npu.train.parallelize import parallelize

SEQUENCES, SEQ_LEN, VOCAB = 8, 16, 31
SHAPE = {"dim": 24, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 40, "vocab_size": VOCAB, "max_seq_len": 16}
Z_LOSS_WEIGHT = 1e-2


def write_data(path: Path) -> str:
    """Documents of 2 to 40 tokens: packed samples have boundaries, padded ones from 1 to 16 labels."""
    choose = random.Random(0)
    with open(path, "w") as file:
        for _ in range(40):
            tokens = [choose.randrange(VOCAB) for _ in range(choose.choice([2, 3, 9, 16, 17, 40]))]
            file.write(json.dumps({"tokens": tokens, "length": len(tokens)}) + "\n")
    return str(path)


def configuration(strategy: str, world_size: int, batch_size: int, pack: bool, chunk: int, tied: bool) -> Config:
    replicas = 2 if strategy == "hsdp" else 1
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", "tie_embeddings": tied, **SHAPE},
            "training": {
                "learning_rate": 1.0,
                "max_steps": 1,
                "batch_size": batch_size,
                "gradient_accumulation_steps": SEQUENCES // (batch_size * world_size),
                "optimizer": "sgd",
                "loss_chunk_tokens": chunk,
                "z_loss_weight": Z_LOSS_WEIGHT,
            },
            "parallel": {"dtype": "fp32", "strategy": strategy, "replicate_degree": replicas},
            "data": {"pack": pack},
        }
    )


def open_loader(cfg: Config, data: str, rank: int, size: int) -> PackedLoader:
    if dist.get_rank() == 0:
        open_dataset(data, VOCAB)
    dist.barrier()
    training = cfg.training
    return PackedLoader(
        open_dataset(data, VOCAB, build=False),
        batch_size=training.batch_size,
        seq_len=SEQ_LEN,
        dp_rank=rank,
        dp_size=size,
        pack=cfg.data.pack,
    )


def take_step(cfg: Config, data: str) -> tuple[dict[str, torch.Tensor], float]:
    """The whole parameters after one step (on rank 0; elsewhere nothing), and the loss, as the trainer computes them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    degrees = validate_world(cfg, size)
    loader = open_loader(cfg, data, rank, size)
    model = parallelize(cfg, torch.device("cpu"))
    optimizer = build_optimizer(model.module.named_parameters(), model.decayed, cfg)
    batches = [next(loader) for _ in range(cfg.training.gradient_accumulation_steps)]
    valid_labels = count_valid_labels(batches, degrees)
    step_loss = StepLoss(cfg, valid_labels=valid_labels, dp_degree=degrees.dp, loss_scale=1.0)
    total = torch.zeros(())
    for index, batch in enumerate(batches):
        with model.micro_batch(last=index == len(batches) - 1):
            scaled, loss = step_loss(model, batch.inputs, batch.labels, None)
            scaled.backward()
        total += loss
    optimizer.step()
    dist.all_reduce(total)
    if model.sharded:
        with FSDP.state_dict_type(model.module, StateDictType.FULL_STATE_DICT):
            return model.module.state_dict(), float(total) / valid_labels
    return model.module.state_dict(), float(total) / valid_labels


def reference_step(cfg: Config, data: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], float]:
    """Parameters before and after, and the loss: all sequences at once, in one process and in fp64, from the formula."""
    whole = configuration("fsdp", 1, SEQUENCES, cfg.data.pack, 0, cfg.model.tie_embeddings)
    batch = next(open_loader(whole, data, 0, 1))
    with torch.device("meta"):
        meta = build_model(cfg.model)
    model = materialize(meta, cfg.training.seed).double()
    before = copy.deepcopy(model.state_dict())
    logits = model(batch.inputs).flatten(0, 1)
    valid = batch.labels.flatten() != IGNORE_INDEX
    loss = F.cross_entropy(logits[valid], batch.labels.flatten()[valid])
    z_loss = torch.log(logits[valid].exp().sum(-1)).square().mean()
    (loss + Z_LOSS_WEIGHT * z_loss).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            decay = cfg.training.weight_decay if parameter.ndim >= 2 else 0.0
            parameter -= cfg.training.learning_rate * (parameter.grad + decay * parameter)
    return before, model.state_dict(), float(loss.detach())


def _compare(cfg: Config, data: str) -> None:
    after, loss = take_step(cfg, data)
    before, expected, expected_loss = reference_step(cfg, data)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    if dist.get_rank() > 0:
        return
    assert after.keys() == expected.keys()
    differences = {name: after[name].double() - tensor for name, tensor in expected.items()}
    assert all(difference.abs().max() < 1e-6 for difference in differences.values()), cfg.training
    # Not only because the step was small: a norm's weight of 1 moves by little more than its rounding.
    changes = [tensor - before[name] for name, tensor in expected.items()]
    size, error = (sum(float(t.square().sum()) for t in tensors) for tensors in (changes, differences.values()))
    assert size > 0.01 and error < 1e-10 * size, (size, error, cfg.training)


def _cuts(world_size: int) -> list[dict[str, Any]]:
    """Random cuts of the eight sequences, the same on every rank; every strategy, both kinds of data."""
    choose = random.Random(world_size)
    strategies = ["fsdp", "ddp"] + (["hsdp"] if world_size == 4 else [])
    return [
        {
            "strategy": strategy,
            "world_size": world_size,
            "batch_size": choose.choice([b for b in (1, 2, 4, 8) if b * world_size <= SEQUENCES]),
            "pack": pack,
            "chunk": choose.choice([0, 1, 5, 16, 1024]),
            "tied": choose.random() < 0.5,
        }
        for strategy in strategies
        for pack in (True, False)
        for _ in range(2)
    ]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return write_data(tmp_path / "data.jsonl")


@on_ranks(1, 2, 4, timeout=120)
def test_any_cut_takes_the_same_step(data: str) -> None:
    """Within 1e-6 of the step that fp64 takes with the whole batch at once."""
    for cut in _cuts(dist.get_world_size()):
        _compare(configuration(**cut), data)
