"""Input files of ``prepare``, plain or compressed with gzip or zstd, as one stream of bytes.

The first bytes decide, not the name: a file that is called ``.gz`` but is not gzip is an error.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from torchtitan_npu.data.errors import DataError

COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
# Compressed bytes that zstd is given at once. What comes out is not bounded otherwise.
_ZSTD_FEED_BYTES = 16 << 10
_SKIP_BYTES = 1 << 20


class _Source(Protocol):
    def read(self, size: int, /) -> bytes: ...


def plain_name(path: Path) -> str:
    """The file's name without the suffix of its compression."""
    return path.stem if path.suffix.lower() in COMPRESSED_SUFFIXES else path.name


class InputFile:
    """A file that is read forward, decompressed. A context manager.

    Attributes:
        offset: decompressed bytes read so far.
        compressed: whether ``offset`` and ``consumed`` count different things.

    Errors, of the constructor and of ``read``: DataError that names the file, and where it is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        try:
            self._raw: BinaryIO = path.open("rb")
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            self._source, self.compressed = self._open()
        except BaseException:
            self._raw.close()
            raise

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._raw.close()

    @property
    def consumed(self) -> int:
        """Bytes of the file as it lies on disk, for the progress."""
        return self._raw.tell()

    def read(self, size: int) -> bytes:
        """``size`` bytes, fewer only at the end."""
        try:
            block = self._source.read(size)
        except (EOFError, zlib.error, gzip.BadGzipFile, _DamagedError) as error:
            raise DataError(
                f"{self.path}: damaged or cut off, {self.offset:,} decompressed bytes can be read ({error}); get it "
                "again from its source, or leave it out of --input"
            ) from error
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read after {self.offset:,} bytes: {error.strerror}") from error
        self.offset += len(block)
        return block

    def skip_to(self, offset: int) -> None:
        """Goes on at ``offset``, which lies ahead. Compressed files are decompressed up to there."""
        if not self.compressed:
            self._raw.seek(offset)
            self.offset = offset
            return
        while self.offset < offset:
            if not self.read(min(_SKIP_BYTES, offset - self.offset)):
                raise DataError(f"{self.path}: shorter than before: it has changed; run the command again")

    def _open(self) -> tuple[_Source, bool]:
        magic = self._raw.read(4)
        self._raw.seek(0)
        if magic.startswith(_GZIP_MAGIC):
            return gzip.GzipFile(fileobj=self._raw, mode="rb"), True
        if magic == _ZSTD_MAGIC:
            return _ZstdSource(self._raw, self.path), True
        if self.path.suffix.lower() in COMPRESSED_SUFFIXES:
            raise DataError(
                f"{self.path}: is called {self.path.suffix}, but begins with neither gzip's nor zstd's bytes"
            )
        return self._raw, False


class _DamagedError(Exception):
    """What zstandard says of a file."""


class _ZstdSource:
    """Frame after frame. zstandard's own reader takes a file that is cut off inside a frame for one that ends."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(
                f"{path}: is compressed with zstd, and the package zstandard is not installed: pip install zstandard "
                "(it is in this package's extra 'data'), or decompress the file: zstd -d"
            ) from error
        self._raw = raw
        self._error: type[Exception] = zstandard.ZstdError
        # Frames of `zstd --long=31` too; the window is the memory that it takes.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._ready = bytearray()
        self._unread = b""

    def read(self, size: int, /) -> bytes:
        while len(self._ready) < size:
            fed = self._unread or self._raw.read(_ZSTD_FEED_BYTES)
            self._unread = b""
            if not fed:
                if self._frame is not None:
                    raise _DamagedError("the file ends inside a zstd frame")
                break
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._ready += self._frame.decompress(fed)
            except self._error as error:
                raise _DamagedError(str(error)) from error
            if self._frame.eof:
                self._unread, self._frame = self._frame.unused_data, None
        block = bytes(self._ready[:size])
        del self._ready[:size]
        return block
