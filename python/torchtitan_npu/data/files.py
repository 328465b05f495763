"""Finding input files, and writing files that are whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from torchtitan_npu.data.errors import DataError

_TEMPORARY = ".tmp"
# Between the making of a temporary file and its lock there is a moment.
_LEFT_SECONDS = 60.0


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A binary file that appears at ``path``, synced to disk, when the block ends without an exception.

    Until then ``path`` keeps its old content. An exception removes the temporary file; one that a kill has left is
    removed by whoever writes there next.
    A symbolic link keeps pointing at its target, which is what is replaced.

    Errors: DataError when ``path`` is something other than a regular file (a directory, a device); OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise DataError(f"{path}: exists and is not a regular file; name a file to write")
    mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o666 & ~_umask()
    _remove_left_temporaries(target)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=_TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
            with contextlib.suppress(OSError):  # a file system without locks: then nobody can take it for left
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fchmod(file.fileno(), mode)  # mkstemp's 0600 would hide the file from the other ranks' users
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    fsync_directory(target.parent)


def _remove_left_temporaries(target: Path) -> None:
    """Those of ``target`` that a killed process has left: nobody holds their lock, and they are not just being made."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*{_TEMPORARY}"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _LEFT_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


def expand_paths(path: str | Path | Sequence[str | Path], suffixes: Sequence[str], what: str) -> list[Path]:
    """The files that a file, a directory or a glob stands for, in sorted order.

    Args:
        path: a file (any name), a directory (its files that end in one of ``suffixes``, not recursive; hidden files
            are left out), a glob (``**`` recurses), or a sequence of these.
        suffixes: endings that count inside a directory, e.g. ``(".jsonl",)``.
        what: how errors call the thing, e.g. ``"--data_dir"``.

    Errors: DataError when nothing is found.
    """
    if not isinstance(path, (str, Path)):
        files = [file for one in path for file in expand_paths(one, suffixes, what)]
        if not files:
            raise DataError(f"{what}: no path given")
        repeated = sorted({str(file) for file in files if files.count(file) > 1})
        if repeated:
            raise DataError(f"{what}: named more than once: {', '.join(repeated)}; its documents would count twice")
        return files
    text = os.fspath(path)
    if not text:
        raise DataError(f"{what}: the path is empty; give a file, a directory or a glob")
    here = Path(text)
    if here.is_dir():
        endings = tuple(suffixes)
        files = sorted(f for f in here.iterdir() if f.is_file() and f.name.endswith(endings) and f.name[0] != ".")
        if not files:
            shown = " or ".join(f"*{ending}" for ending in suffixes if ending.count(".") == 1)  # without *.txt.gz
            raise DataError(f"{what}: directory {text!r} holds no {shown} file")
        return files
    if here.exists():
        return [here]
    if glob.has_magic(text):
        files = sorted(f for f in map(Path, glob.glob(text, recursive=True)) if f.is_file())
        if not files:
            raise DataError(f"{what}: no file matches {text!r}")
        return files
    raise DataError(f"{what}: {text!r} does not exist; give a file, a directory or a glob")


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def fsync_directory(directory: Path) -> None:
    """Makes the renames in a directory last."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
