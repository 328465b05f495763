"""The directory that holds a run's checkpoints: which are complete, which may go.

checkpoints/
  step-00000200/        one checkpoint
    .metadata, *.distcp   tensors (torch.distributed.checkpoint)
    meta.json             step, tokens, data position, configuration, versions
    rank-00000.json       one per rank: random states
    COMPLETE              written last: sizes and checksums of all the other files
  step-00000400.tmp/    a save in progress, or what an interrupted one left
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from torchtitan_npu.checkpoint.manifest import (
    MARKER,
    CheckpointError,
    Sums,
    corruption,
    defect,
    fsync_directory,
    write_marker,
    wrong_sizes,
)

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(\d{8,})")
_OUR_FILES = re.compile(rf"(\.metadata|__\d+_\d+\.distcp|meta\.json|rank-\d{{5,}}\.json|{MARKER})(\.tmp)?")
_SPARE_BYTES = 16 << 20


class CheckpointStore:
    """The checkpoints under one directory. Methods that change it are for rank 0 only."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.damaged: set[int] = set()
        """Steps whose checkpoints were passed over; they count as incomplete."""

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.root / f"step-{step:08d}"

    def temporary(self, step: int) -> Path:
        """Where it is written."""
        return self.root / f"step-{step:08d}.tmp"

    def steps(self) -> list[int]:
        """Steps of all checkpoints that were renamed into place, complete or not, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending. Looks at file sizes and at what was found damaged before."""
        return [step for step in self.steps() if step not in self.damaged and defect(self.path(step)) is None]

    def candidate(self) -> Path | None:
        """The newest checkpoint that is complete as far as file sizes tell; newer ones are passed over."""
        for step in reversed(self.steps()):
            if step in self.damaged:
                continue
            reason = defect(self.path(step))
            if reason is None:
                return self.path(step)
            self.pass_over(self.path(step), reason)
        return None

    def pass_over(self, path: Path, reason: str) -> None:
        """Count the checkpoint ``path`` of this directory as incomplete, with a warning."""
        self.damaged.add(int(path.name.partition("-")[2]))
        logger.warning("checkpoint %s is passed over: %s", path, reason)

    def newest(self) -> Path | None:
        """The newest checkpoint whose every byte is as saved; newer ones that are not are passed over."""
        while (path := self.candidate()) is not None:
            reason = corruption(path)
            if reason is None:
                return path
            self.pass_over(path, reason)
        return None

    def prepare(self) -> None:
        """Create the directory and prove that it can be written.

        Raises:
            CheckpointError: it cannot.
        """
        try:
            if self.root.exists() and not self.root.is_dir():
                raise CheckpointError(f"--checkpoint_dir {self.root} cannot be written: it is a file; name a directory")
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".writable-", buffering=0) as file:
                file.write(b"\0")
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"--checkpoint_dir {self.root} cannot be written: {error}; name another directory"
            ) from error

    def begin(self, step: int, needed_bytes: int) -> Path:
        """An empty directory to write the checkpoint of ``step`` into; leftovers of interrupted saves are removed.

        Raises:
            CheckpointError: less than ``needed_bytes`` and a little more are free; nothing has been written.
            OSError: the directory is gone, or read-only.
        """
        for leftover in self.root.glob("step-*.tmp"):
            if not _NAME.fullmatch(leftover.stem):
                continue
            stranger = foreign(leftover)
            if stranger is None:
                shutil.rmtree(leftover)
            elif leftover == self.temporary(step):
                raise CheckpointError(f"{leftover} is not one of our checkpoints: {stranger}; move it away")
        status = os.statvfs(self.root)
        free = status.f_bavail * status.f_frsize
        if free < needed_bytes + min(needed_bytes, _SPARE_BYTES):
            raise CheckpointError(
                f"{self.root} has {free:,} bytes free and the checkpoint needs {needed_bytes:,}; make room, or lower "
                "training.checkpoint.max_keep"
            )
        temporary = self.temporary(step)
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path, step: int, sums: Sums, *, overwrite: bool = False) -> Path:
        """Turn ``temporary``, in which every file is written and synced, into the complete checkpoint of ``step``.

        ``overwrite``: also in place of a complete one.

        Raises:
            CheckpointError: what lies there is not what was written, or there already is something in its place that
                is complete or not ours; it is left alone.
        """
        reason = wrong_sizes(temporary, sums)
        if reason is not None:
            raise CheckpointError(f"{temporary} is not as it was written: {reason}")
        final = self.path(step)
        if os.path.lexists(final):
            stranger = foreign(final)
            if stranger is not None:
                raise CheckpointError(f"{final} is not one of our checkpoints: {stranger}; move it away")
            if not overwrite and corruption(final) is None:
                raise CheckpointError(f"{final} already exists and is complete; it is not overwritten")
            self._remove(final)
        fsync_directory(temporary)
        os.replace(temporary, final)
        fsync_directory(self.root)
        write_marker(final, sums)
        self.damaged.discard(step)
        return final

    def discard(self, step: int) -> None:
        """Remove what a failed save of ``step`` has written."""
        temporary = self.temporary(step)
        try:
            if temporary.exists() and foreign(temporary) is None:
                shutil.rmtree(temporary)
        except OSError as error:
            logger.warning("%s, which a failed save left, could not be removed: %s", temporary, error)

    def retain(self, newest: int, *, max_keep: int, keep_every: int) -> None:
        """Remove all but the newest ``max_keep`` complete checkpoints; 0 keeps all. Damaged ones do not count.

        Args:
            newest: the step that has just been saved; it stays, whatever is there.
            keep_every: steps that are multiples of it stay, too, and do not count; 0 is off.
        """
        if max_keep == 0:
            return
        counted = [step for step in self.complete_steps() if not (keep_every and step % keep_every == 0)]
        for step in counted[:-max_keep]:
            path = self.path(step)
            stranger = foreign(path)
            if step == newest or stranger is not None:
                continue
            logger.info("checkpoint %s removed (training.checkpoint.max_keep is %d)", path, max_keep)
            self._remove(path)

    def _remove(self, path: Path) -> None:
        # Marker first: a removal that is interrupted leaves nothing that looks complete.
        with contextlib.suppress(FileNotFoundError):
            (path / MARKER).unlink()
        shutil.rmtree(path)


def foreign(path: Path) -> str | None:
    """Why ``path`` was not made by a save of ours, or None when it was: then it may be removed."""
    if path.is_symlink():
        return "it is a symbolic link"
    if not path.is_dir():
        return "it is not a directory"
    for entry in sorted(path.iterdir()):
        if not _OUR_FILES.fullmatch(entry.name) or entry.is_dir():
            return f"it holds {entry.name}"
    return None
