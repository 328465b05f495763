"""Loading a checkpoint into a model and its optimizer, at any world size."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import _create_read_items

from torchtitan_npu.checkpoint.directory import CheckpointError, defect
from torchtitan_npu.checkpoint.state import TrainState, restore_random_state
from torchtitan_npu.checkpoint.tensor_source import SafeReader
from torchtitan_npu.checkpoint.tensors import collect, distribute, is_optimizer_state

logger = logging.getLogger(__name__)

_LISTED = 5


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> TrainState:
    """Load tensors, optimizer state and random state from the checkpoint ``path``. Collective.

    The random state is restored when the world size is the one that saved; otherwise it stays, and a line says so.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, or belongs to another model; nothing has been changed
            unless the damage is inside a tensor file.
    """
    reason = defect(path)
    if reason is not None:
        raise CheckpointError(f"{path} cannot be used: {reason}; resume from another checkpoint")
    state = TrainState.read(path)
    reader = SafeReader(path)
    tensors = collect(model, optimizer, sharded=sharded)
    try:
        metadata = _read_metadata(path, reader)
        if state.step == 0 and not any(is_optimizer_state(name) for name in metadata.state_dict_metadata):
            # Imported weights: the optimizer starts from nothing.
            tensors = {name: tensor for name, tensor in tensors.items() if not is_optimizer_state(name)}
        _check_same_model(path, tensors, metadata)
        dcp.load(tensors, storage_reader=reader, planner=_PiecePlanner())
    except CheckpointException as error:
        listed = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{path} cannot be loaded: {listed}; resume from another checkpoint") from error
    distribute(tensors, model, optimizer, sharded=sharded)
    if state.world_size == dist.get_world_size():
        restore_random_state(path, dist.get_rank())
    elif state.world_size:
        logger.info(
            "%s was saved by %d ranks and is continued on %d: the numbers may differ in their last digits",
            path,
            state.world_size,
            dist.get_world_size(),
        )
    return state


class _PiecePlanner(dcp.DefaultLoadPlanner):
    """Reads every chunk that this rank holds. The default planner would compare a piece's own size with the whole
    tensor's; ``_check_same_model`` has compared the right ones."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        return LoadPlan(
            [item for name, t in self.state_dict.items() for item in _create_read_items(name, saved[name], t)]
        )


def _read_metadata(path: Path, reader: dcp.FileSystemReader) -> Metadata:
    try:
        return reader.read_metadata()
    except (OSError, EOFError, ValueError, AttributeError, TypeError, ImportError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}/.metadata cannot be read: {error}; resume from another checkpoint") from error


def _check_same_model(path: Path, tensors: dict[str, Any], metadata: Metadata) -> None:
    saved = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(getattr(tensor, "whole_shape", tensor.shape)) for name, tensor in tensors.items()}
    problems = [f"{name}: in the model, not in the checkpoint" for name in wanted.keys() - saved.keys()]
    problems += [f"{name}: in the checkpoint, not in the model" for name in saved.keys() - wanted.keys()]
    problems += [
        f"{name}: {list(saved[name])} in the checkpoint, {list(size)} in the model"
        for name, size in wanted.items()
        if name in saved and saved[name] != size
    ]
    if problems:
        problems.sort()
        more = [f"… and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
        raise CheckpointError(
            f"{path} belongs to another model ({len(problems)} tensors differ); use the model section it was trained "
            "with (meta.json has it), or another --checkpoint_dir:\n  " + "\n  ".join(problems[:_LISTED] + more)
        )
