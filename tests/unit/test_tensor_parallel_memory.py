"""The memory that is planned for a tensor-parallel rank, against what torch's allocator is asked for there.

One process is one of several ranks of torch's fake process group, whose collectives give results without values: what
real ones allocate and free in threads of their own, no record of the allocator has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from allocations import peak_of_micro_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.models import build_model, parallelize_tensors
from torchtitan_npu.planning.memory import activation_bytes

SIZES = {"dim": 128, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 320, "vocab_size": 512}
WITHIN = 0.03
"""The CPU's matrix products take some ten kilobytes for themselves."""


def configuration(tp: int, *, dtype: str = "bf16", **sections: dict[str, Any]) -> Config:
    training = {"learning_rate": 1e-3, "max_steps": 1, "batch_size": 2, "seq_len": 256}
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", "max_seq_len": 256} | SIZES | sections.get("model", {}),
            "training": training | sections.get("training", {}),
            "parallel": {"dtype": dtype, "tp_degree": tp},
            "data": sections.get("data", {}),
        }
    )


@contextmanager
def rank_0_of(ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measured_peak(cfg: Config) -> int:
    tp = cfg.parallel.tp_degree
    with torch.device("meta"):
        model: nn.Module = build_model(cfg.model)
    with rank_0_of(tp):
        parallelize_tensors(model, init_device_mesh("cpu", (tp,)))
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[cfg.parallel.dtype]
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(torch.zeros_like(parameter, dtype=dtype, device="cpu")))
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        return peak_of_micro_batch(model, cfg)


def check(tp: int, **config: Any) -> None:
    cfg = configuration(tp, **config)
    assert activation_bytes(cfg) == pytest.approx(measured_peak(cfg), rel=WITHIN)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("mode", [False, True, "selective"])
def test_activations(dtype: str, flash: bool, mode: Any) -> None:
    """Four layers are extrapolated from three."""
    training = {"activation_checkpointing": mode, "loss_chunk_tokens": 64}
    check(2, dtype=dtype, model={"use_flash_attention": flash}, training=training)


@pytest.mark.parametrize(
    ("tp", "sections"),
    [
        (4, {"model": {"dim": 96, "n_heads": 4, "ffn_dim": 64}, "training": {"batch_size": 3, "seq_len": 72}}),
        (2, {"model": {"vocab_size": 4000, "n_layers": 1}, "training": {"batch_size": 1}}),
        (4, {"model": {"vocab_size": 4000, "tie_embeddings": True}, "training": {"z_loss_weight": 1e-4}}),
        (2, {"model": {"vocab_size": 4000, "use_flash_attention": True}, "training": {"loss_chunk_tokens": 0}}),
        (
            4,
            {
                "model": {"name": "qwen3_debug", "head_dim": 40, "n_layers": 6},
                "training": {"activation_checkpointing": "selective"},
            },
        ),
        (2, {"model": {"use_flash_attention": True}, "data": {"document_mask": True}}),
    ],
)
def test_activations_of_other_shapes(tp: int, sections: dict[str, dict[str, Any]]) -> None:
    check(tp, **sections)
