"""What one optimizer step of a planned model sends, from the plan alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import FSDPPlan


@dataclass(frozen=True)
class Traffic:
    """The collectives of one optimizer step on each rank: bytes of the whole buffer (all ranks' shards), one entry per
    collective.
    """

    world_size: int
    gathers: tuple[int, ...]
    reductions: tuple[int, ...]

    @property
    def gathered_bytes(self) -> int:
        return sum(self.gathers)

    @property
    def reduced_bytes(self) -> int:
        return sum(self.reductions)

    @property
    def written_bytes(self) -> int:
        """What a rank writes for gathers: its shards. The engine counts the same (``counters.bytes_written``)."""
        return self.gathered_bytes // self.world_size

    @property
    def sent_bytes(self) -> int:
        """What a rank sends to others where each byte travels once: (N - 1) / N of every buffer."""
        return (self.gathered_bytes + self.reduced_bytes) // self.world_size * (self.world_size - 1)


def planned_traffic(plan: FSDPPlan, micro_batches: int = 1, *, reduce_each: bool = True) -> Traffic:
    """Of a step from the third on, in which every unit runs once per micro-batch, in the order of the plan.

    Each micro-batch gathers a unit for its forward and, where it was freed in between, again for its backward; the
    last unit of the forward stays, as its backward comes first. Gradients are reduced after every micro-batch
    (``reduce_each``) or once (``no_sync`` around all but the last).
    """
    from torchtitan_npu import _C
    from torchtitan_npu.fsdp.plan import itemsize

    arena = _C.Arena(plan.native, plan.schedule)
    gathers: list[int] = []
    reductions: list[int] = []
    last = len(plan.units) - 1
    for index, bucket in enumerate(plan.native.buckets):
        numel = plan.native.bucket_numel(index)
        uses = 2 if plan.units[bucket.unit].reshards and bucket.unit != last else 1
        gathers += [numel * itemsize(bucket.param_dtype)] * (uses * micro_batches)
        if bucket.requires_grad and bucket.param_dtype != _C.DType.bytes:
            rounds = micro_batches if reduce_each else 1
            reductions += [numel * itemsize(arena.wire_dtype(index))] * rounds
    return Traffic(plan.world_size, tuple(gathers), tuple(reductions))
