"""Saving: all ranks write their tensors, rank 0 makes the result a checkpoint."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_npu.checkpoint.directory import CheckpointError, CheckpointStore
from torchtitan_npu.checkpoint.state import TrainState, write_random_state
from torchtitan_npu.checkpoint.tensors import collect
from torchtitan_npu.launch import gather_texts

logger = logging.getLogger(__name__)


def save(
    store: CheckpointStore,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainState,
    *,
    sharded: bool,
    max_keep: int,
) -> Path:
    """Write the checkpoint of ``state.step``, then remove the oldest beyond ``max_keep``. Collective.

    It is written under another name, synced, renamed, and marked complete last: an interruption at any point leaves the
    earlier checkpoints as they were.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: on every rank, if any rank failed; the message says which and why.
    """
    start = time.monotonic()
    rank = dist.get_rank()
    temporary = store.path(state.step).with_suffix(".tmp")

    def on_rank_0(action: Callable[[], object]) -> Callable[[], object]:
        return action if rank == 0 else lambda: None

    def write_tensors() -> None:
        writer = dcp.FileSystemWriter(temporary, sync_files=True, overwrite=False)
        try:
            dcp.save(collect(model, optimizer, sharded=sharded), storage_writer=writer)
        except CheckpointException as error:
            raise CheckpointError("; ".join(f"rank {r}: {e[0]}" for r, e in error.failures.items())) from error

    def write_rank_0() -> None:
        state.write(temporary)
        store.commit(temporary, state.step)

    _together(state.step, on_rank_0(lambda: store.begin(state.step)))
    _together(state.step, write_tensors)
    _together(state.step, lambda: write_random_state(temporary, rank))
    _together(state.step, on_rank_0(write_rank_0))
    if rank == 0:
        try:
            store.retain(max_keep)
        except OSError as error:
            # The new checkpoint is safe; the next save tries again.
            logger.warning("an old checkpoint could not be removed: %s", error)
    path = store.path(state.step)
    logger.info("checkpoint %s saved in %.1f s", path, time.monotonic() - start)
    return path


def _together(step: int, action: Callable[[], object]) -> None:
    """Run ``action`` on every rank and raise on every rank if it failed on one."""
    failure = ""
    try:
        action()
    except (OSError, CheckpointError) as error:
        failure = str(error)
    failures = gather_texts(failure)
    if any(failures):
        listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
        raise CheckpointError(f"the checkpoint of step {step} was not saved: {listed}")
