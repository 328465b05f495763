"""Writes a token file in its binary form, NAME.bin and NAME.idx, without a JSONL: see ``index_file`` for the format."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.index_file import (
    BIN_HEADER_BYTES,
    FORMAT_VERSION,
    IDX_HEADER_BYTES,
    bin_header,
    content_hash,
    idx_header,
    standalone_digest,
)
from torchtitan_npu.data.token_rows import Lengths, Tokens
from torchtitan_npu.data.tokenizer import Tokenizer
from torchtitan_npu.data.tokenizer_mark import TokenizerMark

_READ_BYTES = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The width on disk of ids in ``[0, vocab_size)``: uint16 or uint32, little-endian."""
    if not 0 < vocab_size <= 2**32:
        raise DataError(f"vocabulary of {vocab_size}: must be in [1, 2^32]")
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True)
class Written:
    """How far a BinWriter has come. ``tokens_digest`` tells whether the file still holds what was written."""

    documents: int = 0
    tokens: int = 0
    tokens_digest: str = ""
    offsets_digest: str = ""


class BinWriter:
    """Appends documents to a .bin and an .idx that are not valid before ``finish`` has written their headers.

    Memory is that of one ``append``. Nothing is renamed: the caller writes to temporary names.
    Errors: OSError (a full disk).
    """

    def __init__(self, bin_path: Path, idx_path: Path, dtype: npt.DTypeLike, written: Written | None = None) -> None:
        """``written``: go on there, as ``sync`` returned it; what the files hold beyond is cut off.

        Errors: DataError when the files do not hold what they held then.
        """
        self.dtype = np.dtype(dtype)
        self._hashes = [content_hash() for _ in range(2)]
        self.documents = 0
        self.tokens = 0
        mode = "w+b" if written is None else "r+b"
        self._binary = bin_path.open(mode, buffering=1 << 20)
        self._idx = idx_path.open(mode, buffering=1 << 20)
        if written is None:
            self._binary.write(b"\0" * BIN_HEADER_BYTES)
            self._idx.write(b"\0" * IDX_HEADER_BYTES)
            self._write_offsets(np.zeros(1, "<i8"))
            return
        try:
            self._resume(written)
        except BaseException:
            self.close()
            raise

    def append(self, tokens: Tokens, lengths: Lengths) -> None:
        """Documents back to back: ``tokens`` [sum of lengths] in the writer's dtype, ``lengths`` [documents] int64."""
        assert tokens.dtype == self.dtype and tokens.size == int(lengths.sum())
        self._write(self._binary, self._hashes[0], tokens)
        self._write_offsets(self.tokens + np.cumsum(lengths, dtype="<i8"))
        self.documents += lengths.size
        self.tokens += tokens.size

    def sync(self) -> Written:
        """Everything so far to the disk; a writer can go on from there after a stop of any kind."""
        for file in (self._binary, self._idx):
            file.flush()
            os.fsync(file.fileno())
        tokens_digest, offsets_digest = (one.copy().hexdigest() for one in self._hashes)
        return Written(self.documents, self.tokens, tokens_digest, offsets_digest)

    def finish(self, largest_id: int, tokenizer: Tokenizer) -> None:
        """Writes the headers, syncs, and closes the files."""
        written = self.sync()
        header = {
            "version": FORMAT_VERSION,
            "source": None,
            "digest": standalone_digest(written.tokens_digest, written.offsets_digest),
            "dtype": self.dtype.str,
            "documents": written.documents,
            "tokens": written.tokens,
            "largest_id": largest_id,
            "tokens_digest": written.tokens_digest,
            "offsets_digest": written.offsets_digest,
            "tokenizer": TokenizerMark.of(tokenizer).to_json(),
        }
        self._binary.seek(0)
        self._binary.write(bin_header(str(header["digest"])))
        self._idx.seek(0)
        self._idx.write(idx_header(header))
        self.sync()
        self.close()

    def close(self) -> None:
        for file in (self._binary, self._idx):
            file.close()

    def _write(self, file: Any, digest: Any, values: npt.NDArray[Any]) -> None:
        data = np.ascontiguousarray(values).data.cast("B") if values.size else b""
        file.write(data)
        digest.update(data)

    def _write_offsets(self, offsets: npt.NDArray[np.int64]) -> None:
        self._write(self._idx, self._hashes[1], offsets)

    def _resume(self, written: Written) -> None:
        """Reads what was written: a hash cannot be stored half-way, and the files are checked by the way."""
        ends = (
            BIN_HEADER_BYTES + written.tokens * self.dtype.itemsize,
            IDX_HEADER_BYTES + 8 * (written.documents + 1),
        )
        digests = (written.tokens_digest, written.offsets_digest)
        for file, start, end, digest, want in zip(
            (self._binary, self._idx), (BIN_HEADER_BYTES, IDX_HEADER_BYTES), ends, self._hashes, digests, strict=True
        ):
            file.seek(start)
            left = end - start
            while left and (block := file.read(min(_READ_BYTES, left))):
                digest.update(block)
                left -= len(block)
            if left or digest.copy().hexdigest() != want:
                raise DataError(f"{file.name}: does not hold what was written")
            file.truncate(end)
            file.seek(end)
        self.documents = written.documents
        self.tokens = written.tokens
