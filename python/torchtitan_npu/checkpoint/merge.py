"""One file out of a checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from torchtitan_npu.checkpoint.manifest import CheckpointError
from torchtitan_npu.checkpoint.output import new_file
from torchtitan_npu.checkpoint.tensor_source import TensorSource
from torchtitan_npu.safetensors_file import TensorEntry, write_safetensors


def with_dtype(entry: TensorEntry, dtype: torch.dtype | None) -> TensorEntry:
    """``entry`` with another floating-point dtype; integers keep theirs."""
    if dtype is None or not entry.dtype.is_floating_point:
        return entry
    return TensorEntry(entry.name, entry.shape, dtype)


def merge(
    source: TensorSource,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    on_tensor: Callable[[str], object] = lambda name: None,
) -> list[TensorEntry]:
    """Write the model's tensors of a checkpoint into one safetensors file under the model's own names.

    Host memory: one tensor, and one chunk of it as it is read. The optimizer's state is left out.

    Args:
        dtype: of the floating-point tensors; None keeps each one's.
        on_tensor: is called with each tensor's name after it has been written.

    Returns:
        What the file holds.

    Raises:
        CheckpointError: the output may not be written, or a tensor cannot be read.
    """
    entries = [with_dtype(entry, dtype) for entry in source.entries.values()]

    def read(entry: TensorEntry) -> torch.Tensor:
        tensor = source.read(entry.name, entry.dtype)
        on_tensor(entry.name)
        return tensor

    with new_file(output, overwrite=overwrite) as temporary:
        try:
            write_safetensors(temporary, entries, read)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
    return entries
