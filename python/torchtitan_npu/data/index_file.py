"""The binary form of a JSONL token file: where it lies, its format, and the checks before it is trusted.

For ``train.jsonl`` two files are written next to it, or into the cache directory (``$TORCHTITAN_NPU_CACHE``, else
``$XDG_CACHE_HOME/torchtitan_npu``, else ``~/.cache/torchtitan_npu``) where its directory cannot be written:

``train.jsonl.bin``  64-byte header (magic, digest of the JSONL), then all tokens back to back, uint16 or uint32.
``train.jsonl.idx``  4096-byte header (magic, digest of the rest, JSON padded with blanks), then documents + 1 int64
                     offsets, in tokens.

A cache is used when the JSONL has the size and mtime it had at conversion. With another mtime the content decides. The
digest in both headers keeps a .bin from being read with the .idx of another one. All sizes are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.tokenizer_mark import TokenizerMark, read_mark
from torchtitan_npu.launch.cache import cache_directory

BIN_HEADER_BYTES = 64
IDX_HEADER_BYTES = 4096
_BIN_MAGIC = b"TTNPUBIN"
_IDX_MAGIC = b"TTNPUIDX"
FORMAT_VERSION = 2  # 1 had blake2b where XXH3 is now
DIGEST_BYTES = 32
_PREFIX_BYTES = len(_IDX_MAGIC) + DIGEST_BYTES
# The builder re-reads a cached file up to this size to check its digest; a larger one is checked by header and size, so
# that opening takes no longer for a larger corpus.
_VERIFY_BYTES = 256 << 20


@dataclass(frozen=True)
class FileIndex:
    """One token file. ``digest``: XXH3-128 of the JSONL's bytes, hexadecimal; of a standalone .bin, of its parts.

    ``source`` is what the user names: the JSONL, or the standalone .bin. ``tokenizer``: None where it is not known.
    """

    source: Path
    idx_path: Path
    bin_path: Path
    dtype: np.dtype[Any]
    documents: int
    tokens: int
    largest_id: int
    digest: str
    tokenizer: TokenizerMark | None = None

    @property
    def is_standalone(self) -> bool:
        return self.bin_path == self.source


class StaleIndexError(Exception):
    """A cache that is missing, torn, damaged, or of other content. ``touched``: only the JSONL's mtime differs."""

    def __init__(self, reason: str, *, touched: bool = False) -> None:
        super().__init__(reason)
        self.touched = touched


def map_tokens(file: FileIndex) -> npt.NDArray[Any]:
    """[tokens] in the file's dtype, memory-mapped and read-only."""
    mapped = np.memmap(file.bin_path, file.dtype, mode="r", offset=BIN_HEADER_BYTES, shape=(file.tokens,))
    return mapped.view(np.ndarray)


def map_offsets(file: FileIndex) -> npt.NDArray[np.int64]:
    """[documents + 1] int64: document d is tokens[offsets[d]:offsets[d + 1]]."""
    mapped = np.memmap(file.idx_path, "<i8", mode="r", offset=IDX_HEADER_BYTES, shape=(file.documents + 1,))
    return mapped.view(np.ndarray)


def index_locations(source: Path) -> list[tuple[Path, Path]]:
    """(idx, bin) next to the source, then in the cache directory."""
    real = os.path.realpath(source)
    unique = hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()
    stems = (real, os.path.join(cache_directory(), f"{os.path.basename(real)}.{unique}"))
    return [(Path(stem + ".idx"), Path(stem + ".bin")) for stem in stems]


def load_index(
    source: Path, idx_path: Path, bin_path: Path, *, verify: bool, report: Callable[[str], None] | None = None
) -> FileIndex:
    """Errors: StaleIndexError. ``verify``: also checks digests, and the content where only the mtime differs.

    ``report`` is called often while the content is read, with how far that is.
    """
    stat = stat_source(source)
    try:
        with idx_path.open("rb") as idx, bin_path.open("rb") as binary:
            header = read_idx_header(idx)
            if header.get("size") != stat.st_size:  # a standalone .idx has none
                raise StaleIndexError("the JSONL has changed since the conversion")
            if header.get("mtime_ns") != stat.st_mtime_ns:
                same = verify and _digest_of(source, report) == header.get("digest")
                raise StaleIndexError(
                    "the JSONL has another time, but the same content" if same else "the JSONL has changed",
                    touched=same,
                )
            return index_of(source, header, idx, binary, read_mark(source, stat.st_size), verify=verify)
    except OSError as error:
        raise StaleIndexError(f"no readable index: {error}") from error


