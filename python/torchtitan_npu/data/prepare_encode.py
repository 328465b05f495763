"""A chunk of input to tokens, or to why a document is dropped. What the processes of ``prepare`` run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_read import DEFAULT_MAX_DOCUMENT_MB, Chunk
from torchtitan_npu.data.token_rows import Lengths, Tokens, cut
from torchtitan_npu.data.tokenizer import Tokenizer

DEFAULT_MAX_SEQ_LEN = 8192
SPECIAL_CHOICES = ("auto", "always", "never")
_WITH = {"auto": None, "always": True, "never": False}
_decode_json = json.JSONDecoder().raw_decode


@dataclass(frozen=True)
class Options:
    """How documents become tokens.

    Attributes:
        tokenizer: as ``load_tokenizer`` takes it.
        max_seq_len: tokens kept of a document; None: all.
        bos, eos: "auto" (what the tokenizer itself does), "always" or "never".
        output_format: "jsonl" or "bin".
        text_field: of JSONL objects, or Parquet's column.
        max_document_mb: MiB of text; longer documents are dropped.
    """

    tokenizer: str
    max_seq_len: int | None = DEFAULT_MAX_SEQ_LEN
    bos: str = "auto"
    eos: str = "auto"
    output_format: str = "jsonl"
    text_field: str = "text"
    max_document_mb: int = DEFAULT_MAX_DOCUMENT_MB


@dataclass
class Summary:
    """What became of the input. ``dropped`` maps a reason to ``(count, first file:line)``."""

    documents: int = 0
    tokens: int = 0
    largest_id: int = -1
    cut_documents: int = 0
    cut_tokens: int = 0
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        count, first = self.dropped.get(reason, (0, where))
        self.dropped[reason] = (count + 1, first)

    def add(self, other: Summary) -> None:
        """Adds a later part of the same input."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.largest_id = max(self.largest_id, other.largest_id)
        self.cut_documents += other.cut_documents
        self.cut_tokens += other.cut_tokens
        for reason, (more, where) in other.dropped.items():
            count, first = self.dropped.get(reason, (0, where))
            self.dropped[reason] = (count + more, first)

    def to_json(self) -> dict[str, Any]:
        return vars(self).copy()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Summary:
        dropped = {reason: (count, where) for reason, (count, where) in values["dropped"].items()}
        return cls(**{**values, "dropped": dropped})


def check_special_tokens(options: Options, tokenizer: Tokenizer) -> None:
    """Errors: DataError where ``--bos`` or ``--eos`` asks for a token that the tokenizer does not name."""
    for flag, choice, token, what in (
        ("bos", options.bos, tokenizer.bos_id, "begin"),
        ("eos", options.eos, tokenizer.eos_id, "end"),
    ):
        if choice != "auto" and token is None:
            raise DataError(
                f"--{flag} {choice}: tokenizer {tokenizer.name} names no {what}-of-document token; set {flag}_token in "
                f"its tokenizer_config.json, or leave --{flag} out"
            )


def encode_chunk(chunk: Chunk, tokenizer: Tokenizer, options: Options) -> tuple[Tokens, Lengths, Summary]:
    """The tokens of the chunk's documents back to back, the length of each (at least 1), and what became of them."""
    summary = Summary()
    for reason, line in chunk.dropped:
        summary.drop(reason, f"{chunk.path}:{line}")
    texts, lines = documents(chunk, options.text_field, summary)
    if not texts:
        return np.empty(0, np.uint16), np.empty(0, np.int64), summary
    tokens, lengths = tokenizer.encode_joined(texts, _WITH[options.bos], _WITH[options.eos])
    for place in np.flatnonzero(lengths == 0):
        summary.drop("no tokens: the tokenizer knows none of its characters", f"{chunk.path}:{lines[place]}")
    lengths = lengths[lengths > 0]
    if options.max_seq_len is not None:
        whole = lengths
        tokens, lengths = cut(tokens, lengths, options.max_seq_len)
        summary.cut_documents = int(np.count_nonzero(lengths < whole))
        summary.cut_tokens = int(whole.sum() - lengths.sum())
    summary.documents = len(lengths)
    summary.tokens = len(tokens)
    summary.largest_id = int(tokens.max(initial=0)) if len(tokens) else -1
    return tokens, lengths, summary


def documents(chunk: Chunk, text_field: str, summary: Summary) -> tuple[list[str], Any]:
    """The texts of a chunk, stripped, and the number of each one's line. Counts in ``summary`` what is dropped.

    ``chunk.dropped`` is not looked at.
    """
    lines: Sequence[str | None]
    texts: list[str]
    if isinstance(chunk.data, bytes):
        lines, reasons = _decode_lines(chunk.data)
        texts, empty = [*map(str.strip, lines)], "empty line"
    else:
        lines, reasons = chunk.data, {}
        texts, empty = ["" if line is None else line.strip() for line in lines], "empty text"
    if chunk.format == "jsonl":
        _take_field(texts, text_field, reasons)
    numbers = range(chunk.first_line, chunk.first_line + len(texts))
    if all(texts):
        return texts, numbers
    for place, (line, text) in enumerate(zip(lines, texts, strict=True)):
        if not text and line is not None:
            summary.drop(reasons.get(place, empty), f"{chunk.path}:{numbers[place]}")
    return [text for text in texts if text], [n for n, text in zip(numbers, texts, strict=True) if text]


def _decode_lines(data: bytes) -> tuple[list[str], dict[int, str]]:
    """The lines, and why some of them, by place, are empty."""
    reasons: dict[int, str] = {}
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        lines = []
        for place, line in enumerate(data.split(b"\n")):
            try:
                lines.append(line.decode("utf-8"))
            except UnicodeDecodeError:
                lines.append("")
                reasons[place] = "not UTF-8"
    if lines[-1] == "" and len(lines) - 1 not in reasons:
        lines.pop()  # after the last newline
    return lines, reasons


def _take_field(texts: list[str], text_field: str, reasons: dict[int, str]) -> None:
    """Replaces each line of JSON by its text, or by "" with a reason."""
    for place, line in enumerate(texts):
        if not line:
            continue
        text, reason = _field_of(line, text_field)
        texts[place] = text
        if reason:
            reasons[place] = reason


def _field_of(line: str, text_field: str) -> tuple[str, str]:
    """(text, "") or ("", why the line is dropped)."""
    try:
        record, end = _decode_json(line)
    except (ValueError, RecursionError):
        return "", "not JSON"
    if end != len(line):
        return "", "not JSON"
    value = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        tokens = isinstance(record, dict) and text_field != "tokens" and isinstance(record.get("tokens"), list)
        return "", f'no string field "{text_field}"' + (": the line holds tokens already" if tokens else "")
    text = value.strip()
    if not text:
        return "", "empty text"
    if "\\u" in line and not _is_encodable(text):
        return "", "unpaired surrogate in the text"
    return text, ""


def _is_encodable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def describe_drops(summary: Summary) -> list[str]:
    """One line per reason."""
    return [f"{count:,} dropped: {reason} (first: {where})" for reason, (count, where) in summary.dropped.items()]
