"""Saving: all ranks write their tensors, rank 0 makes the result a checkpoint; in the background if wanted."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan_npu.checkpoint import random_state
from torchtitan_npu.checkpoint.directory import CheckpointStore
from torchtitan_npu.checkpoint.manifest import CheckpointError, FileSum, Sums
from torchtitan_npu.checkpoint.snapshot import Snapshot
from torchtitan_npu.checkpoint.state import META, TrainState
from torchtitan_npu.checkpoint.tensors import collect
from torchtitan_npu.checkpoint.writer import SummingWriter
from torchtitan_npu.fsdp.piece import Piece
from torchtitan_npu.launch import gather_texts, read_timeouts

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints of one model and optimizer, one at a time.

    A checkpoint is written under another name, synced, renamed, and marked complete last: an interruption at any point
    leaves the earlier ones as they were. The ranks agree on success before the rename. What ranks tell each other
    while saving travels in a process group of its own, so it never meets training's collectives.
    """

    def __init__(
        self,
        store: CheckpointStore,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sharded: bool,
        device: torch.device,
        async_save: bool,
        max_keep: int,
        keep_every: int = 0,
    ) -> None:
        """Collective. The optimizer's state must be initialised; ``async_save`` allocates host memory for one copy of
        this rank's tensors.
        """
        self._store, self._device = store, device
        self._max_keep, self._keep_every = max_keep, keep_every
        self._rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo", timeout=read_timeouts().process_group)
        self._collect: Callable[[], dict[str, Any]] = lambda: collect(model, optimizer, sharded=sharded)
        self._snapshot = Snapshot(self._collect(), device) if async_save else None
        self._job: _Job | None = None

    def save(self, state: TrainState) -> None:
        """Save the checkpoint of ``state.step``: begin to, in the background, or do it. Collective.

        The previous result must have been taken. When this returns, tensors and random states may change.
        """
        assert self._job is None, "take the result of the last save first"
        start = time.monotonic()
        tensors, states = self._collect(), random_state.capture(self._device)
        if self._snapshot is None:
            self._job = _Job(state.step, lambda: self._write(state, tensors, states))
            self._job.run()
            return
        copy = self._snapshot.take(tensors)
        logger.info(
            "checkpoint of step %d: training stood still for %.3f s, and goes on while it is written",
            state.step,
            time.monotonic() - start,
        )
        self._job = _Job(state.step, lambda: self._write(state, copy, states))
        # A daemon: a process that must end at once does not wait for a disk that hangs.
        threading.Thread(target=self._job.run, name="checkpoint", daemon=True).start()

    @property
    def pending(self) -> int | None:
        """The step whose save has not been taken yet, or None."""
        return None if self._job is None else self._job.step

    @property
    def ready(self) -> bool:
        """Whether ``result`` returns without waiting, on this rank."""
        return self._job is not None and self._job.done.is_set()

    def result(self) -> Path:
        """Wait for the save and take its result: the checkpoint's directory.

        Raises:
            CheckpointError: on every rank, if it failed on any; the message says which and why.
        """
        assert self._job is not None
        job, self._job = self._job, None
        job.done.wait()
        if job.failure is not None:
            raise job.failure
        return self._store.path(job.step)

    def _write(self, state: TrainState, tensors: dict[str, Any], states: dict[str, Any]) -> None:
        start = time.monotonic()
        step, temporary = state.step, self._store.temporary(state.step)
        writer = SummingWriter(temporary)
        mine: Sums = {}

        def begin() -> None:
            # Little work, before ranks wait for each other: other ranks may still be taking their snapshots.
            if self._rank == 0:
                self._store.begin(step, _total_bytes(tensors))

        def write_states() -> None:
            _check_finite(tensors)
            mine[random_state.file_name(self._rank)] = random_state.write(temporary, self._rank, states)
            if self._rank == 0:
                mine[META] = state.write(temporary)

        def write_tensors() -> None:
            try:
                dcp.save(tensors, storage_writer=writer, process_group=self._group)
            except CheckpointException as error:
                # Every rank has all failures; each tells its own, and then all raise.
                if self._rank in error.failures:
                    raise CheckpointError(str(error.failures[self._rank][0])) from error
            mine.update(writer.sums)

        def commit() -> None:
            if self._rank == 0:
                sums = {name: FileSum(**entry) for text in written for name, entry in json.loads(text).items()}
                self._store.commit(temporary, step, sums)

        try:
            self._together(step, begin)
            # One by one: a rank that fails must not meet the others inside DCP's collectives.
            self._together(step, write_states)
            self._together(step, write_tensors)
            written = gather_texts(json.dumps({name: asdict(sum) for name, sum in mine.items()}), self._group)
            self._together(step, commit)
        except CheckpointError:
            if self._rank == 0:
                self._store.discard(step)  # what is half written may be what fills the disk
            raise
        if self._rank == 0:
            try:
                self._store.retain(step, max_keep=self._max_keep, keep_every=self._keep_every)
            except OSError as error:
                # The new checkpoint is safe; the next save tries again.
                logger.warning("an old checkpoint could not be removed: %s", error)
        logger.info("checkpoint %s saved in %.1f s", self._store.path(step), time.monotonic() - start)

    def _together(self, step: int, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank and raise on every rank if it failed on one."""
        failure = ""
        try:
            action()
        except (OSError, CheckpointError) as error:
            failure = str(error) or type(error).__name__
        failures = gather_texts(failure, self._group)
        if any(failures):
            listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(failures) if text)
            raise CheckpointError(f"the checkpoint of step {step} was not saved: {listed}")


class _Job:
    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self._action = step, action
        self.failure: BaseException | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            self._action()
        except BaseException as failure:  # whatever it is, the thread that takes the result raises it
            self.failure = failure
        finally:
            self.done.set()


def _total_bytes(tensors: dict[str, Any]) -> int:
    """Of all ranks' tensors: each piece knows the shape of the whole."""
    return sum(
        torch.Size(getattr(tensor, "whole_shape", tensor.shape)).numel() * tensor.element_size()
        for tensor in tensors.values()
    )


def _check_finite(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        plain = tensor.plain() if isinstance(tensor, Piece) else tensor
        if plain.numel() == 0 or not plain.is_floating_point():
            continue
        # Without the temporary tensor of isfinite(); both are NaN where anything is.
        low, high = torch.aminmax(plain)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise CheckpointError(f"{name} is not finite, and would not be worth resuming from")
