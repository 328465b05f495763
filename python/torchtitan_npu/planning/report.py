"""What ``--dry_run`` prints."""

from __future__ import annotations

import torch

from torchtitan_npu.config import Config, match_parameter_groups, validate_world
from torchtitan_npu.models import build_model
from torchtitan_npu.planning.bucket_hints import bucket_cap_hints
from torchtitan_npu.planning.memory import estimate_memory, format_bytes, memory_kinds, plan_fsdp

_COLUMNS = "{:<24} {:>16} {:>9}"


def dry_run(cfg: Config, world_size: int) -> str:
    """The plan of a run of ``cfg`` on ``world_size`` ranks: units, buckets, parameters, bytes per rank by kind.

    Builds the model on the meta device: nothing of its size is allocated.

    Raises:
        ConfigError: the degrees do not multiply to ``world_size``; an item of ``training.parameter_groups`` has no
            parameters.
    """
    degrees = validate_world(cfg, world_size)
    if cfg.training.parameter_groups:
        with torch.device("meta"):
            match_parameter_groups(cfg, [name for name, _ in build_model(cfg.model).named_parameters()])
    training = cfg.training
    sequences = training.batch_size * degrees.dp * training.gradient_accumulation_steps
    tokens = sequences * training.seq_len
    on_npu = cfg.parallel.device == "npu"
    lines = [
        f"model {cfg.model.name}, {cfg.parallel.dtype}, strategy {cfg.parallel.strategy}, world size {world_size}"
        + (f" = {degrees.dp} data-parallel x {degrees.tp} tensor-parallel ranks" if degrees.tp > 1 else ""),
        f"global batch: {sequences} sequences = {tokens:,} tokens per step; {training.max_steps:,} steps, "
        f"{tokens * training.max_steps:,} tokens",
        "",
        *(_replicated(cfg) if cfg.parallel.strategy == "ddp" else _sharded(cfg, world_size)),
        "",
        *_memory(cfg, world_size),
        *(f"\nhint: {hint}" for hint in bucket_cap_hints(cfg, world_size, "npu" if on_npu else "cpu")),
    ]
    return "\n".join(lines)


def _sharded(cfg: Config, world_size: int) -> list[str]:
    plan, tp = plan_fsdp(cfg, world_size), cfg.parallel.tp_degree
    cap = "no cap" if plan.bucket_cap_mb is None else f"at most {plan.bucket_cap_mb:g} MiB or one parameter each"
    rows = [_COLUMNS.format("unit", "parameters", "buckets")]
    # Equal neighbours are one line: 80 equal blocks tell no more than one.
    start = 0
    units = plan.units
    for i in range(1, len(units) + 1):
        if i == len(units) or (units[i].numel, units[i].buckets) != (units[start].numel, units[start].buckets):
            count = i - start
            first = units[start].name or "(root)"
            name = first if count == 1 else f"{first} … {units[i - 1].name} ({count})"
            each = " each" if count > 1 else ""
            rows.append(_COLUMNS.format(name, f"{units[start].numel:,}", units[start].buckets) + each)
            start = i
    copies = f"; {plan.replicas} replicas of {plan.world_size} ranks" if plan.replicas > 1 else ""
    whole = [f"{_num_parameters(cfg):,} parameters; each of {tp} tensor-parallel ranks has of them:"] if tp > 1 else []
    return [
        *whole,
        f"{plan.num_parameters:,} parameters in {len(units)} units and {plan.num_buckets} buckets ({cap}), "
        f"padding {100 * plan.padding_fraction:.3f} %{copies}",
        *rows,
    ]


def _replicated(cfg: Config) -> list[str]:
    return [f"{_num_parameters(cfg):,} parameters, whole on every rank"]


def _num_parameters(cfg: Config) -> int:
    with torch.device("meta"):
        model = build_model(cfg.model)
    return sum(parameter.numel() for parameter in model.parameters())


def _memory(cfg: Config, world_size: int) -> list[str]:
    memory = estimate_memory(cfg, world_size)
    arena = {"arena": memory.buffers}
    if cfg.parallel.strategy != "ddp":
        plan = plan_fsdp(cfg, world_size)
        arena |= {"  of it gathered": plan.gather_bytes, "  of it reduce": plan.reduce_bytes}
        if plan.replicas > 1:
            arena["  of it between replicas"] = plan.staging_bytes
    kinds = {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        **arena,
        **{kind: size for kind, size in memory_kinds(cfg, memory).items() if kind in ("activations", "logits")},
        "total": memory.total,
    }
    return [
        "bytes per rank (on the rank that holds most)",
        *(f"{kind:<24} {size:>20,} {format_bytes(size):>12}" for kind, size in kinds.items()),
    ]
