"""Whole tensors out of a checkpoint directory, one at a time, in one process, without a device."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_npu.checkpoint.directory import CheckpointStore
from torchtitan_npu.checkpoint.manifest import CheckpointError, corruption
from torchtitan_npu.checkpoint.state import META
from torchtitan_npu.safetensors_file import TensorEntry

_MODEL = "model."

_DCP = "torch.distributed.checkpoint.metadata"
_OTHER_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    """Of ``.metadata``, which DCP writes as a pickle: makes DCP's own records and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in (_DCP, "torch") and "." not in name else None
        if isinstance(found, torch.dtype) or (module == _DCP and getattr(found, "__module__", None) == _DCP):
            return found
        if (module, name) in _OTHER_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint's metadata")


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, whose ``.metadata`` cannot run code, and is read once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._content: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._content is None:
            with open(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
                content = _MetadataUnpickler(io.BytesIO(file.read())).load()
            if not isinstance(content, Metadata):
                raise pickle.UnpicklingError(f"it holds a {type(content).__name__}")
            self._content = content
        return self._content


class TensorSource:
    """The model's tensors in a checkpoint, under the model's own names; whatever saved it, at any number of ranks."""

    def __init__(self, path: Path) -> None:
        """``path``: a checkpoint (ours or another's DCP directory), or a directory of ours with several: the newest
        complete one.

        Raises:
            CheckpointError: there is no usable one.
        """
        self.path = _resolve(path)
        self._reader = SafeReader(self.path)
        try:
            saved = self._reader.read_metadata().state_dict_metadata
        except (OSError, EOFError, ValueError, AttributeError, TypeError, ImportError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}/.metadata cannot be read: {error}; use another checkpoint") from error
        tensors = {name: entry for name, entry in saved.items() if isinstance(entry, TensorStorageMetadata)}
        self._prefix = _MODEL if any(name.startswith(_MODEL) for name in tensors) else ""
        self.entries: dict[str, TensorEntry] = {}
        for name, tensor in tensors.items():
            if name.startswith(self._prefix):
                plain = name[len(self._prefix) :]
                self.entries[plain] = TensorEntry(plain, tuple(tensor.size), tensor.properties.dtype)
        if not self.entries:
            raise CheckpointError(f"{self.path} holds no tensors; name another checkpoint")

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor ``name`` in memory of its own, in its own dtype or another floating-point one.

        Host memory: the tensor, one chunk of it, and the result where the dtype changes.

        Raises:
            CheckpointError: its bytes are damaged.
        """
        entry = self.entries[name]
        key = self._prefix + name
        state: dict[str, Any] = {key: torch.empty(entry.shape, dtype=entry.dtype)}
        try:
            # What dcp.load does in one process, without what makes reference cycles around the tensor: they would keep
            # several alive until the next garbage collection.
            planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            metadata = self._reader.read_metadata()
            planner.set_up_planner(state, metadata, is_coordinator=True)
            self._reader.set_up_storage_reader(metadata, is_coordinator=True)
            self._reader.read_data(planner.create_local_plan(), planner).wait()
        except (CheckpointException, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: '{key}' cannot be read: {_first_line(error)}") from error
        tensor: torch.Tensor = state[key]
        return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def _first_line(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _resolve(path: Path) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path}: no such checkpoint; name its directory, or that of a run's checkpoints")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; name a checkpoint's directory, or that of a run's checkpoints")
    store = CheckpointStore(path)
    if store.steps():
        newest = store.newest()
        if newest is None:
            raise CheckpointError(f"{path}: none of its checkpoints is complete")
        return newest
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no checkpoint: it has neither a .metadata file nor step-… directories")
    if (path / META).exists():
        reason = corruption(path)
        if reason is not None:
            raise CheckpointError(f"{path} cannot be used: {reason}")
    return path
