"""Step times of several variants of a model, in turns, so that a noisy machine disturbs all alike."""

from __future__ import annotations

import gc
import logging
import random
import statistics
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from torchtitan_npu.launch import gather_rows
from torchtitan_npu.planning.process_memory import peak_resident_bytes, reset_peak

logger = logging.getLogger(__name__)

WARMUP_STEPS = 2
"""The order of units is known, and gathers go ahead, from the second step on."""
MOST_ROUNDS = 5


class Trial(Protocol):
    """A model with its optimizer and data, ready to train."""

    model: nn.Module

    def step(self) -> None:
        """One whole optimizer step. Collective."""
        ...


@dataclass
class Measured:
    """What one variant took. Seconds are means over ranks; the outer lists have one entry per round."""

    steps: list[list[float]] = field(default_factory=list)
    """Whole steps."""
    waits: list[list[float]] = field(default_factory=list)
    """Of each step, the time blocked on other ranks (exposed communication); empty lists where it is not counted."""
    peak_resident_bytes: int = 0
    """Largest of any rank while this variant lived, the program and shared pages included; 0: not measured."""
    written_bytes: int = 0
    """What this rank wrote for gathers, per step; 0 where it is not counted."""

    @property
    def step_seconds(self) -> float:
        return statistics.median(s for turn in self.steps for s in turn)

    @property
    def step_quartiles(self) -> tuple[float, float]:
        """First and third."""
        return quartiles([s for turn in self.steps for s in turn])

    @property
    def exposed_seconds(self) -> float | None:
        """Median over steps."""
        waits = [s for turn in self.waits for s in turn]
        return statistics.median(waits) if waits else None

    def ratios_to(self, other: Measured) -> list[float]:
        """This variant's median over the other's, round by round."""
        return [
            statistics.median(mine) / statistics.median(its) for mine, its in zip(self.steps, other.steps, strict=True)
        ]


def quartiles(values: list[float]) -> tuple[float, float]:
    """First and third; of a single value, twice itself."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def measure_in_turns(
    variants: Mapping[str, Callable[[], Trial]], steps: int, seed: int = 0, said: Callable[[str], None] = logger.info
) -> dict[str, Measured]:
    """``steps`` timed steps of every variant, spread over up to 5 rounds in which all take a turn, in random order.

    A turn builds the variant, warms it up, times it, and drops it: never are two alive at once. Collective; all ranks
    pass the same names in the same order.

    Raises:
        RuntimeError: something kept a variant's model alive, so that its memory would have counted as the next one's.
    """
    rounds = min(MOST_ROUNDS, steps)
    order = random.Random(seed)
    results = {name: Measured() for name in variants}
    for number in range(rounds):
        count = steps // rounds + (number < steps % rounds)
        said(f"round {number + 1} of {rounds}: {count} timed step(s) of each of {len(variants)} variants")
        for name in order.sample(list(variants), len(variants)):
            _take_turn(name, variants[name], count, results[name])
    return results


def _take_turn(name: str, make: Callable[[], Trial], count: int, result: Measured) -> None:
    measured_peak = reset_peak()
    trial = make()
    for _ in range(WARMUP_STEPS):
        trial.step()
    row: list[float] = []
    written = -_counter(trial.model, "bytes_written")
    for _ in range(count):
        waited = _counter(trial.model, "wait_seconds")
        start = time.perf_counter()
        trial.step()
        row += [time.perf_counter() - start, _counter(trial.model, "wait_seconds") - waited]
    written += _counter(trial.model, "bytes_written")
    counted = _engine(trial.model) is not None
    model = weakref.ref(trial.model)
    del trial
    gc.collect()
    if model() is not None:
        raise RuntimeError(f"the model of '{name}' is still referenced after its turn; its memory cannot be freed")
    rows = gather_rows([*row, float(peak_resident_bytes()) if measured_peak else 0.0])
    means = [statistics.mean(column) for column in zip(*rows, strict=True)]
    result.steps.append(means[0:-1:2])
    result.waits.append(means[1:-1:2] if counted else [])
    result.peak_resident_bytes = max(result.peak_resident_bytes, *(int(other[-1]) for other in rows))
    result.written_bytes = round(written / count)


def _engine(model: nn.Module) -> Any:
    state = model.__dict__.get("_fsdp_state")
    return None if state is None else state.engine


def _counter(model: nn.Module, name: str) -> float:
    """Of our engine; 0 for a model without one."""
    engine = _engine(model)
    return 0.0 if engine is None else float(getattr(engine.counters, name))
