"""One line of a JSONL token file: ``{"tokens": [...], "length": n}``, ``length`` optional.

The verdict and the message for every line that the native reader (``token_lines``) does not take.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

_SHOWN = 60


class RecordError(ValueError):
    """Why one line is not a record. The caller adds file and line."""


def parse_record(line: bytes, vocab_size: int) -> npt.NDArray[np.int64]:
    """The tokens of one line, int64 [length], each in ``[0, vocab_size)``.

    Errors: RecordError with the rule that is broken.
    """
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not JSON: {error}: {shorten(line)}") from error
    if not isinstance(record, dict):
        raise RecordError(f'not an object with "tokens": {shorten(line)}')
    tokens = record.get("tokens")
    if not isinstance(tokens, list):
        hint = '; it has "text": run prepare_data.py on it first' if "text" in record else ""
        raise RecordError(f'no list "tokens"{hint}: {shorten(line)}')
    if "length" in record:
        length = record["length"]
        if isinstance(length, bool) or not isinstance(length, int) or length != len(tokens):
            raise RecordError(f'"length" is {json.dumps(length)[:_SHOWN]}, but there are {len(tokens)} tokens')
    return _token_array(tokens, line, vocab_size)


def _token_array(tokens: list[Any], line: bytes, vocab_size: int) -> npt.NDArray[np.int64]:
    if not tokens:
        return np.empty(0, np.int64)
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError):  # ragged nesting, or beyond 64 bits
        array = np.asarray(["?"])
    # numpy turns [true, 2] into [1, 2]; a literal is the only way a bool can get here.
    literal = b"true" in line or b"false" in line
    if array.ndim != 1 or array.dtype != np.int64 or literal:
        for position, token in enumerate(tokens):
            if isinstance(token, bool) or not isinstance(token, int):
                raise RecordError(f"token {_shown(token)} at position {position} is not an integer")
            if not 0 <= token < vocab_size:
                raise RecordError(_out_of_range(token, position, vocab_size))
        array = np.asarray(tokens, np.int64)
    if array.min() < 0 or array.max() >= vocab_size:
        position = int(np.argmax((array < 0) | (array >= vocab_size)))
        raise RecordError(_out_of_range(int(array[position]), position, vocab_size))
    return array


def _out_of_range(token: int, position: int, vocab_size: int) -> str:
    if token < 0:
        return f"token id {_shown(token)} at position {position} is negative"
    return (
        f"token id {_shown(token)} at position {position} is not below model.vocab_size = {vocab_size}: raise "
        "model.vocab_size above the largest id, or prepare the data with the model's tokenizer"
    )


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "(over 64 bits)"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def shorten(line: bytes) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
