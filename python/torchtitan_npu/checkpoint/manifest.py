"""The marker of a complete checkpoint: size and CRC-32 of every other file, written last.

CRC-32 (:func:`zlib.crc32`) finds every burst of up to 32 wrong bits and all but one of 2**32 other damages, is in the
standard library, releases the interpreter lock, and runs at about the speed of a memory copy: twice as fast as SHA-256
or BLAKE2. It protects against disks and networks, not against a forger.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MARKER = "COMPLETE"
_CHUNK_BYTES = 4 << 20
_READERS = 16


@dataclass(frozen=True)
class FileSum:
    """What a file must contain."""

    bytes: int
    crc32: int


Sums = dict[str, FileSum]
"""By file name."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, found or used; the message names it and the way out."""


def fsync_directory(path: Path) -> None:
    """Make the names in ``path`` survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, text: str) -> FileSum:
    """Replace ``path`` by ``text`` so that it is always either the old or the new file, also after a power failure."""
    data = text.encode("utf-8")
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_directory(path.parent)
    return FileSum(len(data), zlib.crc32(data))


def write_marker(directory: Path, sums: Sums) -> None:
    """Declare the checkpoint complete."""
    files = {name: {"bytes": sum.bytes, "crc32": f"{sum.crc32:08x}"} for name, sum in sorted(sums.items())}
    write_durably(directory / MARKER, json.dumps({"files": files}, indent=1))


def read_marker(directory: Path) -> Sums:
    """Raises CheckpointError with the reason, in words that follow "because"."""
    try:
        recorded = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
        return {str(name): FileSum(int(entry["bytes"]), int(entry["crc32"], 16)) for name, entry in recorded.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"it has no {MARKER} marker: its save did not finish") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"its {MARKER} marker cannot be read: {error}") from error


def wrong_sizes(directory: Path, sums: Sums) -> str | None:
    """The first file that is missing or has another size, or None."""
    for name, expected in sums.items():
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            return f"its file {name} is missing"
        except OSError as error:
            return f"its file {name} cannot be read: {error}"
        if size != expected.bytes:
            return f"its file {name} has {size} bytes instead of {expected.bytes}"
    return None


def defect(directory: Path) -> str | None:
    """Why the checkpoint cannot be used, or None when it is complete. Looks at file sizes, not at contents."""
    try:
        return wrong_sizes(directory, read_marker(directory))
    except CheckpointError as error:
        return str(error)


def corruption(directory: Path, *, part: int = 0, parts: int = 1) -> str | None:
    """Like ``defect``, and reads contents, several files at a time: of all files, or of one of ``parts`` about equal
    shares of them.
    """
    try:
        sums = read_marker(directory)
        reason = wrong_sizes(directory, sums)
        if reason is not None:
            return reason
        by_size = sorted(sums.items(), key=lambda item: (-item[1].bytes, item[0]))
        mine = dict(by_size[part::parts])
        # Reading and checksums both run without the interpreter lock.
        with ThreadPoolExecutor(max(1, min(_READERS, len(os.sched_getaffinity(0)) // parts))) as pool:
            found = pool.map(lambda name: _crc32(directory / name), mine)
            for (name, expected), value in zip(mine.items(), found, strict=True):
                if value != expected.crc32:
                    return f"its file {name} is corrupt: CRC-32 {value:08x} instead of {expected.crc32:08x}"
        return None
    except (CheckpointError, OSError) as error:
        return str(error)


def _crc32(path: Path) -> int:
    value = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value
