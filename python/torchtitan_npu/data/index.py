"""Converts JSONL token files to memory-mapped binaries, once: see ``index_file`` for the format and the cache."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import atomic_write
from torchtitan_npu.data.index_file import (
    BIN_HEADER_BYTES,
    FORMAT_VERSION,
    IDX_HEADER_BYTES,
    FileIndex,
    StaleIndexError,
    bin_header,
    content_hash,
    idx_header,
    index_locations,
    load_index,
    map_offsets,
    map_tokens,
    read_idx_header,
    stat_source,
)
from torchtitan_npu.data.standalone import is_standalone, open_standalone, token_files
from torchtitan_npu.data.token_lines import read_token_lines
from torchtitan_npu.data.tokenizer_mark import check_tokenizers

logger = logging.getLogger(__name__)

_SCAN_TOKENS = 1 << 22
_PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class IndexInfo:
    """What ``build_index`` found. ``built``: how many of ``files`` were converted just now."""

    files: tuple[FileIndex, ...]
    built: int

    @property
    def documents(self) -> int:
        return sum(file.documents for file in self.files)

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)

    @property
    def largest_id(self) -> int:
        return max(file.largest_id for file in self.files)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of the files' contents in order: the same wherever and however often it is built."""
        return fingerprint(self.files)


def fingerprint(files: Sequence[FileIndex]) -> str:
    digests = "".join(file.digest for file in files)
    return hashlib.blake2b(f"{FORMAT_VERSION}:{digests}".encode(), digest_size=16).hexdigest()


def build_index(
    paths: str | Path | Sequence[str | Path],
    vocab_size: int,
    *,
    name: str = "--data_dir",
    report: Callable[[str], None] | None = None,
) -> IndexInfo:
    """Converts what is not yet converted. Idempotent; safe to run from several processes at once.

    Run it on one rank per node before ``open_dataset(..., build=False)`` on all of them.

    Args:
        paths: a JSONL or .bin file, a directory with ``*.jsonl`` and ``*.bin``, a glob, or a sequence of these.
        vocab_size: ids are in ``[0, vocab_size)``; also decides the width on disk of files converted now.
        name: how errors call ``paths``.
        report: is called often, with how far it is.

    Errors: DataError for a missing or empty file, bad records (the first as file:line, with their count), ids outside
    the vocabulary, files of different tokenizers, or a cache that can be written nowhere.
    """
    files: list[FileIndex] = []
    built = 0
    for source in token_files(paths, name):
        found = _find(source, report)
        if found is None:
            found = _build(source, vocab_size, report)
            built += 1
        files.append(found)
    check_vocab(files, vocab_size)
    check_tokenizers(files, name, vocab_size)
    return IndexInfo(tuple(files), built)


def find_index(source: Path) -> FileIndex:
    """The valid index of ``source``, without building or repairing. Errors: StaleIndexError, DataError (no source)."""
    if is_standalone(source):
        return open_standalone(source, verify=False)
    reasons = []
    for idx_path, bin_path in index_locations(source):
        try:
            return load_index(source, idx_path, bin_path, verify=False)
        except StaleIndexError as error:
            reasons.append(str(error))
    raise StaleIndexError("; ".join(reasons))


def check_vocab(files: Sequence[FileIndex], vocab_size: int) -> None:
    """Errors: DataError that names the first id outside ``[0, vocab_size)`` as file:line, and counts the documents."""
    if not 0 < vocab_size <= 2**32:
        raise DataError(f"model.vocab_size = {vocab_size}: must be in [1, 2^32]")
    for file in files:
        if file.largest_id < vocab_size:
            continue
        tokens, offsets = map_tokens(file), map_offsets(file)
        first, documents, last = -1, 0, -1
        for start in range(0, file.tokens, _SCAN_TOKENS):
            positions = start + np.flatnonzero(tokens[start : start + _SCAN_TOKENS] >= vocab_size)
            if not positions.size:
                continue
            first = int(positions[0]) if first < 0 else first
            # A document may reach over several blocks: it counts in the first one only.
            owners = np.unique(np.searchsorted(offsets, positions, side="right") - 1)
            documents += int(np.count_nonzero(owners > last))
            last = int(owners[-1])
        document = int(np.searchsorted(offsets, first, side="right")) - 1
        raise DataError(
            f"{file.source}:{document + 1}: token id {int(tokens[first])} at position {first - int(offsets[document])} "
            f"is not below model.vocab_size = {vocab_size} ({documents:,} of {file.documents:,} records in this file "
            f"have such ids; the largest is {file.largest_id}). Set model.vocab_size to {file.largest_id + 1} or more, "
            "or prepare the data with the model's tokenizer"
        )


