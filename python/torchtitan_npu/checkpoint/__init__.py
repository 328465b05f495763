"""Checkpoints: saving, finding, loading, keeping. Tensors are in PyTorch's distributed checkpoint format (DCP)."""

from torchtitan_npu.checkpoint.directory import CheckpointError, CheckpointStore
from torchtitan_npu.checkpoint.loader import load
from torchtitan_npu.checkpoint.saver import save
from torchtitan_npu.checkpoint.state import TrainState

__all__ = ["CheckpointError", "CheckpointStore", "TrainState", "load", "save"]
