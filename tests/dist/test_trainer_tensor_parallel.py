"""``parallel.tp_degree`` in the trainer, against one process that takes the same global batch.

Tensor parallelism changes the order of sums, so in float32 losses and gradient norms agree within 2e-6 of their size.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

from torchtitan_npu.checkpoint.tensor_source import TensorSource
from torchtitan_npu.config import Config, ConfigError, RunArgs, config_from_dict
from torchtitan_npu.fsdp import FSDP, StateDictType
from torchtitan_npu.launch import Environment
from torchtitan_npu.models import build_model, cut_for_planning, parallelize_tensors
from torchtitan_npu.models.llama3_tensor_parallel import weight_cuts
from torchtitan_npu.planning.memory import plan_fsdp
from torchtitan_npu.train import parallelize
from torchtitan_npu.train.parallelize import ShardedModel, refuse_device
from torchtitan_npu.train.trainer import Trainer

CPU = torch.device("cpu")
STEPS, SAVED_AT, SEQUENCES, LENGTH = 10, 5, 8, 32
SIZES = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 88, "vocab_size": 64}
ROUNDING = 2e-6


def configuration(*, micro_batches: int, tp: int = 1, steps: int = STEPS, **sections: dict[str, Any]) -> Config:
    """``micro_batches``: of 2 sequences, on each data-parallel rank."""
    training = {
        "batch_size": 2,
        "gradient_accumulation_steps": micro_batches,
        "learning_rate": 2e-3,
        "warmup_steps": 2,
        "lr_schedule": "constant",
        "max_steps": steps,
        "loss_chunk_tokens": 24,  # of the 64 of a micro-batch
        "z_loss_weight": 1e-3,
        "checkpoint": {"save_interval": SAVED_AT},
    }
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", "max_seq_len": LENGTH, **SIZES, **sections.get("model", {})},
            "training": training | sections.get("training", {}),
            "parallel": {"dtype": "fp32", "tp_degree": tp, **sections.get("parallel", {})},
            "data": sections.get("data", {}),
            "validation": sections.get("validation", {}),
        }
    )


def train(config: dict[str, Any], data: str, directory: str, loss_scale: float | None = None) -> dict[str, Any]:
    """One rank of a run of ``configuration(**config)``: what the metrics say on rank 0, and the weights at the end."""
    cfg = configuration(**config)
    rank, size = dist.get_rank(), dist.get_world_size()
    args = RunArgs(data_dir=data, checkpoint_dir=Path(directory, "checkpoints"), log_dir=Path(directory, "logs"))
    before = parallelize.INITIAL_LOSS_SCALE
    parallelize.INITIAL_LOSS_SCALE = loss_scale or before
    try:
        trainer = Trainer(cfg, args, Environment(rank, rank, size, size), CPU)
    finally:
        parallelize.INITIAL_LOSS_SCALE = before
    assert trainer.train() == 0
    trainer.close()
    model = trainer.model.module
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = {name: value.numpy() for name, value in model.state_dict().items()}
    records: list[dict[str, Any]] = []
    if rank == 0:
        assert trainer.metrics is not None
        records = [json.loads(line) for line in trainer.metrics.path.read_text().splitlines()]
    dist.barrier()  # no rank begins the next run in this directory while another is here
    return {
        "losses": [record["loss"] for record in records],
        "norms": [record["grad_norm"] for record in records],
        "records": records,
        "weights": weights,
        "random": torch.get_rng_state().tolist(),
        "resumed": trainer.loader.global_sample,
    }


class Runs:
    """Runs on one corpus, each in a directory of its own."""

    def __init__(self, pool: Any, directory: Path) -> None:
        self.pool, self.directory = pool, directory
        self.data = str(directory / "data.jsonl")
        with open(self.data, "w") as file:  # 120 documents of ids below 64, of 5 to 64 tokens
            for document in range(120):
                tokens = [(document * 7 + position * 3) % 64 for position in range(5 + document * 11 % 60)]
                file.write(json.dumps({"tokens": tokens}) + "\n")
        self._known: dict[str, dict[str, Any]] = {}

    def __call__(self, name: str, ranks: int, *, loss_scale: float | None = None, **config: Any) -> dict[str, Any]:
        """Rank 0's answer; ``config`` is that of ``configuration``, which trains on 8 sequences a step."""
        tp = config.get("tp", 1)
        config.setdefault("micro_batches", SEQUENCES * tp // (2 * ranks))
        path = self.path(name)
        path.mkdir(exist_ok=True)
        answers = self.pool.run(ranks, train, config=config, data=self.data, directory=str(path), loss_scale=loss_scale)
        for rank, answer in enumerate(answers):
            first = rank - rank % tp
            assert answer["random"] == answers[first]["random"], "random numbers are those of the data-parallel rank"
        return answers[0]

    def path(self, name: str) -> Path:
        return self.directory / name

    def one(self) -> dict[str, Any]:
        """Of one process, by the logits of all tokens: what others are compared with."""
        whole = {"loss_chunk_tokens": 0}
        return self._known.get("one") or self._known.setdefault("one", self("one", 1, training=whole))

    def two_by_two(self) -> dict[str, Any]:
        return self._known.get("2x2") or self._known.setdefault("2x2", self("2x2", 4, tp=2))

    def continued(self, name: str, begun: str, ranks: int, tp: int = 1) -> dict[str, Any]:
        """From the checkpoint of step ``SAVED_AT`` of the run ``begun``."""
        saved = f"checkpoints/step-{SAVED_AT:08d}"
        shutil.copytree(self.path(begun) / saved, self.path(name) / saved)
        rest = self(name, ranks, tp=tp)
        assert [record["step"] for record in rest["records"]] == list(range(SAVED_AT + 1, STEPS + 1))
        return rest


@pytest.fixture(scope="module")
def runs(rank_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(rank_pool, tmp_path_factory.mktemp("runs"))


def assert_same_curve(got: dict[str, Any], want: dict[str, Any]) -> None:
    """``got`` may have the last steps only."""
    steps = len(got["losses"])
    assert steps > 0
    assert got["losses"] == pytest.approx(want["losses"][-steps:], rel=ROUNDING)
    assert got["norms"] == pytest.approx(want["norms"][-steps:], rel=ROUNDING)


def test_the_curve_of_one_process(runs: Runs) -> None:
    """dp x tp = 1 x 2, 2 x 2 and, with replicas, 2 x 1 x 2; the loss falls by more than 0.3 on the way."""
    one = runs.one()
    assert one["losses"][-1] < one["losses"][0] - 0.3
    hybrid = {"strategy": "hsdp", "replicate_degree": 2}
    for got in (runs("1x2", 2, tp=2), runs.two_by_two(), runs("2x1x2", 4, tp=2, parallel=hybrid)):
        assert_same_curve(got, one)
        # 8 sequences a step, once per data-parallel rank.
        assert got["records"][-1]["tokens"] == one["records"][-1]["tokens"] == STEPS * SEQUENCES * LENGTH


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_variants_of_model_and_data(runs: Runs, recompute: Any) -> None:
    """Llama and Qwen3, tied embeddings, flash attention inside documents, padding, activation checkpointing, small
    buckets; and the loss on held-out data."""
    sections: dict[str, Any] = {
        "model": {
            "name": "llama3_debug" if recompute is True else "qwen3_debug",
            "tie_embeddings": True,
            "use_flash_attention": recompute is True,
        },
        "training": {"activation_checkpointing": recompute, "deterministic": True},
        "data": {"document_mask": True, "pack": False},
        "validation": {"data_dir": runs.data, "interval": 2, "max_samples": 23},
    }
    one = runs(f"one_{recompute}", 1, steps=4, **sections)
    four = runs(f"four_{recompute}", 4, tp=2, steps=4, parallel={"bucket_cap_mb": 0.01}, **sections)
    assert_same_curve(four, one)
    held_out = [record["validation_loss"] for record in one["records"] if record["validation_loss"] is not None]
    assert len(held_out) == 2
    got = [record["validation_loss"] for record in four["records"] if record["validation_loss"] is not None]
    assert got == pytest.approx(held_out, rel=ROUNDING)


def test_half_precision(runs: Runs) -> None:
    """Near two ranks without tensor parallelism. fp16 from a loss scale of 2^21: all skip the same steps."""
    for dtype, loss_scale in (("bf16", None), ("fp16", 2.0**21)):
        two, four = (
            runs(f"{dtype}_{n}", n, tp=tp, steps=5, loss_scale=loss_scale, parallel={"dtype": dtype})
            for n, tp in ((2, 1), (4, 2))
        )
        assert four["losses"] == pytest.approx(two["losses"], rel=1e-3)
        skipped = [[record["skipped_steps"] for record in run["records"]] for run in (two, four)]
        assert skipped[0] == skipped[1]
        if dtype == "bf16":
            assert four["norms"] == pytest.approx(two["norms"], rel=1e-2)
        else:
            assert 0 < skipped[0][-1] < 4, "the test must see both kinds of steps"


def test_checkpoints_continue_at_any_degrees(runs: Runs) -> None:
    """From ``SAVED_AT`` at 2 x 2: there bit for bit; at 4 x 1 and on one process within rounding. From 4 x 1 at 2 x 2, where
    two ranks must not take the different random states of the two that were (``Runs`` looks at them)."""
    whole = runs.two_by_two()
    same = runs.continued("2x2_2x2", "2x2", 4, tp=2)
    assert (same["losses"], same["norms"]) == (whole["losses"][SAVED_AT:], whole["norms"][SAVED_AT:])
    assert all((value == whole["weights"][name]).all() for name, value in same["weights"].items())
    assert_same_curve(runs.continued("2x2_4x1", "2x2", 4), whole)
    assert_same_curve(runs.continued("2x2_1x1", "2x2", 1), whole)
    runs("4x1", 4, steps=SAVED_AT)
    assert_same_curve(runs.continued("4x1_2x2", "4x1", 4, tp=2), whole)


def test_merge_reads_whole_tensors(runs: Runs) -> None:
    weights = runs.two_by_two()["weights"]
    source = TensorSource(runs.path("2x2") / "checkpoints")
    assert source.entries.keys() == weights.keys()
    for name, value in weights.items():
        assert (source.read(name).numpy() == value).all(), name


def first_values(config: dict[str, Any]) -> dict[str, Any]:
    model = ShardedModel(build_on_meta(configuration(**config)), configuration(**config), CPU).module
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.numpy() for name, value in model.state_dict().items()}


def build_on_meta(cfg: Config) -> Any:
    with torch.device("meta"):
        return build_model(cfg.model)


@pytest.mark.parametrize("tied", [False, True])
def test_first_values_are_those_of_one_process(rank_pool: Any, tied: bool) -> None:
    config: dict[str, Any] = {"micro_batches": 1, "model": {"tie_embeddings": tied}}
    one = rank_pool.run(1, first_values, config=config)[0]
    for ranks in (2, 4):
        got = rank_pool.run(ranks, first_values, config=config | {"tp": 2})[0]
        assert got.keys() == one.keys() and all((got[name] == one[name]).all() for name in one)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_the_plan_is_the_models(tied: bool) -> None:
    """What the dry run plans from shapes alone, and what FSDP does with DTensors, are the same to the last byte."""
    cfg = configuration(micro_batches=1, tp=2, model={"tie_embeddings": tied}, parallel={"bucket_cap_mb": 0.01})
    planned = plan_fsdp(cfg, 4)
    model = ShardedModel(build_on_meta(cfg), cfg, CPU)
    actual = model.module._fsdp_state.plan  # type: ignore[union-attr]
    assert planned.native.hash() == actual.native.hash()
    assert (planned.parameter_bytes, planned.arena_bytes) == (actual.parameter_bytes, actual.arena_bytes)
    assert model.num_parameters == sum(p.numel() for p in build_on_meta(cfg).parameters())


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(2)
def test_cuts_are_the_placements(tied: bool) -> None:
    cfg = configuration(micro_batches=1, tp=2, model={"tie_embeddings": tied})
    parallel, planned = build_on_meta(cfg), cut_for_planning(build_on_meta(cfg), 2)
    parallelize_tensors(parallel, dist.init_device_mesh("cpu", (2,)))
    shapes = {name: parameter.shape for name, parameter in planned.named_parameters()}
    for name, parameter in parallel.named_parameters():
        (placement,) = parameter.placements
        assert weight_cuts(planned)[name] == (placement.dim if placement.is_shard() else None)
        assert parameter.to_local().shape == shapes[name]


def test_devices_are_refused_early() -> None:
    """``parallel.device: auto`` may find a device that the file does not name."""
    with pytest.raises(ConfigError, match=r"parallel\.tp_degree: 2 is not supported yet on CUDAs; set it to 1"):
        refuse_device(configuration(micro_batches=1, tp=2), torch.device("cuda", 0))
    refuse_device(configuration(micro_batches=1), torch.device("cuda", 0))


def test_an_unknown_parameter_is_refused() -> None:
    model = build_on_meta(configuration(micro_batches=1))
    model.layers[0].attention.extra = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(ValueError, match="with a Llama, whose parameter 'layers.0.attention.extra.weight'"):
        cut_for_planning(model, 2)
