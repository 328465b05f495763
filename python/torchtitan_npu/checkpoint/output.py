"""Results of conversions: complete or not there, and never over something else by accident."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from torchtitan_npu.checkpoint.manifest import CheckpointError, fsync_directory


@contextlib.contextmanager
def new_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """A temporary name beside ``path``, which becomes ``path`` at the end, and is removed after an exception.

    Raises:
        CheckpointError: ``path`` exists and ``overwrite`` is false, or is no file; its directory cannot be written.
    """
    if path.is_dir():
        raise CheckpointError(f"--output {path} is a directory; name a file")
    if path.exists() and not overwrite:
        raise CheckpointError(f"--output {path} exists; name another, or give --overwrite")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        os.fchmod(descriptor, 0o644)
        os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"--output {path} cannot be written: {error}; name another place") from error
    temporary = Path(name)
    try:
        with _writing(path):
            yield temporary
            os.replace(temporary, path)
            fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path, *, overwrite: bool, is_replaceable: Callable[[Path], bool], kind: str) -> Iterator[Path]:
    """A temporary directory beside ``path``, which becomes ``path`` at the end, and is removed after an exception.

    Args:
        is_replaceable: whether an existing directory is one that a conversion may replace: never remove what we did
            not write.
        kind: what such a directory is, for messages.

    Raises:
        CheckpointError: ``path`` may not be replaced, or its parent cannot be written.
    """
    if path.exists() and not path.is_dir():
        raise CheckpointError(f"--output {path} is a file; name a directory")
    occupied = path.is_dir() and any(path.iterdir())
    if occupied and not overwrite:
        raise CheckpointError(f"--output {path} exists and is not empty; name another, or give --overwrite")
    if occupied and not is_replaceable(path):
        raise CheckpointError(f"--output {path} holds something other than {kind}, and is not replaced; name another")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        temporary.chmod(0o755)
    except OSError as error:
        raise CheckpointError(f"--output {path} cannot be written: {error}; name another place") from error
    try:
        with _writing(path):
            yield temporary
            fsync_directory(temporary)
            old = None
            if occupied:
                old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
                os.replace(path, old)
            os.replace(temporary, path)
            fsync_directory(path.parent)
            if old is not None:
                shutil.rmtree(old)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"--output {path} was not written: {error}") from error
