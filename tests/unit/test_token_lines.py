"""The native reader of JSONL takes no line that Python's parser refuses, and reads what it takes as Python does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from torchtitan_npu import _data
from torchtitan_npu.data import DataError
from torchtitan_npu.data import token_lines as token_lines_module
from torchtitan_npu.data.records import RecordError, parse_record
from torchtitan_npu.data.token_lines import read_token_lines

VOCAB = 1000
PATH = Path("train.jsonl")


def native(text: bytes, vocab_size: int = VOCAB, *, at_end: bool = True) -> tuple[_data.ParsedLines, list[list[int]]]:
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    tokens, ends = np.empty(_data.most_tokens(len(text)), dtype), np.empty(_data.most_documents(len(text)), np.int64)
    parsed = _data.parse_token_lines(text, at_end, vocab_size, tokens, ends, 0)
    starts = [0, *ends[: parsed.documents].tolist()]
    return parsed, [tokens[a:b].tolist() for a, b in zip(starts, starts[1:], strict=False)]


def python(line: bytes, vocab_size: int = VOCAB) -> list[int] | None:
    try:
        return parse_record(line, vocab_size).tolist()
    except RecordError:
        return None


PLAIN = [
    b'{"tokens": [1, 2, 3], "length": 3}',
    b'{"length":3,"tokens":[1,2,3]}',
    b' {\t"tokens" : [ 0 ,999\t, 10 ] \r}\r',
    b'{"tokens": []}',
    b'{"tokens": [   ], "length": 0}',
    b'{"tokens": [1, 22, 333, 4, 55, 666, 7]}',
    '{"id": "a\\n\\u00e9\\"é€𝄞", "x": -1.5e-3, "tokens": [5]}'.encode(),
    b'{"tokens": [1], "a": true, "b": false, "c": null, "d": 0, "e": 1E+9, "": ""}',
]
ODD = [  # right, and left to Python
    b'{"tokens": [1], "a": {"b": [1, 2]}}',
    b'{"tokens": [1], "tokens": [2]}',
    b'{"length": 5, "tokens": [1], "length": 1}',
    b'{"t\\u006fkens": [1]}',
    b'{"tokens": [1], "a": NaN, "b": -Infinity}',
    b'\xef\xbb\xbf{"tokens": [1]}',
    b'{"tokens": [-0, 1]}',
    b'{"tokens": [1], "a": "\xed\xa0\x80"}',  # a surrogate: Python lets it pass
]
BAD = [
    b'{"tokens": [1, 2], "length": 3}',
    b'{"tokens": [1, 2.0]}',
    b'{"tokens": [1, 2e0]}',
    b'{"tokens": [01]}',
    b'{"tokens": [1, -1]}',
    b'{"tokens": [1000]}',
    b'{"tokens": [18446744073709551617]}',
    b'{"tokens": [12345678]}',
    b'{"tokens": [true]}',
    b'{"tokens": [[1]]}',
    b'{"tokens": ["1"]}',
    b'{"tokens": [1,]}',
    b'{"tokens": [,1]}',
    b'{"tokens": [1 2]}',
    b'{"tokens": [1]',
    b'{"tokens": [1',
    b'{"tokens": [1]}}',
    b'{"tokens": [1]} x',
    b'{"tokens": [1],}',
    b'{"tokens": [1], "length": 1.0}',
    b'{"tokens": [1], "length": "1"}',
    b'{"tokens": 1}',
    b'{"length": 0}',
    b"{}",
    b"[1]",
    b"",
    b'{"tokens": [1], "a": "\xff"}',
    b'{"tokens": [1], "a": "\xc0\x80"}',
    b'{"tokens": [1], "a": "\x01"}',
    b'{"tokens": [1], "a": "\\x"}',
    b'{"tokens": [1], "a": "\\u12g4"}',
    b'{"tokens": [1], "a": 1.}',
    b'{"tokens": [1], "a": -}',
    b'{"tokens": [1], "a": 00}',
    b'{"tokens": [1\x0b]}',
    b'{"tokens": [1]}\x00',
    b"{'tokens': [1]}",
]


@pytest.mark.parametrize("line", PLAIN)
def test_plain_lines_are_taken(line: bytes) -> None:
    parsed, documents = native(line + b"\n")
    assert not parsed.refused and parsed.bytes == len(line) + 1
    assert documents == [python(line)]


@pytest.mark.parametrize("line", ODD)
def test_odd_lines_are_left_to_python(line: bytes) -> None:
    assert native(line)[0].refused and python(line) is not None


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_are_taken_by_neither(line: bytes) -> None:
    for text in (line, line + b"\n"):
        if text:
            parsed, documents = native(text)
            assert parsed.refused and parsed.bytes == 0 and documents == []
        assert python(text) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, VOCAB + 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=12)
RECORDS = st.builds(
    lambda tokens, length, more, order: dict(
        sorted([("tokens", tokens), *([("length", length)] if length is not None else []), *more.items()], key=order)
    ),
    TOKENS | st.lists(JSON, max_size=4),
    st.none() | st.integers(0, 12),
    st.dictionaries(st.text(max_size=4), JSON, max_size=2),
    st.sampled_from([None, lambda item: len(item[0]), lambda item: item[0][::-1]]),
)
LINES = st.builds(
    lambda record, separators, ascii_only: json.dumps(record, separators=separators, ensure_ascii=ascii_only).encode(
        "utf-8", "surrogatepass"
    ),
    RECORDS,
    st.sampled_from([(", ", ": "), (",", ":"), (" ,  ", "\t:")]),
    st.booleans(),
)


@st.composite
def changed_lines(draw: st.DrawFn) -> bytes:
    """A line, with some bytes replaced, removed or put in."""
    line = bytearray(draw(LINES))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(line)))
        line[at : at + draw(st.integers(0, 2))] = draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b",", b"]", b"}"])
        )
    return bytes(line).replace(b"\n", b" ")


@settings(max_examples=250, deadline=None)
@given(changed_lines(), st.sampled_from([3, VOCAB, 1 << 16, 1 << 32]))
@example(b'{"tokens": [1, 2], "length": 2}', VOCAB)
def test_what_is_taken_is_what_python_reads(line: bytes, vocab_size: int) -> None:
    parsed, documents = native(line, vocab_size)
    if line and not parsed.refused:
        assert documents == [python(line, vocab_size)]
    assert 0 <= parsed.refused_at <= len(line)


def collect(text: bytes, block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """(tokens, ends, largest id, bytes), or the error's message."""
    monkeypatch.setattr(token_lines_module, "_BLOCK_BYTES", block_bytes)
    tokens: list[int] = []
    ends: list[int] = []
    largest, read = -1, b""
    try:
        for block in read_token_lines(io.BytesIO(text), PATH, VOCAB, np.uint16):  # type: ignore[arg-type]
            tokens += block.tokens.tolist()
            ends += block.ends.tolist()
            largest = max(largest, block.largest_id)
            read += bytes(block.text)
    except DataError as error:
        return str(error)
    return tokens, ends, largest, read


