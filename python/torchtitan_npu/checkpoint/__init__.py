"""Checkpoints: saving, finding, loading, keeping. Tensors are in PyTorch's distributed checkpoint format (DCP)."""

from torchtitan_npu.checkpoint.directory import CheckpointStore
from torchtitan_npu.checkpoint.loader import load, tensor_differences
from torchtitan_npu.checkpoint.manifest import CheckpointError
from torchtitan_npu.checkpoint.saver import Saver
from torchtitan_npu.checkpoint.state import TrainState

__all__ = ["CheckpointError", "CheckpointStore", "Saver", "TrainState", "load", "tensor_differences"]
