"""Runs of tokens: rows of JSONL, BOS and EOS, cutting; each against a loop over lists."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.data import token_rows
from torchtitan_npu.data.token_rows import cut, frame, join_ids, jsonl_rows

documents = st.lists(st.lists(st.integers(0, 300), max_size=12), max_size=12)


def split(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [tokens[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


@settings(deadline=None)  # the first of each width makes its table
@given(st.lists(st.lists(st.integers(0, 300_000), min_size=1, max_size=9), min_size=1, max_size=9), st.booleans())
def test_rows_are_what_json_writes(rows: list[list[int]], small: bool) -> None:
    if small:
        rows = [[i % 1000 for i in row] for row in rows]
    expected = "".join(json.dumps({"tokens": r, "length": len(r)}, separators=(",", ":")) + "\n" for r in rows)
    assert jsonl_rows(*join_ids(rows)) == expected.encode()


def test_rows_across_the_blocks_in_which_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 tokens; documents begin at, before and after their edges, one spans three of them."""
    rows = [[1, 2], [3, 4], [5] * 10, [6], [7, 8, 9]]
    whole = jsonl_rows(*join_ids(rows))
    monkeypatch.setattr(token_rows, "_TOKENS_AT_ONCE", 4)
    assert jsonl_rows(*join_ids(rows)) == whole
    assert [json.loads(line)["tokens"] for line in whole.splitlines()] == rows


def test_ids_that_have_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match="10000000: not supported"):
        jsonl_rows(np.array([10**7], np.uint32), np.array([1]))


@given(documents, st.sampled_from([None, True, False]), st.sampled_from([None, True, False]))
def test_frame(texts: list[list[int]], with_bos: bool | None, with_eos: bool | None) -> None:
    bos, eos = 1, 2
    expected = []
    for ids in texts:
        row = list(ids)
        if with_bos is True and row[:1] != [bos]:
            row.insert(0, bos)
        if with_bos is False and row[:1] == [bos]:
            del row[0]
        if with_eos is True and row[-1:] != [eos]:
            row.append(eos)
        if with_eos is False and row[-1:] == [eos]:
            del row[-1]
        expected.append(row)
    got = frame(*join_ids(texts), bos_id=bos, with_bos=with_bos, eos_id=eos, with_eos=with_eos)
    assert split(*got) == expected


@given(documents, st.integers(1, 13))
def test_cut(texts: list[list[int]], most: int) -> None:
    assert split(*cut(*join_ids(texts), most)) == [ids[:most] for ids in texts]
