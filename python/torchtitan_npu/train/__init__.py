"""Training: the loop, its loss, optimizer, schedule and metrics."""

from torchtitan_npu.train.main import run
from torchtitan_npu.train.trainer import Trainer, TrainingError

__all__ = ["Trainer", "TrainingError", "run"]
