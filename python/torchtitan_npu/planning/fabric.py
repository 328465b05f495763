"""Latency and bandwidth of what connects the ranks, measured through the engine, and what they predict.

One collective of ``n`` bytes (all ranks' shards) among N ranks is modelled as N - 1 messages of one shard each:

    t(n, N) = (N - 1) * (alpha + n / (N * bandwidth))

which is what a ring takes, and any algorithm in which a rank receives each of the others' shards once.
``docs/tuning.md`` says how far that carries.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.launch import gather_rows
from torchtitan_npu.planning.traffic import Traffic

SMALLEST_BYTES = 64 << 10
BURST = 4
"""Steps in a row per turn. The first is not counted: in it the ranks wait for the one that starts last."""


@dataclass(frozen=True)
class Line:
    """The fit of one kind of collective."""

    alpha_seconds: float
    """Latency of a message."""
    bytes_per_second: float
    """Bandwidth of a message; infinite where time does not grow with size."""
    world_size: int
    """Ranks it was measured among."""
    sizes: tuple[int, ...]
    """Bytes of the whole buffer."""
    seconds: tuple[float, ...]
    """Measured, one per size."""

    def predict(self, size: int, world_size: int) -> float:
        """Seconds of one collective of ``size`` bytes among ``world_size`` ranks."""
        return (world_size - 1) * (self.alpha_seconds + size / (world_size * self.bytes_per_second))

    @property
    def residuals(self) -> tuple[float, ...]:
        """(measured - fitted) / measured, one per size."""
        pairs = zip(self.sizes, self.seconds, strict=True)
        return tuple((seconds - self.predict(size, self.world_size)) / seconds for size, seconds in pairs)

    @property
    def rms_residual(self) -> float:
        return statistics.fmean(r * r for r in self.residuals) ** 0.5


@dataclass(frozen=True)
class Fabric:
    """How long gathers and reductions take, as the engine does them: with casts, copies and sums."""

    gather: Line
    reduce: Line

    def seconds(self, traffic: Traffic) -> float:
        """All collectives of a step, one after the other."""
        n = traffic.world_size
        gathers = sum(self.gather.predict(size, n) for size in traffic.gathers)
        return gathers + sum(self.reduce.predict(size, n) for size in traffic.reductions)


def fit_line(sizes: Sequence[int], seconds: Sequence[float], world_size: int) -> Line:
    """Least squares of the *relative* error, so that small sizes count as much as large ones; alpha >= 0.

    Raises:
        ValueError: fewer than two different sizes, or one rank, among which nothing travels.
    """
    if world_size < 2:
        raise ValueError("one rank sends nothing: there is no fabric to fit")
    if len(set(sizes)) < 2:
        raise ValueError(f"a line needs two sizes at least, got {sorted(set(sizes))}")
    # minimise sum ((a * x1 + s * x2 - t) / t)^2, x1 = N - 1, x2 = (N - 1) n / N, s = 1 / bandwidth
    first = [(world_size - 1) / t for t in seconds]
    second = [(world_size - 1) * size / world_size / t for size, t in zip(sizes, seconds, strict=True)]
    aa, ab, bb = (sum(x * y for x, y in zip(u, v, strict=True)) for u, v in _pairs(first, second))
    a, b = sum(first), sum(second)
    determinant = aa * bb - ab * ab
    alpha = (a * bb - b * ab) / determinant
    slope = (b * aa - a * ab) / determinant
    if alpha < 0:
        alpha, slope = 0.0, b / bb
    elif slope <= 0:
        alpha, slope = a / aa, 0.0
    bandwidth = 1 / slope if slope > 0 else float("inf")
    return Line(alpha, bandwidth, world_size, tuple(sizes), tuple(seconds))


def _pairs(u: list[float], v: list[float]) -> tuple[tuple[list[float], list[float]], ...]:
    return (u, u), (u, v), (v, v)


def probe_sizes(largest_bytes: int, count: int = 7) -> list[int]:
    """``count`` sizes in geometric steps from 64 KiB to ``largest_bytes`` (at least four times that), whole KiB."""
    largest = max(largest_bytes, 4 * SMALLEST_BYTES)
    ratio = (largest / SMALLEST_BYTES) ** (1 / (count - 1))
    return [round(SMALLEST_BYTES * ratio**i) >> 10 << 10 for i in range(count)]


def measure_fabric(sizes: Sequence[int], turns: int = 8, **fsdp_options: Any) -> Fabric:
    """Times gathers and reductions of ``sizes`` (bytes of the whole buffer in ``param_dtype``) and fits them.

    Each size is a model of one parameter under ``FSDP``: its forward does nothing but gather, its backward nothing but
    copy a gradient that is there already into the reduce buffer and reduce. Sizes take turns. Collective.
    """
    gathers, reductions, world_size = _take_turns(sizes, turns, fsdp_options)
    gc.collect()  # the probes' arenas are unmapped here, not at some later time
    return Fabric(fit_line(*gathers, world_size), fit_line(*reductions, world_size))


_Points = tuple[list[int], list[float]]  # bytes, seconds


def _take_turns(sizes: Sequence[int], turns: int, options: dict[str, Any]) -> tuple[_Points, _Points, int]:
    probes = [_Probe(size, options) for size in sizes]
    for _ in range(turns):
        for probe in probes:
            probe.take_turn()
    return (
        ([probe.gather_bytes for probe in probes], [statistics.median(probe.gathers) for probe in probes]),
        ([probe.reduce_bytes for probe in probes], [statistics.median(probe.reductions) for probe in probes]),
        probes[0].world_size,
    )


class _HandOver(torch.autograd.Function):
    """A scalar whose backward hands out a gradient that exists already."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        return ctx.gradient, None


class _OneParameter(nn.Module):
    """``rows x 256`` elements."""

    COLUMNS = 256

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, self.COLUMNS))
        self.gradient: tuple[Tensor] = (torch.zeros(rows, self.COLUMNS, dtype=dtype),)

    def forward(self) -> Tensor:
        return _HandOver.apply(self.weight, *self.gradient)


class _Probe:
    """One size."""

    def __init__(self, size: int, options: dict[str, Any]) -> None:
        from torchtitan_npu.fsdp import FSDP
        from torchtitan_npu.planning.traffic import planned_traffic

        policy = options.get("mixed_precision")
        dtype = (policy.param_dtype if policy is not None else None) or torch.float32
        fsdp: Callable[..., Any] = FSDP
        row_bytes = _OneParameter.COLUMNS * dtype.itemsize
        self.model = fsdp(_OneParameter(max(1, size // row_bytes), dtype), **{**options, "bucket_cap_mb": None})
        traffic = planned_traffic(self.model._fsdp_state.plan)
        self.world_size = traffic.world_size
        (self.gather_bytes,), (self.reduce_bytes,) = traffic.gathers, traffic.reductions
        self.gathers: list[float] = []
        self.reductions: list[float] = []

    def take_turn(self) -> None:
        """A burst of gathers and reductions; appends their seconds, means over ranks. Collective."""
        row: list[float] = []
        for _ in range(BURST):
            self.model.zero_grad()
            start = time.perf_counter()
            output = self.model()
            gathered = time.perf_counter()
            output.backward()
            row += [gathered - start, time.perf_counter() - gathered]
        means = [statistics.fmean(column) for column in zip(*gather_rows(row), strict=True)]
        self.gathers += means[2::2]
        self.reductions += means[3::2]
