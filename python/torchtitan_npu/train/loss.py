"""The loss of one optimizer step, independent of how its batch is cut into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from torchtitan_npu.config import Config, Degrees
from torchtitan_npu.data import Batch
from torchtitan_npu.launch import gather_rows
from torchtitan_npu.ops import IGNORE_INDEX, Documents, cross_entropy, linear_cross_entropy, z_loss
from torchtitan_npu.train.parallelize import ParallelModel


def count_valid_labels(batches: Sequence[Batch], degrees: Degrees) -> int:
    """Labels that count, in the micro-batches of one optimizer step, over all data-parallel ranks. Collective."""
    mine = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in batches)
    return int(sum(row[0] for row in degrees.once_per_dp_rank(gather_rows([mine]))))


class StepLoss:
    """The loss of the micro-batches of one optimizer step, scaled so that the step's gradient is that of the mean over
    its valid labels.

    Gradients are summed over micro-batches and *averaged* over ranks, so the sum of losses is multiplied by the number
    of ranks before it is divided by the valid labels of the whole step.
    """

    def __init__(self, cfg: Config, *, valid_labels: int, dp_degree: int, loss_scale: float) -> None:
        """``loss_scale``: what a ``GradScaler`` multiplies the loss by; 1 where there is none."""
        self._z_loss_weight = cfg.training.z_loss_weight
        self._chunk_tokens = cfg.loss_chunk_tokens
        self._factor = dp_degree / valid_labels
        self._loss_scale = loss_scale

    def __call__(
        self, model: ParallelModel, tokens_BT: Tensor, labels_BT: Tensor, documents: Documents | None
    ) -> tuple[Tensor, Tensor]:
        """Forward of one micro-batch on one rank.

        Returns:
            ``(scaled, total)``, fp32 scalars: what to call ``backward`` on (before a gradient scaler's factor), and
            the detached sum of the cross-entropies in nats, without the z-loss.
        """
        if self._chunk_tokens:
            head = partial(
                linear_cross_entropy,
                labels=labels_BT,
                chunk_tokens=self._chunk_tokens,
                z_loss_weight=self._z_loss_weight,
                gradient_scale=self._factor * self._loss_scale,
            )
            objective, total = model.forward(tokens_BT, documents, head)
            return objective * self._factor, total
        logits_BTV = model.forward(tokens_BT, documents)
        total = objective = cross_entropy(logits_BTV, labels_BT)
        if self._z_loss_weight:
            objective = total + self._z_loss_weight * z_loss(logits_BTV, labels_BT)
        return objective * self._factor, total.detach()
