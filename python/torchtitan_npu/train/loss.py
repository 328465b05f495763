"""The loss of one optimizer step, independent of how its batch is cut into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torchtitan_npu.config import Degrees
from torchtitan_npu.data import Batch
from torchtitan_npu.launch import gather_rows
from torchtitan_npu.ops import IGNORE_INDEX, cross_entropy


def count_valid_labels(batches: Sequence[Batch], degrees: Degrees) -> int:
    """Labels that count, in the micro-batches of one optimizer step, over all data-parallel ranks. Collective."""
    mine = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    return int(sum(row[0] for row in degrees.once_per_dp_rank(gather_rows([mine]))))


def step_loss(logits_BTV: Tensor, labels_BT: Tensor, *, valid_labels: int, dp_degree: int) -> tuple[Tensor, Tensor]:
    """The loss of one micro-batch on one rank, scaled so that the step's gradient is that of the mean over its labels.

    Gradients are summed over micro-batches and *averaged* over ranks, so the sum of losses is multiplied by the number
    of ranks before it is divided by the valid labels of the whole step.

    Returns:
        ``(scaled, total)``, fp32 scalars: what to call ``backward`` on, and the detached sum of the losses in nats.
    """
    total = cross_entropy(logits_BTV, labels_BT)
    return total * (dp_degree / valid_labels), total.detach()
