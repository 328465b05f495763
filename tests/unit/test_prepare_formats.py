"""Input of `prepare`: compressed files, Parquet, several inputs, bounds, and what is wrong with files."""

from __future__ import annotations

import gzip
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data import prepare_read
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_read import Position, find_inputs, read_chunks

BOS = 256
TEXT = "".join(f"line {i} ünï\n" for i in range(3000))
DOCUMENTS = [f"line {i} ünï" for i in range(3000)]


def run(*inputs: Path | str, out: Path, flags: tuple[str, ...] = ()) -> int:
    return main(["--input", *map(str, inputs), "--output", str(out), "--tokenizer", "byte", *flags])


def texts(path: Path) -> list[str]:
    """Decoded by hand: ids below 256 are UTF-8."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(row["tokens"][0] == BOS and row["length"] == len(row["tokens"]) for row in rows)
    return [bytes(row["tokens"][1:]).decode() for row in rows]


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


def write_parquet(path: Path, **columns: object) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path, row_group_size=700)


def make(path: Path, kind: str) -> Path:
    """The 3000 documents in one file."""
    if kind.startswith("parquet"):
        write_parquet(path, text=DOCUMENTS)
        data = path.read_bytes()
    elif kind.startswith("jsonl"):
        data = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()
    else:
        data = TEXT.encode()
    if kind.endswith(".gz"):
        middle = len(data) // 2
        data = gzip.compress(data[:middle]) + gzip.compress(data[middle:])  # two members, as `cat` makes them
    elif kind.endswith(".zst"):
        middle = len(data) // 2
        data = zstd(data[:middle]) + zstd(data[middle:])
    path.write_bytes(data)
    return path


KINDS = [f"{kind}{ending}" for kind in ("txt", "jsonl", "parquet") for ending in ("", ".gz", ".zst")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_from_every_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """All the same documents; and what a stopped run reads on from any chunk's end is the rest, with its numbers."""
    path = make(tmp_path / f"in.{kind}", kind)
    assert run(path, out=tmp_path / "out.jsonl") == 0
    assert texts(tmp_path / "out.jsonl") == DOCUMENTS
    monkeypatch.setattr(prepare_read, "CHUNK_BYTES", 5_000)
    if kind.startswith("parquet"):
        monkeypatch.setattr("torchtitan_npu.data.prepare_parquet.CHUNK_BYTES", 5_000)
    inputs = find_inputs([str(path)], "auto", [])
    assert inputs[0].format == {"t": "text", "j": "jsonl", "p": "parquet"}[kind[0]]

    def read(start: Position) -> list[prepare_read.Chunk]:
        return list(read_chunks(inputs, start, "text", 1 << 20))

    chunks = read(Position())
    assert len(chunks) > 5
    assert chunks[-1].end.line == 3001 and chunks[-1].read_bytes <= path.stat().st_size
    for number in (0, 3, len(chunks) - 1):
        rest = read(chunks[number].end)
        assert b"".join(map(content, rest)) == b"".join(map(content, chunks[number + 1 :]))
        assert [c.end for c in rest][-1:] == [c.end for c in chunks[number + 1 :]][-1:]
        assert not rest or rest[0].first_line == chunks[number].end.line


def content(chunk: prepare_read.Chunk) -> bytes:
    return chunk.data if isinstance(chunk.data, bytes) else "\n".join(map(str, [*chunk.data, ""])).encode()


def test_several_inputs_and_a_directory_of_mixed_files(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"b\n"))
    (folder / "a.jsonl").write_text('{"body": "a"}\n')
    (folder / "c.ndjson").write_text('{"body": "c"}\n')
    (folder / "ignored.md").write_text("no")
    (tmp_path / "z.txt").write_text("z")
    out = folder / "out.jsonl"  # inside of the input
    for _ in range(2):
        assert run(tmp_path / "z.txt", folder, f"{tmp_path}/*/c.nd*[n]", out=out) == 1  # c.ndjson twice
        assert run(tmp_path / "z.txt", folder, out=out, flags=("--text_field", "body")) == 0
        assert texts(out) == ["z", "a", "b", "c"]
    assert run(f"{tmp_path}/**", out=out, flags=("--input_format", "text")) == 0  # all files, not the work directory
    assert texts(out) == ['{"body": "a"}', "b", '{"body": "c"}', "no", "z"]


