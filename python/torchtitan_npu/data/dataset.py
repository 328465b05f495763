"""Random access to tokenised documents on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_npu import _data
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.index import build_index, check_vocab, find_index, fingerprint
from torchtitan_npu.data.index_file import FileIndex, StaleIndexError, map_offsets, map_tokens
from torchtitan_npu.data.standalone import token_files
from torchtitan_npu.data.tokenizer_mark import check_tokenizers


class TokenDataset:
    """Documents of one or more converted files, numbered through in file order. Memory-mapped, read-only.

    Attributes:
        num_documents, num_tokens: totals over all files.
        largest_id: the largest token id.
        fingerprint: 32 hexadecimal digits of the content; equal on all ranks that read the same data.
        vocab_size: all ids are in ``[0, vocab_size)``.
    """

    def __init__(self, files: Sequence[FileIndex], vocab_size: int) -> None:
        self.files = tuple(files)
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint(self.files)
        self.num_documents = sum(file.documents for file in self.files)
        self.num_tokens = sum(file.tokens for file in self.files)
        self.largest_id = max(file.largest_id for file in self.files)
        self._tokens = [map_tokens(file) for file in self.files]
        self._offsets = [map_offsets(file) for file in self.files]
        self._first_document = np.cumsum([0] + [file.documents for file in self.files])

    def __len__(self) -> int:
        return self.num_documents

    def lengths(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """[stop - start] int64: tokens of each of these documents, 0 allowed."""
        parts = []
        for offsets, first in zip(self._offsets, self._first_document, strict=False):
            local = offsets[max(start - first, 0) : max(stop - first + 1, 0)]
            parts.append(np.diff(local))
        return np.concatenate(parts)

    def stream(self, eos_id: int | None) -> _data.TokenStream:
        """All documents as one stream, each with ``eos_id`` behind it unless that is None."""
        return _data.TokenStream(files=list(zip(self._tokens, self._offsets, strict=True)), eos_id=eos_id)

    def read(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Tokens ``[start, stop)`` of a document, uint16 or uint32: a view of the mapped file, no copy."""
        file, local = self._locate(document)
        begin, end = int(self._offsets[file][local]), int(self._offsets[file][local + 1])
        stop = end - begin if stop is None else stop
        if not 0 <= start <= stop <= end - begin:
            raise IndexError(f"tokens [{start}, {stop}) of document {document}, which has {end - begin}")
        return self._tokens[file][begin + start : begin + stop]

    def where(self, document: int) -> str:
        """``file:line`` of a document in the JSONL."""
        file, local = self._locate(document)
        return f"{self.files[file].source}:{local + 1}"

    def _locate(self, document: int) -> tuple[int, int]:
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        file = int(np.searchsorted(self._first_document, document, side="right")) - 1
        return file, document - int(self._first_document[file])


def open_dataset(
    path: str | Path | Sequence[str | Path], vocab_size: int, *, name: str = "--data_dir", build: bool = True
) -> TokenDataset:
    """Opens token files, JSONL or binary.

    Args:
        path: a file, a directory with ``*.jsonl`` and ``*.bin``, a glob, or a sequence of these.
        vocab_size: the model's; every id must be below it.
        name: how errors call ``path``.
        build: convert what is not converted. Under several ranks only local rank 0 builds (``build_index``); after
            that, all pass False.

    Errors: DataError, as ``build_index``; with ``build=False`` also when there is no valid index.
    """
    if build:
        return TokenDataset(build_index(path, vocab_size, name=name).files, vocab_size)
    files = [_indexed(source) for source in token_files(path, name)]
    check_vocab(files, vocab_size)
    check_tokenizers(files, name, vocab_size)
    return TokenDataset(files, vocab_size)


def _indexed(source: Path) -> FileIndex:
    try:
        return find_index(source)
    except StaleIndexError as error:
        raise DataError(
            f"{source}: no valid index ({error}). Local rank 0 builds it: see its log; or build it before the start "
            "with torchtitan_npu.data.build_index"
        ) from error
