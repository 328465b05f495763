"""What the planned memory says about the settings: too much for the device, or room for larger micro-batches."""

from __future__ import annotations

from torchtitan_npu.config import Config
from torchtitan_npu.planning.knobs import changed, cheapest_knobs
from torchtitan_npu.planning.memory import MemoryEstimate, estimate_memory, format_bytes

_ROOM = 0.8
"""Of the capacity: what a hint may fill. The rest is for the program itself and what the plan does not know."""


def memory_hints(cfg: Config, world_size: int, memory: MemoryEstimate, capacity_bytes: int) -> list[str]:
    """One line each, to be logged before step 1.

    Args:
        memory: planned for ``cfg``.
        capacity_bytes: what there is for each rank.
    """
    if memory.total > capacity_bytes:
        knobs = "; ".join(knob.describe() for knob in cheapest_knobs(cfg, world_size))
        return [
            f"the planned memory, {format_bytes(memory.total)}, is more than the {format_bytes(capacity_bytes)} there "
            f"are per rank. {f'These need less: {knobs}' if knobs else 'Use more ranks, or a smaller model'}"
        ]
    larger = _larger_micro_batches(cfg, world_size, capacity_bytes)
    return [] if larger is None else [larger]


def _larger_micro_batches(cfg: Config, world_size: int, capacity_bytes: int) -> str | None:
    """The most that makes the same update; the articles' "larger micro-batches beat more accumulation"."""
    training = cfg.training
    best = None
    factor = 2
    while training.gradient_accumulation_steps % factor == 0:
        settings = {
            "training.batch_size": factor * training.batch_size,
            "training.gradient_accumulation_steps": training.gradient_accumulation_steps // factor,
        }
        candidate = changed(cfg, settings)
        total = None if candidate is None else estimate_memory(candidate, world_size).total
        if total is None or total > _ROOM * capacity_bytes:
            break
        best = (settings, total)
        factor *= 2
    if best is None:
        return None
    settings, total = best
    listed = " with ".join(f"{key}={value}" for key, value in settings.items())
    return (
        f"{listed} makes the same update in larger micro-batches, which are faster as a rule, and needs about "
        f"{format_bytes(total)} of the {format_bytes(capacity_bytes)} there are per rank"
    )