def test_the_first_bytes_tell_the_compression(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_bytes(gzip.compress(b"a\n"))
    assert run(tmp_path / "in.txt", out=tmp_path / "out.jsonl") == 0
    assert texts(tmp_path / "out.jsonl") == ["a"]
    (tmp_path / "in.txt.gz").write_text("a\n")
    assert run(tmp_path / "in.txt.gz", out=tmp_path / "out.jsonl") == 1
    assert "in.txt.gz: is called .gz, but begins with neither" in caplog.text


@pytest.mark.parametrize("kind", ["txt.gz", "txt.zst", "parquet"])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_damaged_files(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, damage: str) -> None:
    path = make(tmp_path / f"in.{kind}", kind)
    data = bytearray(path.read_bytes())
    if damage == "cut":
        del data[-20:]
    else:
        for i in range(len(data) // 2, len(data) // 2 + 60):
            data[i] ^= 0xFF
    path.write_bytes(data)
    assert run(path, out=tmp_path / "out.jsonl") == 1
    assert f"{path}: damaged or" in caplog.text and "can be read" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_a_line_over_the_bound_is_dropped_without_being_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of 1 MiB (kept) and 1 MiB + 1 byte, and one of 400 MiB (compressed): first, in the middle, at the end."""
    resource = pytest.importorskip("resource")
    limit = 1 << 20
    huge = gzip.compress(b"x" * (64 << 20), 1) * 6 + gzip.compress(b"x" * (16 << 20), 1)
    lines = [b"y" * limit, b"z" * (limit + 1), b"ok", None, b"end", None]
    with (tmp_path / "in.txt.gz").open("wb") as file:
        for number, line in enumerate(lines):
            file.write(huge if line is None else gzip.compress(line, 1))
            if number + 1 < len(lines):
                file.write(gzip.compress(b"\n"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    flags = ("--max_document_mb", "1", "--no_truncate")
    with caplog.at_level(logging.INFO):
        assert run(tmp_path / "in.txt.gz", out=tmp_path / "out.jsonl", flags=flags) == 0
    assert texts(tmp_path / "out.jsonl") == ["y" * limit, "ok", "end"]
    where = f"{tmp_path}/in.txt.gz"
    assert f"3 dropped: longer than 1 MiB (--max_document_mb) (first: {where}:2)" in caplog.text
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB; half of the line


def test_bad_lines_keep_their_numbers_around_a_long_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_bytes(b"a\n" + b"x" * (2 << 20) + b"\nb\n\xff\n\nc")
    with caplog.at_level(logging.INFO):
        assert run(tmp_path / "in.txt", out=tmp_path / "out.jsonl", flags=("--max_document_mb", "1")) == 0
    assert texts(tmp_path / "out.jsonl") == ["a", "b", "c"]
    for reason, line in (("longer than 1 MiB (--max_document_mb)", 2), ("not UTF-8", 4), ("empty line", 5)):
        assert f"1 dropped: {reason} (first: {tmp_path}/in.txt:{line})" in caplog.text


def test_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """Not at what else Unicode calls a line's end; a NUL is a character like others."""
    (tmp_path / "in.txt").write_text("a\x85b\u2028c\x0bd\re\x00\r\n\x1cf\u3000\n", newline="")
    assert run(tmp_path / "in.txt", out=tmp_path / "out.jsonl") == 0
    assert texts(tmp_path / "out.jsonl") == ["a\x85b\u2028c\x0bd\re\x00", "f"]


def test_utf_16_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_text("abc\n", encoding="utf-16")
    assert run(tmp_path / "in.txt", out=tmp_path / "out.jsonl") == 1
    assert "in.txt: is UTF-16; convert it" in caplog.text


def test_token_files_as_input_are_pointed_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.jsonl").write_text('{"tokens": [1], "length": 1}\n')
    assert run(tmp_path / "in.jsonl", out=tmp_path / "out.jsonl") == 1
    assert 'no string field "text": the line holds tokens already' in caplog.text


def test_a_file_that_changes_under_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text(TEXT)
    inputs = find_inputs([str(path)], "auto", [])
    with pytest.raises(DataError, match=r"in.txt: changed while it was being read"):
        for _ in read_chunks(inputs, Position(), "text", 1 << 20):
            path.write_text(TEXT + "more\n")


def test_things_that_are_not_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run("/dev/null", out=tmp_path / "out.jsonl") == 1
    assert "/dev/null: not a regular file" in caplog.text


def test_parquet_columns_nulls_and_types(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    offsets = pyarrow.py_buffer(np.array([0, 2, 3], "<i4").tobytes())
    bad = pyarrow.Array.from_buffers(pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"ok\xff")])
    columns = {"text": ["a", None, " "], "word": pyarrow.array(["x", "y", "x"]).dictionary_encode(), "n": [1, 2, 3]}
    write_parquet(tmp_path / "in.parquet", **columns)
    write_parquet(tmp_path / "bad.parquet", text=bad)
    out = tmp_path / "out.jsonl"
    with caplog.at_level(logging.INFO):
        assert run(tmp_path / "in.parquet", tmp_path / "bad.parquet", out=out) == 0
    assert texts(out) == ["a", "ok"]
    for reason, place in (("null", "in.parquet:2"), ("empty text", "in.parquet:3"), ("not UTF-8", "bad.parquet:2")):
        assert f"1 dropped: {reason} (first: {tmp_path}/{place})" in caplog.text
    assert run(tmp_path / "in.parquet", out=out, flags=("--text_field", "word")) == 0
    assert texts(out) == ["x", "y", "x"]
    for field, message in (("none", "no column 'none', but 'text', 'word', 'n'"), ("n", "column 'n' is of type int64")):
        assert run(tmp_path / "in.parquet", out=out, flags=("--text_field", field)) == 1
        assert message in caplog.text


@pytest.mark.parametrize(("module", "kind"), [("zstandard", "txt.zst"), ("pyarrow", "parquet")])
def test_without_the_optional_packages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, module: str, kind: str
) -> None:
    path = make(tmp_path / f"in.{kind}", kind)
    monkeypatch.setitem(sys.modules, module, None)
    assert run(path, out=tmp_path / "out.jsonl") == 1
    assert f"pip install {module} (it is in this package's extra 'data')" in caplog.text


@pytest.mark.parametrize(
    ("flags", "row"),
    [
        ((), [BOS, 97]),
        (("--bos", "never"), [97]),
        (("--eos",), [BOS, 97, 257]),
        (("--bos", "never", "--eos", "always"), [97, 257]),
        (("--bos", "--eos", "never"), [BOS, 97]),
    ],
)
def test_bos_and_eos(tmp_path: Path, flags: tuple[str, ...], row: list[int]) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    assert run(tmp_path / "in.txt", out=tmp_path / "out.jsonl", flags=flags) == 0
    assert json.loads((tmp_path / "out.jsonl").read_text())["tokens"] == row
