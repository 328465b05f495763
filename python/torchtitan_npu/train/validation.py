"""The loss on held-out data, at an interval."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch

from torchtitan_npu.config import Config, Degrees
from torchtitan_npu.data import IGNORE_INDEX, PackedLoader
from torchtitan_npu.launch import gather_rows
from torchtitan_npu.ops import Documents
from torchtitan_npu.train.loss import StepLoss
from torchtitan_npu.train.parallelize import ParallelModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ValidationResult:
    loss: float
    """Mean over all valid labels of the held-out samples, in nats."""
    labels: int
    seconds: float

    def describe(self, step: int) -> str:
        """One line for the log."""
        perplexity = f"{math.exp(self.loss):.4g}" if self.loss < 100 else "inf"
        return (
            f"validation after step {step}: loss={self.loss:.4f}, perplexity={perplexity}, over {self.labels:,} labels "
            f"in {self.seconds:.1f} s"
        )


class Validation:
    """Reads the same samples every time, each once: the result does not depend on how ranks and batches cut them."""

    def __init__(
        self, cfg: Config, loader: PackedLoader, model: ParallelModel, degrees: Degrees, device: torch.device
    ) -> None:
        """``loader``: of the held-out data, in the order of the file; its position is not used."""
        self._interval = cfg.validation.interval
        self._masked = cfg.data.document_mask
        self._loss = StepLoss(cfg, valid_labels=1, dp_degree=1, loss_scale=1.0)  # of which only the plain sum is used
        self._loader, self._model, self._degrees, self._device = loader, model, degrees, device
        self._num_samples = loader.samples_per_epoch
        if cfg.validation.max_samples is not None:
            self._num_samples = min(self._num_samples, cfg.validation.max_samples)

    def is_due(self, step: int, *, final: bool) -> bool:
        return final or step % self._interval == 0

    def run(self) -> ValidationResult:
        """Collective. The model is left in training mode, its gradients as they were."""
        start = time.monotonic()
        module = self._model.module
        module.eval()
        try:
            with torch.no_grad():
                loss, labels = self._sum()
        finally:
            module.train()
        rows = self._degrees.once_per_dp_rank(gather_rows([loss, labels]))
        total = int(sum(row[1] for row in rows))
        mean = sum(row[0] for row in rows) / total if total else math.nan
        return ValidationResult(mean, total, time.monotonic() - start)

    def _sum(self) -> tuple[float, int]:
        """This rank's sum of losses, and number of labels."""
        loader, losses, labels = self._loader, [], 0
        for position in range(0, self._num_samples, loader.batch_size * loader.dp_size):
            batch = loader.at(position)
            # The last batch may reach over the end, where all ranks still have to take part.
            numbers = position + torch.arange(loader.batch_size) * loader.dp_size + loader.dp_rank
            batch.labels[numbers >= self._num_samples] = IGNORE_INDEX
            labels += int((batch.labels != IGNORE_INDEX).sum())
            documents = Documents.from_ids(batch.document_ids, self._device) if self._masked else None
            with self._model.micro_batch(last=True):
                inputs, labels_BT = (t.to(self._device, non_blocking=True) for t in (batch.inputs, batch.labels))
                losses.append(self._loss(self._model, inputs, labels_BT, documents)[1])
        return sum(float(loss) for loss in losses), labels
