"""Writing safetensors files tensor by tensor.

The library's own writer takes all tensors of a file at once; a model may be larger than the host's memory. The format
(huggingface.co/docs/safetensors): eight bytes, the header's length; the header, JSON, padded with spaces to a multiple
of eight; the tensors' bytes back to back. Reading is left to the library.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's name of each dtype that it has."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that a file will hold."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(
    path: Path,
    entries: Sequence[TensorEntry],
    read: Callable[[TensorEntry], torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write and sync one file; ``read`` is called once for each tensor, which is dropped before the next.

    Wide dtypes come first, so that every tensor is aligned.

    Args:
        path: is created or replaced, not atomically.
        entries: of different names.
        read: the tensor on the CPU, of the entry's shape and dtype.
        metadata: text for the header; ``format: pt`` is added, without which transformers refuses the file.

    Raises:
        OSError: from writing.
        ValueError: a dtype that the format does not have.
    """
    ordered = sorted(entries, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for entry in ordered:
        if entry.dtype not in DTYPES:
            raise ValueError(f"'{entry.name}' is {entry.dtype}, which safetensors does not have; choose another dtype")
        assert entry.name not in header, entry.name
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in ordered:
            tensor = read(entry)
            assert tuple(tensor.shape) == entry.shape and tensor.dtype == entry.dtype, entry
            if entry.num_bytes:
                file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            del tensor
        file.flush()
        os.fsync(file.fileno())
