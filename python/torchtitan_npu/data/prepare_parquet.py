"""Parquet input of ``prepare``: a column of strings, through pyarrow (the extra ``data``)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.input_file import InputFile
from torchtitan_npu.data.prepare_read import CHUNK_BYTES, Chunk, Input, Position, too_long


def read_parquet(one: Input, begin: Position, before: int, column: str, max_document_bytes: int) -> Iterator[Chunk]:
    """Chunks of rows; "lines" are rows, from 1. Errors: DataError."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(
            f"{one.path}: is Parquet, and the package pyarrow is not installed: pip install pyarrow (it is in this "
            "package's extra 'data')"
        ) from error
    row = begin.offset
    with _seekable(one) as file:
        try:
            opened = parquet.ParquetFile(file, page_checksum_verification=True)
            _check_column(one, opened.schema_arrow, column, pyarrow)
            rows = opened.metadata.num_rows
            for values in _batches(opened, column, begin.offset, pyarrow):
                texts: list[str | None] = []
                dropped: list[tuple[str, int]] = []
                first = row + 1
                for value in values:
                    row += 1
                    # The encoder counts rows from `first`: what is dropped leaves an empty place.
                    text, reason = _text(value, max_document_bytes)
                    texts.append(text)
                    if reason:
                        dropped.append((reason, row))
                end = Position(begin.file, row, row + 1)
                read = before + one.size * row // max(rows, 1)
                yield Chunk(str(one.path), "parquet", texts, first, end, read, dropped)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{one.path}: damaged or not Parquet, {row:,} rows can be read ({str(error).splitlines()[0]}); get it "
                "again from its source, or leave it out of --input"
            ) from error


@contextlib.contextmanager
def _seekable(one: Input) -> Iterator[BinaryIO]:
    """Parquet is read from its end: a compressed file is decompressed to an unnamed file in the temporary directory."""
    with InputFile(one.path) as file:
        if not file.compressed:
            with one.path.open("rb") as plain:
                yield plain
            return
        with tempfile.TemporaryFile() as unpacked:
            try:
                while block := file.read(1 << 20):
                    unpacked.write(block)
            except OSError as error:
                raise DataError(
                    f"{one.path}: cannot be decompressed to {tempfile.gettempdir()}: {error.strerror}; name a larger "
                    "place in TMPDIR, or decompress it yourself (Parquet is compressed inside)"
                ) from error
            unpacked.seek(0)
            yield unpacked


def _check_column(one: Input, schema: Any, column: str, pyarrow: Any) -> None:
    names = schema.names
    if names.count(column) != 1:
        raise DataError(
            f"{one.path}: no column {column!r}, but {', '.join(map(repr, names))}; name one in --text_field"
        )
    kind = schema.field(column).type
    value_type = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(test(value_type) for test in is_text):
        raise DataError(
            f"{one.path}: column {column!r} is of type {kind}, not string; name another one in --text_field"
        )


def _batches(opened: Any, column: str, skip_rows: int, pyarrow: Any) -> Iterator[list[Any]]:
    """The column's values from row ``skip_rows`` on, as bytes: what is not UTF-8 must cost one row, not the batch."""
    for group in range(opened.metadata.num_row_groups):
        meta = opened.metadata.row_group(group)
        if skip_rows >= meta.num_rows:
            skip_rows -= meta.num_rows
            continue
        size = sum(
            meta.column(i).total_uncompressed_size
            for i in range(meta.num_columns)
            if meta.column(i).path_in_schema == column
        )
        batch_rows = max(1, min(meta.num_rows, CHUNK_BYTES * meta.num_rows // max(size, 1)))
        for batch in opened.iter_batches(batch_rows, row_groups=[group], columns=[column]):
            if skip_rows >= batch.num_rows:
                skip_rows -= batch.num_rows
                continue
            values = batch.column(0).slice(skip_rows)
            skip_rows = 0
            if pyarrow.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            yield values.cast(pyarrow.large_binary()).to_pylist()


def _text(value: bytes | None, max_document_bytes: int) -> tuple[str | None, str]:
    """(text, why it is dropped)."""
    if value is None:
        return None, "null"
    if len(value) > max_document_bytes:
        return None, too_long(max_document_bytes)
    try:
        return value.decode("utf-8"), ""
    except UnicodeDecodeError:
        return None, "not UTF-8"
