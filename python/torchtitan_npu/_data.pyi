"""Types of the native part of ``data``, ``csrc/bindings/data_module.cpp``; see ``_C.pyi``. It needs no torch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class Error(RuntimeError):
    """A damaged index, met while reading."""

class ParsedLines:
    """What ``parse_token_lines`` took."""

    @property
    def bytes(self) -> int:
        """Whole lines from the start of the text, with their newlines."""
    @property
    def documents(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def largest_id(self) -> int:
        """-1 where there is no token."""
    @property
    def refused(self) -> bool:
        """The line behind ``bytes`` is whole and was not taken; otherwise the text ends within it."""
    @property
    def refused_at(self) -> int:
        """How far the refused line was understood, in bytes from its start."""

def most_tokens(bytes: int) -> int:
    """The most tokens that so much text can hold."""

def most_documents(bytes: int) -> int:
    """The most documents that so much text can hold."""

def parse_token_lines(
    text: bytes | bytearray | memoryview,
    at_end: bool,
    vocab_size: int,
    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32],
    ends: npt.NDArray[np.int64],
    first_end: int,
) -> ParsedLines:
    """Reads plain lines ``{"tokens": [...], "length": n}`` until the text ends or one is refused.

    Args:
        at_end: the text is the end of the file; its last line needs no newline.
        tokens: out, with room for ``most_tokens`` of the text's length.
        ends: out, with room for ``most_documents``: behind each document the number of tokens, from ``first_end`` on.
    """

def jsonl_rows(tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]) -> bytes:
    """One line ``{"tokens":[1,22,333],"length":3}`` per document.

    Args:
        tokens: [sum of lengths] all documents back to back.
        lengths: [documents] each at least 1.
    """

def utf8_ids(
    texts: list[str], begin: int | None, end: int | None
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int64]]:
    """The bytes of the texts' UTF-8 back to back, each text after ``begin`` and before ``end``; and how many each has.

    Errors: UnicodeEncodeError for an unpaired surrogate.
    """

class TokenStream:
    """Token files as one stream: all documents in order, each with ``eos_id`` behind it where that is not None."""

    def __init__(self, *, files: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]], eos_id: int | None) -> None:
        """``files``: tokens (uint16 or uint32) and offsets [documents + 1] of each; kept, not copied."""
    @property
    def size(self) -> int:
        """Positions: tokens, and an end for each document where there are ends."""
    def start_of(self, document: int) -> int:
        """The position where a document begins; ``size`` for the one behind the last."""
    def sample(
        self, begin: int, count: int, seq_len: int, pad_id: int, inputs: int, labels: int, document_ids: int
    ) -> None:
        """Cuts ``count`` positions from ``begin`` on, 1 <= count <= seq_len + 1; behind its end the stream begins anew.

        The last three are addresses of ``seq_len`` int64: ids; the next ids of the same document, or -100; the number
        of the document within the sample, from 0. What is left of a row is padding: ``pad_id``, -100, one more number.
        """

class Permutation:
    """A random order of ``0 .. size - 1`` that is computed, not stored; another one for each (seed, stream)."""

    def __init__(self, *, size: int, seed: int, stream: int) -> None: ...
    def at(self, index: int) -> int: ...
