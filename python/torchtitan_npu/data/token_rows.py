"""Runs of tokens, back to back, and the JSONL rows that stand for them; all in numpy, document by document nowhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
Lengths = npt.NDArray[np.int64]

_ROW_BEGIN = b'{"tokens":['
# Arrays of this many tokens stay in the processor's cache.
_TOKENS_AT_ONCE = 1 << 16
_MARK = ord("\n")


def jsonl_rows(tokens: Tokens, lengths: Lengths) -> bytes:
    """One ``{"tokens":[…],"length":n}`` line per document.

    Args:
        tokens: [sum of lengths] unsigned, all documents back to back; ids below 10^7.
        lengths: [documents] int64, each at least 1.
    """
    text = b"".join(_numbers(tokens, np.cumsum(lengths) - lengths))
    parts = [b""] * (2 * len(lengths) + 1)
    parts[1::2] = text.split(b"\n")[1:]
    row_ends = _SHORT_ROW_ENDS if int(lengths.max()) < len(_SHORT_ROW_ENDS) else _RowEnds()
    parts[2::2] = map(row_ends.__getitem__, lengths.tolist())
    parts[0] = _ROW_BEGIN
    parts[-1] = parts[-1].removesuffix(_ROW_BEGIN)
    return b"".join(parts)


def _numbers(tokens: Tokens, starts: Lengths) -> Iterator[bytearray]:
    """The ids with a comma between them, and a newline before each document.

    Each id becomes 4 or 8 bytes, padded with NUL, which is then deleted. What is between two ids stands before the
    second: so documents are told apart by where they start.
    """
    table = _number_table(int(tokens.max()))
    for first in range(0, len(tokens), _TOKENS_AT_ONCE):
        block = tokens[first : first + _TOKENS_AT_ONCE]
        text = bytearray(len(block) * table.itemsize)
        np.take(table, block, out=np.frombuffer(text, table.dtype), mode="clip")  # "raise" would go through a copy
        inside = slice(*np.searchsorted(starts, [first, first + len(block)]))
        np.frombuffer(text, np.uint8)[(starts[inside] - first) * table.itemsize] = _MARK
        yield text.translate(None, b"\0")


class _RowEnds:
    """What stands between the ids of a document of a length and those of the next one."""

    def __getitem__(self, length: int) -> bytes:
        return b'],"length":%d}\n' % length + _ROW_BEGIN


_SHORT_ROW_ENDS = [_RowEnds()[length] for length in range(1 << 12)]


def _number_table(largest_id: int) -> npt.NDArray[Any]:
    """[ids] of ``,123`` as 4 bytes (ids below 1000) or 8, for ids up to ``largest_id`` at least."""
    if largest_id >= 10**7:
        raise ValueError(f"token id {largest_id}: not supported: ids of 10^7 and more in JSONL; write --format bin")
    # A few sizes only, so that they are made once.
    size = 1000 if largest_id < 1000 else max(1 << 16, 1 << largest_id.bit_length())
    return _make_table(size)


@functools.lru_cache(maxsize=3)
def _make_table(size: int) -> npt.NDArray[Any]:
    width = 4 if size == 1000 else 8
    table = np.zeros((size, width), np.uint8)
    table[:, 0] = ord(",")
    table[:, 1:] = np.arange(size).astype(f"S{width - 1}").view(np.uint8).reshape(size, width - 1)
    return table.view(f"<u{width}").ravel()


def join_ids(documents: list[list[int]]) -> tuple[Tokens, Lengths]:
    """Lists of ids, back to back as uint32, and their lengths."""
    lengths = np.fromiter(map(len, documents), np.int64, len(documents))
    tokens = np.empty(int(lengths.sum()), np.uint32)
    end = 0
    for ids in documents:
        tokens[end : end + len(ids)] = ids
        end += len(ids)
    return tokens, lengths


def frame(
    tokens: Tokens,
    lengths: Lengths,
    *,
    bos_id: int | None,
    with_bos: bool | None,
    eos_id: int | None,
    with_eos: bool | None,
) -> tuple[Tokens, Lengths]:
    """Documents that begin with ``bos_id`` and end with ``eos_id`` once (True), not (False), or as they are (None).

    One that is there is not added again; only one is taken away.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    filled = lengths > 0
    if bos_id is not None and with_bos is not None:
        has = filled.copy()
        has[filled] = tokens[starts[filled]] == bos_id
        if with_bos:
            tokens, lengths = _insert(tokens, lengths, starts, ~has, bos_id)
        else:
            tokens, lengths = _delete(tokens, lengths, starts, has)
        ends = np.cumsum(lengths)
        filled = lengths > 0
    if eos_id is not None and with_eos is not None:
        has = filled.copy()
        has[filled] = tokens[ends[filled] - 1] == eos_id
        if with_eos:
            tokens, lengths = _insert(tokens, lengths, ends, ~has, eos_id)
        else:
            tokens, lengths = _delete(tokens, lengths, ends - 1, has)
    return tokens, lengths


def cut(tokens: Tokens, lengths: Lengths, most: int) -> tuple[Tokens, Lengths]:
    """The first ``most`` tokens of each document."""
    if not (lengths > most).any():
        return tokens, lengths
    place = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return tokens[place < most], np.minimum(lengths, most)


def _insert(
    tokens: Tokens, lengths: Lengths, at: Lengths, where: npt.NDArray[np.bool_], token: int
) -> tuple[Tokens, Lengths]:
    """``token`` before position ``at[d]`` of ``tokens``, for the documents d that ``where`` names."""
    places = at[where] + np.arange(np.count_nonzero(where))
    out = np.empty(len(tokens) + len(places), tokens.dtype)
    is_old = np.ones(len(out), np.bool_)
    is_old[places] = False
    out[is_old] = tokens
    out[places] = token
    return out, lengths + where


def _delete(tokens: Tokens, lengths: Lengths, at: Lengths, where: npt.NDArray[np.bool_]) -> tuple[Tokens, Lengths]:
    keep = np.ones(len(tokens), np.bool_)
    keep[at[where]] = False
    return tokens[keep], lengths - where
