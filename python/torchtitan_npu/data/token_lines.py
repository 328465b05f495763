"""Reads a JSONL token file in blocks: native code for plain lines, ``records.parse_record`` for all others.

Memory: a few MiB, or up to about four times the longest line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_npu import _data
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.records import RecordError, parse_record, shorten

_BLOCK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 2 << 30
# Python's parser takes some ten times the line's size in memory.
_LONGEST_ODD_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class Block:
    """Whole lines. The arrays are views that the next block overwrites.

    Attributes:
        text: the lines' bytes.
        tokens: [tokens of all documents] uint16 or uint32.
        ends: [documents] int64; the tokens of the file up to and with each document.
        largest_id: -1 where there is no token.
    """

    text: memoryview
    tokens: npt.NDArray[Any]
    ends: npt.NDArray[np.int64]
    largest_id: int


def read_token_lines(file: RawIOBase, source: Path, vocab_size: int, dtype: npt.DTypeLike) -> Iterator[Block]:
    """The file's blocks, which together are all its bytes.

    Record number i, from 0, stands on line i + 1: empty lines are allowed at the end only.

    Args:
        file: at its start, blocking.
        dtype: of the ids, uint16 or uint32.

    Errors: DataError, after the whole file has been read, that names the first bad record as file:line and counts the
    bad ones. It comes last so that one run tells how much is wrong. A line over LONGEST_LINE_BYTES ends it at once.
    """
    return _Reader(file, source, vocab_size, np.dtype(dtype)).blocks()


class _Reader:
    def __init__(self, file: RawIOBase, source: Path, vocab_size: int, dtype: np.dtype[Any]) -> None:
        self._file, self._source, self._vocab_size, self._dtype = file, source, vocab_size, dtype
        self._allocate(_BLOCK_BYTES)
        self._tokens_so_far = 0
        self._lines = self._records = self._bad = 0
        self._first_bad = ""
        self._empty_since = 0  # number of the first of the empty lines just read, 0 if none

    def blocks(self) -> Iterator[Block]:
        filled = 0  # bytes of the buffer, which begin at the start of a line
        while True:
            read = self._file.readinto(self._text[filled:]) or 0
            filled += read
            taken = 0
            for block in self._parse(filled, at_end=read == 0):
                taken += len(block.text)
                yield block
            if read == 0:
                break
            filled -= taken
            if filled == len(self._buffer):
                self._grow()
            else:
                self._text[:filled] = bytes(self._text[taken : taken + filled])
        if self._bad:
            raise DataError(f"{self._first_bad} ({self._bad:,} of {self._records:,} records in this file are bad)")
        if self._records == 0:
            what = "the file is empty" if self._lines == 0 else "the file holds only empty lines"
            raise DataError(
                f'{self._source}: {what}; expected one {{"tokens": [...], "length": n}} per line (prepare_data.py)'
            )

    def _allocate(self, size: int) -> None:
        self._buffer = bytearray(size)
        self._text = memoryview(self._buffer)
        self._tokens = np.empty(_data.most_tokens(size), self._dtype)
        self._ends = np.empty(_data.most_documents(size), np.int64)

    def _grow(self) -> None:
        """For a line that does not fit."""
        old = self._buffer
        if len(old) >= LONGEST_LINE_BYTES:
            raise DataError(
                f"{self._source}:{self._lines + 1}: the line is longer than {LONGEST_LINE_BYTES >> 30} GiB; write one "
                'document {"tokens": [...], "length": n} per line'
            )
        self._allocate(2 * len(old))
        self._text[: len(old)] = old

    def _parse(self, filled: int, *, at_end: bool) -> Iterator[Block]:
        """The whole lines among the first bytes of the buffer."""
        at = understood = 0
        while at < filled:
            if not self._empty_since:  # a record behind an empty line is bad, however plain
                parsed = _data.parse_token_lines(
                    self._text[at:filled], at_end, self._vocab_size, self._tokens, self._ends, self._tokens_so_far
                )
                if parsed.bytes:
                    self._lines += parsed.documents
                    self._records += parsed.documents
                    yield self._block(at, at + parsed.bytes, parsed.tokens, parsed.documents, parsed.largest_id)
                    at += parsed.bytes
                if not parsed.refused:
                    return
                understood = parsed.refused_at
            stop = self._buffer.find(b"\n", at, filled) + 1
            if not stop and not at_end:
                return
            stop = stop or filled
            tokens = self._odd_line(bytes(self._text[at:stop]), understood)
            if tokens is None:
                yield self._block(at, stop, 0, 0, -1)
            else:
                self._tokens[: tokens.size] = tokens
                self._ends[0] = self._tokens_so_far + tokens.size
                yield self._block(at, stop, tokens.size, 1, int(tokens.max(initial=-1)))
            at = stop

    def _block(self, start: int, stop: int, tokens: int, documents: int, largest_id: int) -> Block:
        self._tokens_so_far += tokens
        return Block(self._text[start:stop], self._tokens[:tokens], self._ends[:documents], largest_id)

    def _odd_line(self, line: bytes, understood: int) -> npt.NDArray[np.int64] | None:
        """The tokens of a line that native code did not take; None if it is empty or bad."""
        self._lines += 1
        if not line.strip():
            self._empty_since = self._empty_since or self._lines
            return None
        self._records += 1
        place = self._lines
        try:
            if self._empty_since:
                place, self._empty_since = self._empty_since, 0
                raise RecordError("an empty line between records")
            if len(line) > _LONGEST_ODD_LINE_BYTES:
                raise RecordError(
                    f"a line of {len(line) >> 20} MiB is read only in the plain form "
                    f'{{"tokens": [integers], "length": n}}, with a right length; at byte {understood} this one has '
                    f"{shorten(line[understood : understood + 80])}"
                )
            return parse_record(line, self._vocab_size)
        except RecordError as error:
            self._bad += 1
            reason = str(error)
            if not line.endswith(b"\n") and reason.startswith("not JSON"):
                reason = (
                    f"the last line is cut off: {shorten(line)}. Whatever wrote the file did not finish: write it "
                    "again, or delete that line"
                )
            self._first_bad = self._first_bad or f"{self._source}:{place}: {reason}"
            return None
