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

from torchtitan_npu.checkpoint import random_state
from torchtitan_npu.checkpoint.manifest import CheckpointError, defect
from torchtitan_npu.checkpoint.state import TrainState
from torchtitan_npu.checkpoint.tensor_source import SafeReader
from torchtitan_npu.checkpoint.tensors import collect, distribute, is_optimizer_state

logger = logging.getLogger(__name__)

_LISTED = 20


def load(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sharded: bool,
    device: torch.device,
    tp_degree: int = 1,
) -> TrainState:
    """Load tensors, optimizer state and random state from the checkpoint ``path``. Collective.

    The random state is restored when the world size and ``tp_degree`` are those that saved: tensor-parallel ranks must
    have the same. Otherwise it stays, and a line says so.

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
        tensors = _wanted(state, tensors, metadata)
        table = _table(tensors, metadata)
        if table:
            raise CheckpointError(f"{path} belongs to another model; its tensors differ:\n{table}")
        dcp.load(tensors, storage_reader=reader, planner=_PiecePlanner())
    except CheckpointException as error:
        listed = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items())
        raise CheckpointError(f"{path} cannot be loaded: {listed}; resume from another checkpoint") from error
    distribute(tensors, model, optimizer, sharded=sharded)
    saved = (state.world_size, state.config.get("parallel", {}).get("tp_degree", 1))
    here = (dist.get_world_size(), tp_degree)
    if saved == here:
        random_state.restore(path, dist.get_rank(), device)
    elif state.world_size:
        tensor_parallel = ""
        if saved[1] != tp_degree:
            tensor_parallel = f" (parallel.tp_degree {saved[1]} and {tp_degree})"
        logger.info(
            "%s was saved by %d ranks and is continued on %d%s: the numbers may differ in their last digits",
            path,
            saved[0],
            here[0],
            tensor_parallel,
        )
    return state


class _PiecePlanner(dcp.DefaultLoadPlanner):
    """Reads every chunk that this rank holds. The default planner would compare a piece's own size with the whole
    tensor's; ``_table`` has compared the right ones."""

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


def tensor_differences(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> str:
    """A table of the tensors that the checkpoint ``path`` and the model do not have in common; empty if none.

    Raises:
        CheckpointError: the list of the checkpoint's tensors cannot be read.
    """
    metadata = _read_metadata(path, SafeReader(path))
    return _table(_wanted(TrainState.read(path), collect(model, optimizer, sharded=sharded), metadata), metadata)


def _wanted(state: TrainState, tensors: dict[str, Any], metadata: Metadata) -> dict[str, Any]:
    """What must be in the checkpoint: all ``tensors``, or the model's, where it is of imported weights."""
    if state.step == 0 and not any(is_optimizer_state(name) for name in metadata.state_dict_metadata):
        return {name: tensor for name, tensor in tensors.items() if not is_optimizer_state(name)}
    return tensors


def _table(tensors: dict[str, Any], metadata: Metadata) -> str:
    saved = {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted = {name: tuple(getattr(tensor, "whole_shape", tensor.shape)) for name, tensor in tensors.items()}
    rows = [
        (name, _shape(saved.get(name)), _shape(wanted.get(name)))
        for name in sorted(wanted.keys() | saved.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if not rows:
        return ""
    # The optimizer's tensors differ where the model's do, and say nothing more.
    of_model = [row for row in rows if not row[0].startswith("optimizer.")] or rows
    table = [("tensor", "in the checkpoint", "in the model"), *of_model[:_LISTED]]
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in table]
    if len(of_model) > _LISTED:
        lines.append(f"… and {len(of_model) - _LISTED} more")
    return "\n".join(lines)


def _shape(size: tuple[int, ...] | None) -> str:
    return "none" if size is None else str(list(size))
