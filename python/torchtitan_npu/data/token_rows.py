"""Runs of tokens, back to back; all in numpy, document by document nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
Lengths = npt.NDArray[np.int64]


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