@settings(max_examples=80, deadline=None)
@given(
    st.lists(LINES | st.sampled_from([*PLAIN, *ODD, *BAD, b" "]), max_size=6),
    st.sampled_from([b"", b"\n", b"\n\n"]),
    st.integers(1, 70),
)
def test_a_file_reads_the_same_in_blocks_of_any_size(lines: list[bytes], ending: bytes, block_bytes: int) -> None:
    text = b"\n".join(lines) + ending
    with pytest.MonkeyPatch.context() as patch:
        found = collect(text, block_bytes, patch)
        assert found == collect(text, 1 << 16, patch)
    while lines and not lines[-1].strip():
        lines.pop()
    if not isinstance(found, str):
        documents = [python(line) for line in lines]
        assert None not in documents and found[3] == text
        assert found[0] == [token for document in documents for token in document or []]
        assert found[1] == np.cumsum([len(document or []) for document in documents]).tolist()
    else:
        assert not lines or None in [python(line) if line.strip() else None for line in lines]


def test_long_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain one of 200 kB grows the buffer; odd ones over the limit, and endless ones, are refused."""
    tokens = [7, 77, 777] * 20_000
    plain = json.dumps({"tokens": tokens, "length": len(tokens)}).encode()
    found = collect(plain + b'\n{"tokens": [1]}', 64, monkeypatch)
    assert isinstance(found, tuple) and found[0] == [*tokens, 1] and found[1] == [60_000, 60_001]
    monkeypatch.setattr(token_lines_module, "_LONGEST_ODD_LINE_BYTES", 1000)
    odd = plain.replace(b"77, 777", b"77, 7.5", 1)
    message = collect(odd + b"\n", 64, monkeypatch)
    assert "train.jsonl:1: a line of 0 MiB is read only in the plain form" in str(message)
    assert "at byte 20 this one has .5, 7, 77, 777" in str(message) and "1 of 1 records" in str(message)
    monkeypatch.setattr(token_lines_module, "LONGEST_LINE_BYTES", 4096)
    assert "train.jsonl:2: the line is longer than" in str(collect(PLAIN[0] + b"\n" + plain, 64, monkeypatch))


def test_arguments_of_the_native_reader() -> None:
    text = PLAIN[0]
    tokens, ends = np.empty(100, np.uint16), np.empty(100, np.int64)
    for bad, message in (
        ((text, True, 0, tokens, ends, 0), "vocab_size = 0"),
        ((text, True, 65537, tokens, ends, 0), "vocab_size = 65537: must be in .1, 2.16."),
        (
            (text, True, 10, tokens[:3], ends, 0),
            "34 bytes of text may hold 18 tokens in 3 documents; there is room for 3",
        ),
        ((text, True, 10, tokens, ends[:1], 0), "in 1$"),
        ((text, True, 10, tokens[::2], ends, 0), "tokens: must be one contiguous row"),
        ((text, True, 10, np.empty(100, np.uint8), ends, 0), "tokens: must be one contiguous row of elements of 4"),
    ):
        with pytest.raises(ValueError, match=message):
            _data.parse_token_lines(*bad)  # type: ignore[arg-type]