def _find(source: Path, report: Callable[[str], None] | None) -> FileIndex | None:
    if is_standalone(source):
        return open_standalone(source, verify=True)
    for idx_path, bin_path in index_locations(source):
        try:
            return load_index(source, idx_path, bin_path, verify=True, report=report)
        except StaleIndexError as error:
            if os.path.exists(idx_path):
                logger.info("%s: %s", idx_path, error)
            if error.touched and os.access(idx_path.parent, os.W_OK):
                _adopt(source, idx_path)
                return load_index(source, idx_path, bin_path, verify=False)
    return None


def _build(source: Path, vocab_size: int, report: Callable[[str], None] | None) -> FileIndex:
    if not 0 < vocab_size <= 2**32:
        raise DataError(f"model.vocab_size = {vocab_size}: must be in [1, 2^32]")
    idx_path, bin_path = _place(source)
    logger.info("%s: converting to %s (once)", source, bin_path)
    try:
        # The .bin is renamed first: an .idx under its final name always finds its .bin.
        with atomic_write(idx_path) as idx, atomic_write(bin_path) as binary:
            _convert(source, vocab_size, idx, binary, report)
        return load_index(source, idx_path, bin_path, verify=False)
    except OSError as error:
        raise DataError(
            f"cannot convert {source} to {bin_path}: {error}. Free some space, or name another place in "
            "TORCHTITAN_NPU_CACHE"
        ) from error
    except StaleIndexError as error:
        raise DataError(f"{source}: changed while it was being converted ({error}); start again") from error


def _place(source: Path) -> tuple[Path, Path]:
    beside, cached = index_locations(source)
    if os.access(beside[0].parent, os.W_OK):
        return beside
    try:
        cached[0].parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"{source}: its directory cannot be written, and neither can the cache directory ({error}); name a "
            "writable one in TORCHTITAN_NPU_CACHE"
        ) from error
    return cached


def _convert(
    source: Path, vocab_size: int, idx: BinaryIO, binary: BinaryIO, report: Callable[[str], None] | None
) -> None:
    """Streams: memory is a few times the longest line, whatever the size of the file."""
    dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
    content, tokens_hash, offsets_hash = (content_hash() for _ in range(3))
    idx.write(b"\0" * IDX_HEADER_BYTES)
    binary.write(b"\0" * BIN_HEADER_BYTES)
    documents = tokens = read_bytes = 0
    largest = -1

    def write_ends(ends: npt.NDArray[np.int64]) -> None:
        offsets_hash.update(ends.data)
        idx.write(ends.data)

    write_ends(np.zeros(1, np.int64))
    next_report = time.monotonic() + _PROGRESS_SECONDS
    with source.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        for block in read_token_lines(file, source, vocab_size, dtype):
            content.update(block.text)
            tokens_hash.update(block.tokens.data)
            binary.write(block.tokens.data)
            write_ends(block.ends)
            read_bytes += len(block.text)
            documents += block.ends.size
            tokens += block.tokens.size
            largest = max(largest, block.largest_id)
            if report is not None:
                report(f"{source.name}: {read_bytes >> 20:,} of {before.st_size >> 20:,} MiB")
            if time.monotonic() >= next_report:
                next_report = time.monotonic() + _PROGRESS_SECONDS
                logger.info("%s: %.0f %% converted", source, 100 * read_bytes / max(before.st_size, 1))
        after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or read_bytes != after.st_size:
        raise DataError(f"{source}: changed while it was being converted; start again when its writer is done")
    if tokens == 0:
        raise DataError(f"{source}: all {documents:,} documents are empty")
    header = {
        "version": FORMAT_VERSION,
        "size": before.st_size,
        "mtime_ns": before.st_mtime_ns,
        "digest": content.hexdigest(),
        "dtype": dtype.str,
        "documents": documents,
        "tokens": tokens,
        "largest_id": largest,
        "tokens_digest": tokens_hash.hexdigest(),
        "offsets_digest": offsets_hash.hexdigest(),
    }
    idx.seek(0)
    idx.write(idx_header(header))
    binary.seek(0)
    binary.write(bin_header(content.hexdigest()))


def _adopt(source: Path, idx_path: Path) -> None:
    """Notes the JSONL's new time in the .idx; its content was compared."""
    mtime_ns = stat_source(source).st_mtime_ns
    with idx_path.open("rb") as old, atomic_write(idx_path) as new:
        header = read_idx_header(old)
        header["mtime_ns"] = mtime_ns
        new.write(idx_header(header))
        shutil.copyfileobj(old, new)
