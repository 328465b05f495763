"""The input of ``prepare``, cut into chunks of whole documents, from any position on.

Formats:
  ``text``     one document per line, UTF-8.
  ``jsonl``    one JSON object per line with a string field, ``text`` as a rule: so a document can hold newlines.
  ``parquet``  a column of strings (``prepare_parquet``).
  ``auto``     by the file's ending: .parquet; .jsonl, .json and .ndjson are ``jsonl``; all others are ``text``.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import expand_paths
from torchtitan_npu.data.input_file import COMPRESSED_SUFFIXES, InputFile, plain_name

INPUT_FORMATS = ("auto", "text", "jsonl", "parquet")
_JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
_SUFFIXES = (".txt", *_JSONL_SUFFIXES, ".parquet")
# In a directory: these endings, plain and compressed.
INPUT_SUFFIXES = tuple(s + c for s in _SUFFIXES for c in ("", *COMPRESSED_SUFFIXES))
# Small enough that a chunk's arrays stay in the processor's cache: twice as fast as 1 MiB.
CHUNK_BYTES = 256 << 10
DEFAULT_MAX_DOCUMENT_MB = 64


@dataclass(frozen=True)
class Input:
    """One file, as it was when the run began."""

    path: Path
    format: str
    size: int
    mtime_ns: int

    def identity(self) -> list[str | int]:
        return [os.path.realpath(self.path), self.format, self.size, self.mtime_ns]


@dataclass(frozen=True)
class Position:
    """Where reading goes on: the number of the file, what has been read of it, the number of its next line.

    ``offset`` counts decompressed bytes, in Parquet rows.
    """

    file: int = 0
    offset: int = 0
    line: int = 1


@dataclass(frozen=True)
class Chunk:
    """Some whole documents of one file.

    Attributes:
        data: lines of text or JSONL, or Parquet's strings (None: in ``dropped``).
        first_line: number of the first one.
        end: the position after them.
        read_bytes: of all files as they lie on disk, up to here.
        dropped: (reason, line) of documents that are not in ``data``.
    """

    path: str
    format: str
    data: bytes | list[str | None]
    first_line: int
    end: Position
    read_bytes: int
    dropped: list[tuple[str, int]] = field(default_factory=list)


def find_inputs(patterns: Sequence[str], input_format: str, exclude: Sequence[Path]) -> list[Input]:
    """The files that ``--input`` names, in order, without ``exclude`` (files, and all that lies in directories).

    Errors: DataError when nothing is left, or one is not a regular file.
    """
    found = expand_paths(patterns, INPUT_SUFFIXES, "--input")
    excluded = [os.path.realpath(path) for path in exclude]

    def is_excluded(path: Path) -> bool:
        real = os.path.realpath(path)
        return any(real == one or real.startswith(one + os.sep) for one in excluded)

    kept = [path for path in found if not is_excluded(path)]
    if not kept:
        raise DataError(f"--output {exclude[0]} is the only --input; write the tokens to another file")
    inputs = []
    for path in kept:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"{path}: not a regular file; write its content to one: a stopped run must be able to go on"
            )
        kind = _format_of(path) if input_format == "auto" else input_format
        inputs.append(Input(path, kind, status.st_size, status.st_mtime_ns))
    return inputs


def read_chunks(inputs: Sequence[Input], start: Position, text_field: str, max_document_bytes: int) -> Iterator[Chunk]:
    """Everything from ``start`` on. Where chunks end says nothing: only their documents, in order, do.

    A document over ``max_document_bytes`` is dropped without ever being held as a whole.
    Errors: DataError (unreadable, damaged, changed while being read, no such column).
    """
    before = sum(one.size for one in inputs[: start.file])
    for number in range(start.file, len(inputs)):
        one = inputs[number]
        begin = start if number == start.file else Position(number)
        if one.format == "parquet":
            from torchtitan_npu.data.prepare_parquet import read_parquet

            chunks = read_parquet(one, begin, before, text_field, max_document_bytes)
        else:
            chunks = _read_lines(one, begin, before, max_document_bytes)
        yield from chunks
        if _version(one.path) != (one.size, one.mtime_ns):
            raise DataError(f"{one.path}: changed while it was being read; start again when its writer is done")
        before += one.size


def _version(path: Path) -> tuple[int, int] | None:
    """Size and time of a file, None where it has gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def too_long(max_document_bytes: int) -> str:
    """Why such a document is dropped."""
    return f"longer than {max_document_bytes >> 20} MiB (--max_document_mb)"


def _format_of(path: Path) -> str:
    suffix = Path(plain_name(path)).suffix.lower()
    if suffix == ".parquet":
        return "parquet"
    return "jsonl" if suffix in _JSONL_SUFFIXES else "text"


def _read_lines(one: Input, begin: Position, before: int, max_document_bytes: int) -> Iterator[Chunk]:
    line = begin.line
    held: list[bytes] = []  # the start of a line whose end has not been read
    held_bytes = 0
    skipping = False  # the line is too long already: what is read of it is thrown away
    with InputFile(one.path) as file:
        file.skip_to(begin.offset)

        def chunk(data: bytes, unread: int, dropped: list[tuple[str, int]]) -> Chunk:
            nonlocal line
            first = line
            line += data.count(b"\n") + len(dropped)
            end = Position(begin.file, file.offset - unread, line)
            # Where a line was dropped it is the first one: the others come after it.
            return Chunk(str(one.path), one.format, data, first + len(dropped), end, before + file.consumed, dropped)

        first_block = begin.offset == 0
        while block := file.read(CHUNK_BYTES):
            if first_block:
                block = _without_byte_order_mark(block, one.path)
                first_block = False
            dropped: list[tuple[str, int]] = []
            newline = block.find(b"\n")
            length = held_bytes + (newline if newline >= 0 else len(block))
            if length > max_document_bytes:
                held, held_bytes, skipping = [], length, True
            if newline < 0:
                if not skipping:
                    held.append(block)
                held_bytes = length
                continue
            if skipping:
                dropped.append((too_long(max_document_bytes), line))
                block, skipping = block[newline + 1 :], False
            cut = block.rfind(b"\n") + 1
            data = b"".join([*held, block[:cut]])
            held = [block[cut:]]
            held_bytes = len(held[0])
            yield chunk(data, held_bytes, dropped)
        if skipping:
            yield chunk(b"", 0, [(too_long(max_document_bytes), line)])
        elif held_bytes:
            yield chunk(b"".join(held), 0, [])


def _without_byte_order_mark(block: bytes, path: Path) -> bytes:
    if block.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: is UTF-16; convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    return block.removeprefix(b"\xef\xbb\xbf")
