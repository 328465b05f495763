"""The two things that ``prepare`` writes: JSONL rows with a mark, or the binary form. Each can go on after a stop."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, Protocol

from torchtitan_npu import _data
from torchtitan_npu.data.bin_writer import BinWriter, Written, token_dtype
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import atomic_write
from torchtitan_npu.data.index_file import idx_of
from torchtitan_npu.data.prepare_encode import Summary
from torchtitan_npu.data.token_rows import Lengths, Tokens
from torchtitan_npu.data.tokenizer import Tokenizer
from torchtitan_npu.data.tokenizer_mark import mark_bytes, mark_path

# What a worker process sends back of a chunk: JSONL rows, or tokens in their dtype on disk and the documents' lengths.
Payload = bytes | tuple[Tokens, Lengths]


class Output(Protocol):
    """Files under temporary names in one directory. Errors: OSError."""

    def append(self, payload: Any) -> None: ...

    def sync(self) -> dict[str, Any]:
        """To the disk; and what is needed to go on from here, for JSON."""
        ...

    def finish(self, summary: Summary, tokenizer: Tokenizer) -> None: ...

    def close(self) -> None: ...


def payload_of(tokens: Tokens, lengths: Lengths, output_format: str, vocab_size: int) -> Payload:
    """Documents in the form in which they are written."""
    if output_format == "jsonl":
        return _data.jsonl_rows(tokens, lengths)
    return tokens.astype(token_dtype(vocab_size), copy=False), lengths


def targets(output: Path, output_format: str) -> dict[str, Path]:
    """Temporary name to final path, in the order in which they must appear.

    Errors: DataError when a path cannot be written to, or does not suit the format.
    """
    if output_format == "jsonl":
        if output.suffix == ".bin":
            raise DataError(f"--output {output}: with --format jsonl the name must not end in .bin")
        # The mark first: the rows under their final name always find it. With older rows it says nothing (their size).
        found = {"mark": mark_path(output), "rows": output}
    else:
        if output.suffix != ".bin":
            raise DataError(f"--output {output}: with --format bin the name must end in .bin (the .idx is beside it)")
        if (source := output.with_suffix("")).exists() or source.suffix == ".jsonl":
            raise DataError(f"--output {output}: is where {source}'s converted form lies; choose another name")
        # The .idx last: under its final name it always finds its .bin.
        found = {"tokens": output, "offsets": idx_of(output)}
    for path in found.values():
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: exists and is not a regular file; name a file to write")
    return found


def open_output(directory: Path, output_format: str, vocab_size: int, state: dict[str, Any] | None) -> Output:
    """``state``: what ``sync`` returned; go on there. Errors: DataError when the files do not hold that; OSError."""
    if output_format == "jsonl":
        return _Rows(directory, state)
    return _Binary(directory, vocab_size, state)


class _Rows:
    def __init__(self, directory: Path, state: dict[str, Any] | None) -> None:
        path = directory / "rows"
        self._mark = directory / "mark"
        self._file = path.open("wb" if state is None else "r+b", buffering=1 << 20)
        if state is None:
            return
        size = state["bytes"]
        if os.fstat(self._file.fileno()).st_size < size:
            self._file.close()
            raise DataError(f"{path}: shorter than when it was written")
        self._file.truncate(size)
        self._file.seek(size)

    def append(self, payload: bytes) -> None:
        self._file.write(payload)

    def sync(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell()}

    def finish(self, summary: Summary, tokenizer: Tokenizer) -> None:
        size = self.sync()["bytes"]
        self._file.close()
        with atomic_write(self._mark) as file:
            file.write(mark_bytes(tokenizer, size))

    def close(self) -> None:
        self._file.close()


class _Binary:
    def __init__(self, directory: Path, vocab_size: int, state: dict[str, Any] | None) -> None:
        written = None if state is None else Written(**state)
        self._writer = BinWriter(directory / "tokens", directory / "offsets", token_dtype(vocab_size), written)

    def append(self, payload: tuple[Tokens, Lengths]) -> None:
        self._writer.append(*payload)

    def sync(self) -> dict[str, Any]:
        return dataclasses.asdict(self._writer.sync())

    def finish(self, summary: Summary, tokenizer: Tokenizer) -> None:
        self._writer.finish(summary.largest_id, tokenizer)

    def close(self) -> None:
        self._writer.close()
