"""Which tokenizer a token file was prepared with: in the header of a binary one, beside a JSONL in a file of its own.

``train.jsonl.tokenizer`` is one JSON object: ``name``, ``fingerprint`` and ``vocab_size`` of the tokenizer, and
``jsonl_bytes``, the size of the JSONL that it is about. A JSONL of another size has been written anew by somebody else:
then the mark says nothing. A file without a mark is not checked.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torchtitan_npu.data.index_file import FileIndex

logger = logging.getLogger(__name__)

MARK_SUFFIX = ".tokenizer"
# Of a name, as JSON. The end of a long path is what tells it apart; the header of a binary file has room for 4 KiB.
_NAME_BYTES = 1000
# A mark takes some 1,200 bytes at most; anything larger is some other file.
_MARK_BYTES = 64 << 10


@dataclass(frozen=True)
class TokenizerMark:
    """``fingerprint``: equal for tokenizers that turn any text into the same ids. ``name`` is for people."""

    name: str
    fingerprint: str
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TokenizerMark:
        name = os.path.abspath(tokenizer.name) if os.path.exists(tokenizer.name) else tokenizer.name
        name = name[-_NAME_BYTES:]
        while len(json.dumps(name)) > _NAME_BYTES:  # up to twelve bytes a character
            name = name[1:]
        return cls(name, tokenizer.fingerprint, tokenizer.vocab_size)

    @classmethod
    def from_json(cls, values: Any) -> TokenizerMark:
        """Errors: ValueError when that is no mark."""
        if not isinstance(values, dict):
            raise ValueError("not an object")
        name, fingerprint, vocab_size = (values.get(key) for key in ("name", "fingerprint", "vocab_size"))
        if not isinstance(name, str) or not isinstance(fingerprint, str):
            raise ValueError("name and fingerprint must be strings")
        if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
            raise ValueError(f"vocab_size = {vocab_size!r}: must be an integer above 0")
        return cls(name, fingerprint, vocab_size)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def mark_path(jsonl: Path) -> Path:
    """Where the mark of a JSONL lies. Of a symbolic link: beside the file that it leads to."""
    return Path(os.path.realpath(jsonl) + MARK_SUFFIX)


def mark_bytes(tokenizer: Tokenizer, jsonl_bytes: int) -> bytes:
    """The content of the mark of a JSONL of that size."""
    return json.dumps({**TokenizerMark.of(tokenizer).to_json(), "jsonl_bytes": jsonl_bytes}).encode() + b"\n"


def read_mark(jsonl: Path, jsonl_bytes: int) -> TokenizerMark | None:
    """The mark of a JSONL of that size. None, with a line in the log where one lies there, when it says nothing."""
    path = mark_path(jsonl)
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(_MARK_BYTES))
        mark = TokenizerMark.from_json(values)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        logger.info("%s: ignored: not what prepare_data.py writes beside a JSONL (%s)", path, error)
        return None
    if values.get("jsonl_bytes") != jsonl_bytes:
        logger.info(
            "%s: ignored: it belongs to a %s of %s bytes, which has %s now: its tokenizer is not known",
            path,
            jsonl.name,
            values.get("jsonl_bytes"),
            jsonl_bytes,
        )
        return None
    return mark


def check_tokenizers(files: Sequence[FileIndex], name: str, vocab_size: int) -> None:
    """Errors: DataError that names two files of different tokenizers, or one whose tokenizer has ids beyond the model.

    Args:
        name: how errors call where the files come from.
        vocab_size: the model's.
    """
    first: FileIndex | None = None
    for file in files:
        if file.tokenizer is None:
            continue
        first = first or file
        assert first.tokenizer is not None
        if file.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise DataError(
                f"{name}: files of different tokenizers: {first.source} was prepared with {_shown(first, file)}, "
                f"{file.source} with {_shown(file, first)}; the same id means different text in them. Prepare them "
                f"with one tokenizer, or leave one out{_escape(first, file)}"
            )
        if file.tokenizer.vocab_size > vocab_size:
            raise DataError(
                f"{name}: {file.source} was prepared with {file.tokenizer.name}, whose ids go up to "
                f"{file.tokenizer.vocab_size - 1}, but model.vocab_size = {vocab_size}. Set model.vocab_size to "
                f"{file.tokenizer.vocab_size} or more, or prepare the data with the model's tokenizer{_escape(file)}"
            )


def _shown(file: FileIndex, other: FileIndex) -> str:
    """The tokenizer's name, with its fingerprint where the name alone does not tell the two apart."""
    assert file.tokenizer is not None and other.tokenizer is not None
    if file.tokenizer.name != other.tokenizer.name:
        return file.tokenizer.name
    return f"{file.tokenizer.name} (fingerprint {file.tokenizer.fingerprint})"


def _escape(*files: FileIndex) -> str:
    """The way out for somebody who knows better: a JSONL without its mark is not checked."""
    marks = [str(mark_path(file.source)) for file in files if not file.is_standalone]
    return f"; or remove {marks[0]} if it is wrong" if marks else ""
