"""Runs of tokens: rows of JSONL, BOS and EOS, cutting; each against a loop over lists."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_npu._data import jsonl_rows, utf8_ids
from torchtitan_npu.data.token_rows import cut, frame, join_ids

documents = st.lists(st.lists(st.integers(0, 300), max_size=12), max_size=12)


def split(tokens: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    ends = np.cumsum(lengths)
    return [tokens[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


ids = st.one_of(
    st.integers(0, 12), st.sampled_from([10**n + d for n in range(1, 10) for d in (-1, 0)]), st.integers(0, 2**32 - 1)
)


def json_rows(rows: list[list[int]]) -> bytes:
    return "".join(json.dumps({"tokens": r, "length": len(r)}, separators=(",", ":")) + "\n" for r in rows).encode()


@given(st.lists(st.lists(ids, min_size=1, max_size=9), max_size=9), st.booleans())
def test_rows_are_what_json_writes(rows: list[list[int]], narrow: bool) -> None:
    tokens, lengths = join_ids([[i % 2**16 for i in row] if narrow else row for row in rows])
    tokens = tokens.astype(np.uint16 if narrow else np.uint32)
    assert jsonl_rows(tokens, lengths) == json_rows(split(tokens, lengths))


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_rows_of_every_id(dtype: type) -> None:
    """All of 16 bits, in documents of 1 to 362 tokens (1 + 2 + … + 361 = 65,341); for 32 bits with strides."""
    tokens = np.arange(1 << 16, dtype=np.uint32)
    lengths = np.array([*range(1, 362), (1 << 16) - 65_341])
    for factor in (1,) if dtype is np.uint16 else (1, 37, 65_537):
        ids = (tokens * factor).astype(dtype)
        assert jsonl_rows(ids, lengths) == json_rows(split(ids, lengths))


def test_lengths_that_do_not_fit_are_refused() -> None:
    tokens = np.arange(5, dtype=np.uint16)
    for lengths, message in (
        ([5, 0], "of 0 tokens"),
        ([6], "of 6 tokens, where 5"),
        ([-1, 6], "-1"),
        ([3], "the last 2 of 5"),
    ):
        with pytest.raises(ValueError, match=message):
            jsonl_rows(tokens, np.array(lengths))
    for bad in (tokens[::2], tokens.astype(np.uint8), tokens.reshape(1, 5)):
        with pytest.raises(ValueError, match="tokens: must be one contiguous row"):
            jsonl_rows(bad, np.array([3]))


@given(st.lists(st.text()), st.sampled_from([None, 256]), st.sampled_from([None, 257]))
def test_utf8_ids_are_the_bytes_that_python_encodes(texts: list[str], begin: int | None, end: int | None) -> None:
    expected = [[i for i in (begin, *text.encode("utf-8"), end) if i is not None] for text in texts]
    ids, lengths = utf8_ids(texts, begin, end)
    assert (ids.dtype, lengths.dtype) == (np.uint16, np.int64)
    assert split(ids, lengths) == expected


def test_what_is_no_text_has_no_utf8() -> None:
    with pytest.raises(UnicodeEncodeError):
        utf8_ids(["a", "\ud800"], None, None)
    with pytest.raises(TypeError):
        utf8_ids(["a", b"b"], None, None)  # type: ignore[list-item]


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