def index_of(
    source: Path,
    header: dict[str, Any],
    idx: BinaryIO,
    binary: BinaryIO,
    tokenizer: TokenizerMark | None,
    *,
    verify: bool,
) -> FileIndex:
    """What the open files of a pair say. ``idx`` stands after its header, ``binary`` at its begin.

    Errors: StaleIndexError when the two are not whole, or not a pair. ``verify``: also compares digests.
    """
    try:
        file = FileIndex(
            source=source,
            idx_path=Path(idx.name),
            bin_path=Path(binary.name),
            dtype=np.dtype(header["dtype"]),
            documents=header["documents"],
            tokens=header["tokens"],
            largest_id=header["largest_id"],
            digest=header["digest"],
            tokenizer=tokenizer,
        )
        _check_parts(file.dtype, header, idx, binary, verify=verify)
    except (KeyError, TypeError, ValueError) as error:
        raise StaleIndexError(f"the header of the .idx is not that of a token file: {error!r}") from error
    return file


def _check_parts(
    dtype: np.dtype[Any], header: dict[str, Any], idx: BinaryIO, binary: BinaryIO, *, verify: bool
) -> None:
    if os.fstat(idx.fileno()).st_size != IDX_HEADER_BYTES + 8 * (header["documents"] + 1):
        raise StaleIndexError("the .idx is not whole")
    magic = binary.read(BIN_HEADER_BYTES)
    if not magic.startswith(_BIN_MAGIC):
        raise StaleIndexError("the .bin is damaged, or not ours")
    if magic != bin_header(header["digest"]):
        raise StaleIndexError("the .bin belongs to another .idx")
    if os.fstat(binary.fileno()).st_size != BIN_HEADER_BYTES + dtype.itemsize * header["tokens"]:
        raise StaleIndexError("the .bin is not whole")
    if verify and 8 * header["documents"] <= _VERIFY_BYTES and _digest_of_rest(idx) != header["offsets_digest"]:
        raise StaleIndexError("the .idx is damaged")
    small = dtype.itemsize * header["tokens"] <= _VERIFY_BYTES
    if verify and small and _digest_of_rest(binary) != header["tokens_digest"]:
        raise StaleIndexError("the .bin is damaged")


def has_bin_magic(path: Path) -> bool:
    """Whether a file begins as a .bin of ours does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_BIN_MAGIC)) == _BIN_MAGIC
    except OSError:
        return False


def idx_of(bin_path: Path) -> Path:
    """Where the .idx of a .bin lies."""
    return bin_path.with_suffix(".idx")


def standalone_digest(tokens_digest: str, offsets_digest: str) -> str:
    """The digest of a .bin that was not made from a JSONL."""
    parts = f"standalone:{tokens_digest}:{offsets_digest}"
    return hashlib.blake2b(parts.encode(), digest_size=DIGEST_BYTES).hexdigest()


def content_hash() -> xxhash.xxh3_128:
    """For the contents of files. It finds damage and changes; it is no defence against somebody who forges them.

    Some ten times as fast as blake2b, which would take as long as reading the tokens out of a JSONL.
    """
    return xxhash.xxh3_128()


def idx_header(header: dict[str, Any]) -> bytes:
    body = json.dumps(header).encode().ljust(IDX_HEADER_BYTES - _PREFIX_BYTES)
    assert len(body) == IDX_HEADER_BYTES - _PREFIX_BYTES, "the header has a fixed size"
    return _IDX_MAGIC + hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() + body


def bin_header(digest: str) -> bytes:
    return (_BIN_MAGIC + bytes.fromhex(digest)).ljust(BIN_HEADER_BYTES, b"\0")


def read_idx_header(idx: BinaryIO) -> dict[str, Any]:
    """Leaves the file at the first offset. Errors: StaleIndexError."""
    raw = idx.read(IDX_HEADER_BYTES)
    body = raw[_PREFIX_BYTES:]
    digest = hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
    if len(raw) != IDX_HEADER_BYTES or raw[:_PREFIX_BYTES] != _IDX_MAGIC + digest:
        raise StaleIndexError("the .idx is damaged, or not ours")
    try:
        header = json.loads(body)
    except ValueError as error:
        raise StaleIndexError("the .idx is damaged, or not ours") from error
    version = header.get("version") if isinstance(header, dict) else None
    if version != FORMAT_VERSION:
        raise StaleIndexError(f"the .idx has format version {version}, this release reads {FORMAT_VERSION}")
    found: dict[str, Any] = header
    return found


def _digest_of(path: Path, report: Callable[[str], None] | None) -> str:
    with path.open("rb") as file:
        return _digest_of_rest(file, report)


def _digest_of_rest(file: BinaryIO, report: Callable[[str], None] | None = None) -> str:
    digest = content_hash()
    while block := file.read(1 << 20):
        digest.update(block)
        if report is not None:
            report(f"{os.path.basename(file.name)}: {file.tell() >> 20:,} MiB compared")
    return digest.hexdigest()


def stat_source(source: Path) -> os.stat_result:
    try:
        return source.stat()
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error


if sys.byteorder != "little":  # memory-mapped files are little-endian, and kernels downstream expect native order
    raise ImportError("not supported: token indices on big-endian machines")
