"""What is known about ``parallel.bucket_cap_mb`` before step 1: from a measurement, or else from the plan alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torchtitan_npu.config import Config, validate_world
from torchtitan_npu.planning.measured_caps import recall
from torchtitan_npu.planning.memory import format_bytes, plan_fsdp
from torchtitan_npu.planning.traffic import planned_traffic
from torchtitan_npu.planning.tune_report import cap_name

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import FSDPPlan

MIB = 1024**2
FAR = 1.05
"""Step time over the best one's, from which on a cap is far from it; noise of a quiet machine is some 2 %."""
DEFAULT_MB = 25.0
"""``bucket_cap_mb`` where the YAML says nothing."""
MANY = 200
SMALL_BYTES = MIB // 2
"""Collectives of a step, and their mean size, whose latency counts. ``benchmarks/bucket_cap.py --dim 256 --layers 16
--heads 4 --ffn 688 --vocab 1024 --seq 64 --batch 1 --caps 0.02,2,1000`` with two ranks on two shared cores, step times
over FSDP2's of the same rounds: 0.594 with 429 collectives of 0.34 MiB (cap 0.02, blocked for 96 ms a step), 0.549 with
98 of 1.5 MiB (cap 2, 55 ms). More ranks and networks add to a latency.
"""
MOST_SHARE = 0.5
"""Of what is gathered, in one unit. In the same run the cap of 1000 put all layers into one, so that nothing was
gathered ahead of use: 0.620, with an arena of 101 MiB instead of 13.
"""


def bucket_cap_hints(cfg: Config, world_size: int, device_type: str) -> list[str]:
    """At most one line, to be logged before step 1. Plans the model on the meta device where nothing was measured.

    Args:
        device_type: where ranks train, as torch calls it.
    """
    if cfg.parallel.strategy == "ddp" or validate_world(cfg, world_size).shard == 1:
        return []
    measured = recall(cfg, world_size, device_type)
    if measured is None:
        hint = _by_arithmetic(cfg, world_size)
        return [] if hint is None else [hint]
    slowdown = measured.slowdown(cfg.parallel.bucket_cap_mb)
    if slowdown is None or slowdown < FAR:
        return []
    return [
        f"{_setting(cfg.parallel.bucket_cap_mb)} is far from the best that torchtitan-npu tune measured here for this "
        f"model on {world_size} ranks ({measured.date}): a step takes about {slowdown:.2f} times as long as with "
        f"{_setting(measured.best)}"
    ]


def _by_arithmetic(cfg: Config, world_size: int) -> str | None:
    if cfg.parallel.bucket_cap_mb == DEFAULT_MB:
        return None
    plan = plan_fsdp(cfg, world_size)
    largest = max(plan.units, key=lambda unit: unit.gathered_bytes)
    whole = sum(unit.gathered_bytes for unit in plan.units)
    merged = largest.gathered_bytes > max(MOST_SHARE * whole, DEFAULT_MB * MIB) and len(plan.units) < cfg.model.n_layers
    sizes = _collectives(plan)
    scattered = len(sizes) >= MANY and sum(sizes) <= SMALL_BYTES * len(sizes)
    if not merged and not scattered:
        return None
    at_default = plan_fsdp(replace(cfg, parallel=replace(cfg.parallel, bucket_cap_mb=DEFAULT_MB)), world_size)
    setting, default = _setting(cfg.parallel.bucket_cap_mb), _setting(DEFAULT_MB)
    if merged:
        return (
            f"{setting} joins layers into a unit of {format_bytes(largest.gathered_bytes)}, "
            f"{largest.gathered_bytes / whole:.0%} of the model: little can be gathered while another unit computes, "
            f"and the arena takes {format_bytes(plan.arena_bytes)}, with {default} "
            f"{format_bytes(at_default.arena_bytes)}; torchtitan-npu tune measures the best"
        )
    fewer = len(_collectives(at_default))
    if 2 * fewer > len(sizes):
        return None  # the parameters themselves are as small
    return (
        f"{setting} makes {len(sizes)} collectives of {format_bytes(sum(sizes) // len(sizes))} on average per "
        f"micro-batch, whose latency counts, {default} {fewer}; torchtitan-npu tune measures the best"
    )


def _collectives(plan: FSDPPlan) -> list[int]:
    """Bytes of each one of a micro-batch."""
    traffic = planned_traffic(plan)
    return [*traffic.gathers, *traffic.reductions]


def _setting(cap_mb: float | None) -> str:
    return f"parallel.bucket_cap_mb={'null' if cap_mb is None else cap_name(cap_mb)}"
