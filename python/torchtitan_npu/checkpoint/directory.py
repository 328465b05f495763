"""The directory that holds a run's checkpoints: which are complete, which may go.

checkpoints/
  step-00000200/        one checkpoint
    .metadata, *.distcp   tensors (torch.distributed.checkpoint)
    meta.json             step, tokens, data position, configuration
    rank-00000.json       one per rank: random state
    COMPLETE              written last: names and sizes of all the other files
  step-00000400.tmp/    a save in progress, or what an interrupted one left
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

MARKER = "COMPLETE"
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or used; the message names it and the way out."""


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` so that it is always either the old or the new file, also after a power failure."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)


def _sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(path.iterdir()) if file.name != MARKER}


def defect(path: Path) -> str | None:
    """Why the checkpoint ``path`` cannot be used, or None when it is complete. Reads file sizes, not contents."""
    try:
        recorded = json.loads((path / MARKER).read_text(encoding="utf-8"))["files"]
        present = _sizes(path)
    except FileNotFoundError:
        return f"it has no {MARKER} marker: its save did not finish"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARKER} marker cannot be read: {error}"
    for name, size in recorded.items():
        if name not in present:
            return f"its file {name} is missing"
        if present[name] != size:
            return f"its file {name} has {present[name]} bytes instead of {size}"
    return None


class CheckpointStore:
    """The checkpoints under one directory. Methods that change it are for rank 0 only."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` lies."""
        return self.root / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of all checkpoints that were renamed into place, complete or not, ascending."""
        if not self.root.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.root.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        return [step for step in self.steps() if defect(self.path(step)) is None]

    def newest(self) -> Path | None:
        """The newest complete checkpoint; a newer one that is damaged is passed over with a warning."""
        for step in reversed(self.steps()):
            reason = defect(self.path(step))
            if reason is None:
                return self.path(step)
            logger.warning("checkpoint %s is passed over: %s", self.path(step), reason)
        return None

    def prepare(self) -> None:
        """Create the directory and prove that it can be written.

        Raises:
            CheckpointError: it cannot.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.root, prefix=".writable-", buffering=0) as file:
                file.write(b"\0")
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"--checkpoint_dir {self.root} cannot be written: {error}; name another directory"
            ) from error

    def begin(self, step: int) -> Path:
        """An empty directory to write the checkpoint of ``step`` into; leftovers of interrupted saves are removed."""
        for leftover in self.root.glob("step-*.tmp"):
            shutil.rmtree(leftover)
        temporary = self.path(step).with_suffix(".tmp")
        temporary.mkdir()
        return temporary

    def commit(self, temporary: Path, step: int) -> Path:
        """Turn ``temporary``, in which every file is written and synced, into the complete checkpoint of ``step``.

        Raises:
            CheckpointError: there already is a complete checkpoint of this step; it is left alone.
        """
        final = self.path(step)
        if final.exists():
            if defect(final) is None:
                raise CheckpointError(f"{final} already exists and is complete; it is not overwritten")
            shutil.rmtree(final)
        sizes = _sizes(temporary)
        fsync_directory(temporary)
        os.replace(temporary, final)
        fsync_directory(self.root)
        write_durably(final / MARKER, json.dumps({"files": sizes}, indent=1))
        return final

    def retain(self, max_keep: int) -> None:
        """Remove all but the newest ``max_keep`` complete checkpoints; 0 keeps all. Damaged ones do not count."""
        if max_keep == 0:
            return
        for step in self.complete_steps()[:-max_keep]:
            path = self.path(step)
            logger.info("checkpoint %s removed (training.checkpoint.max_keep is %d)", path, max_keep)
            # Marker first: a removal that is interrupted leaves nothing that looks complete.
            with contextlib.suppress(FileNotFoundError):
                (path / MARKER).unlink()
            shutil.rmtree(path)
