"""``log_dir/plan.json``: what a run is and what it was expected to need, for programs (``torchtitan-npu report``)."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from torchtitan_npu.checkpoint.state import library_versions
from torchtitan_npu.config import Config, to_dict, validate_world
from torchtitan_npu.launch import Environment, LaunchError
from torchtitan_npu.planning import MemoryEstimate
from torchtitan_npu.planning.memory import plan_fsdp
from torchtitan_npu.train.utilization import Utilization

PLAN_FILE = "plan.json"
FORMAT = 1
"""Of the file; raised when the meaning of a key changes."""


def write_plan(
    log_dir: Path,
    cfg: Config,
    env: Environment,
    device_name: str,
    *,
    num_parameters: int,
    memory: MemoryEstimate,
    capacity_bytes: int,
    utilization: Utilization,
) -> None:
    """Write the file, on one rank; a run that is resumed replaces it.

    Raises:
        LaunchError: ``log_dir`` cannot be written.
    """
    training = cfg.training
    degrees = validate_world(cfg, env.world_size)
    sequences = training.batch_size * degrees.dp * training.gradient_accumulation_steps
    content = {
        "format": FORMAT,
        "versions": library_versions(),
        "device": device_name,
        "world_size": env.world_size,
        "degrees": asdict(degrees),
        "model": {"name": cfg.model.name, "num_parameters": num_parameters, **_sharding(cfg, env.world_size)},
        "tokens_per_step": sequences * training.seq_len,
        "total_tokens": sequences * training.seq_len * training.max_steps,
        "flops_per_token": utilization.flops_per_token,
        "peak_flops": utilization.peak_flops,
        "memory_bytes": {**asdict(memory), "total": memory.total, "capacity": capacity_bytes},
        "configuration": to_dict(cfg),
        "torch_threads": torch.get_num_threads(),
    }
    path = log_dir / PLAN_FILE
    temporary = path.with_name(path.name + ".tmp")
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise LaunchError(f"--log_dir {log_dir} cannot be written: {error}; name another directory") from error


def _sharding(cfg: Config, world_size: int) -> dict[str, Any]:
    if cfg.parallel.strategy == "ddp":
        return {}
    plan = plan_fsdp(cfg, world_size)
    return {
        "units": len(plan.units),
        "buckets": plan.num_buckets,
        "padding_fraction": plan.padding_fraction,
        "gather_bytes": plan.gather_bytes,
        "reduce_bytes": plan.reduce_bytes,
    }
