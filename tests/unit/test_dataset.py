"""R44, R45: reading token files, their checks, and the binary cache."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from torchtitan_npu.data import DataError, build_index, open_dataset
from torchtitan_npu.data import index as index_module

GOOD = b'{"tokens": [1, 2, 3], "length": 3}\n'


def write(path: Path, *documents: list[int]) -> Path:
    path.write_text("".join(json.dumps({"tokens": d, "length": len(d)}) + "\n" for d in documents))
    return path


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHTITAN_NPU_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_documents_of_several_files_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", [7], [8, 9])
    write(tmp_path / "a.jsonl", [1, 2, 3], [], [4])
    for path in (tmp_path, f"{tmp_path}/*.jsonl", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]):
        data = open_dataset(path, 10)
        assert [data.read(i).tolist() for i in range(len(data))] == [[1, 2, 3], [], [4], [7], [8, 9]]
        assert data.lengths(0, 5).tolist() == [3, 0, 1, 1, 2] and data.lengths(1, 4).tolist() == [0, 1, 1]
        assert (data.num_documents, data.num_tokens, data.largest_id) == (5, 7, 9)
        assert data.where(4) == f"{tmp_path}/b.jsonl:2"
    assert data.read(0, 1, 2).tolist() == [2]
    for bad in (lambda: data.read(5), lambda: data.read(0, 2, 4)):
        with pytest.raises(IndexError):
            bad()


def test_length_is_optional_and_the_end_may_be_blank_or_without_newline(tmp_path: Path) -> None:
    for number, text in enumerate((b'{"tokens":[1]}\n\n', b'{"tokens":[1]}', b'{"tokens":[1],"x":true}\n \n\n')):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(text)
        assert open_dataset(path, 2).read(0).tolist() == [1]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"tokens": [1, 2], "length": 3}\n', '"length" is 3, but there are 2 tokens'),
        (b'{"tokens": [1], "length": true}\n', '"length" is true'),
        (b'{"tokens": [1, 2.0]}\n', "token 2.0 at position 1 is not an integer"),
        (b'{"tokens": [true, 2]}\n', "token True at position 0 is not an integer"),
        (b'{"tokens": [1, "2"]}\n', "token '2' at position 1 is not an integer"),
        (b'{"tokens": [1, null]}\n', "token None at position 1 is not an integer"),
        (b'{"tokens": [[1], [2, 3]]}\n', "token [1] at position 0 is not an integer"),
        (b'{"tokens": [1, -1]}\n', "token id -1 at position 1 is negative"),
        (b'{"tokens": [1, 9223372036854775808]}\n', "token id 9223372036854775808 at position 1 is not below"),
        (b'{"tokens": [1, 1000000000000000000000000]}\n', "token id (over 64 bits) at position 1 is not below"),
        (b'{"tokens": [0, 99, 100]}\n', "token id 100 at position 2 is not below model.vocab_size = 100"),
        (b'{"tokens": 5}\n', 'no list "tokens"'),
        (b'{"text": "hello"}\n', "run prepare_data.py"),
        (b"[1, 2]\n", "not an object"),
        (b'{"tokens": [1, 2\n', "not JSON"),
        (b"\xff\n", "not JSON"),
        (b"\n", "an empty line between records"),
    ],
)
def test_a_bad_record_is_named_and_counted(tmp_path: Path, line: bytes, reason: str) -> None:
    """Line 3 is the first bad one; line 5 is bad too: 2 of 5 records (an empty line spoils the record after it)."""
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + GOOD + line + GOOD + b"{}\n")
    records = 4 if line == b"\n" else 5
    with pytest.raises(DataError) as caught:
        open_dataset(path, 100)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ") and reason in message, message
    assert message.endswith(f"(2 of {records} records in this file are bad)")
    assert os.listdir(tmp_path) == ["train.jsonl"]  # no cache of bad data, no temporary file


def test_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD + GOOD[:17])
    with pytest.raises(DataError, match=r"train.jsonl:2: the last line is cut off.*write it again, or delete"):
        open_dataset(path, 100)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty"), (b"\n\n", "only empty lines"), (b'{"tokens": []}\n', "all 1 documents are empty")],
)
def test_files_without_a_token(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path, 100)


def test_missing_places(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("x")
    for path, message in (
        (tmp_path / "no.jsonl", "--data_dir: .*no.jsonl' does not exist"),
        (tmp_path, "holds no [*].jsonl"),
        (f"{tmp_path}/*.jsonl", "no file matches"),
        ("", "path is empty"),
    ):
        with pytest.raises(DataError, match=message):
            open_dataset(path, 100)


def test_a_smaller_vocabulary_than_the_cache_was_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2], [3, 70000], [70001], [70000, 70001, 5], [4])
    assert open_dataset(path, 70002).files[0].dtype == np.dtype("<u4")
    monkeypatch.setattr(index_module, "_SCAN_TOKENS", 2)  # 5 blocks; the fourth document reaches over two
    with pytest.raises(DataError) as caught:
        open_dataset(path, 259)
    assert f"{path}:2: token id 70000 at position 1 is not below model.vocab_size = 259" in str(caught.value)
    assert "3 of 5 records" in str(caught.value) and "to 70002 or more" in str(caught.value)


def test_width_on_disk(tmp_path: Path) -> None:
    """65535 is the largest uint16: it fits with vocab_size 65536; a wider model reads the same narrow cache."""
    path = write(tmp_path / "train.jsonl", [65535, 0])
    for vocab_size in (65536, 128256):
        data = open_dataset(path, vocab_size)
        assert data.files[0].dtype == np.dtype("<u2") and data.read(0).tolist() == [65535, 0]
    assert (tmp_path / "train.jsonl.bin").stat().st_size == 64 + 2 * 2
    assert (tmp_path / "train.jsonl.idx").stat().st_size == 4096 + 8 * 2
    for vocab_size in (0, 2**32 + 1):
        with pytest.raises(DataError, match="model.vocab_size"):
            open_dataset(path, vocab_size)


def test_conversion_happens_once_and_follows_the_content(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2], [3])
    first = build_index(path, 10)
    assert (first.built, first.documents, first.tokens, first.largest_id) == (1, 2, 3, 3)
    assert build_index(path, 10).built == 0
    os.utime(path, ns=(1, 1))  # touched: the content is compared, the cache stays
    assert build_index(path, 10).built == 0
    again = open_dataset(path, 10, build=False)  # and the new time was noted
    assert again.fingerprint == first.fingerprint and again.read(0).tolist() == [1, 2]
    stat = path.stat()
    write(path, [1, 2], [4])  # same size
    os.utime(path, ns=(2, 2))
    assert path.stat().st_size == stat.st_size
    changed = build_index(path, 10)
    assert changed.built == 1 and changed.fingerprint != first.fingerprint
    assert open_dataset(path, 10).read(1).tolist() == [4]


def test_fingerprint_is_the_content_not_the_place(tmp_path: Path) -> None:
    prints = []
    for name, vocab_size in (("x", 10), ("y", 100_000)):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "train.jsonl", [1, 2], [3])
        prints.append(open_dataset(tmp_path / name, vocab_size).fingerprint)
    assert prints[0] == prints[1] and len(prints[0]) == 32
    write(tmp_path / "x" / "two.jsonl", [5])
    both = [tmp_path / "x" / "train.jsonl", tmp_path / "x" / "two.jsonl"]
    assert open_dataset(both, 10).fingerprint != open_dataset(both[::-1], 10).fingerprint


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "remove", "swap"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, suffix: str, damage: str) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2], [3])
    build_index(path, 10)
    cached = tmp_path / f"train.jsonl{suffix}"
    data = bytearray(cached.read_bytes())
    if damage == "flip":
        data[-1] ^= 1
        cached.write_bytes(data)
    elif damage == "truncate":
        cached.write_bytes(data[:-1])
    elif damage == "empty":
        cached.write_bytes(b"")
    elif damage == "remove":
        cached.unlink()
    else:  # the same shape, of another corpus
        other = write(tmp_path / "other.jsonl", [1, 2], [4])
        os.utime(other, ns=(path.stat().st_mtime_ns,) * 2)
        build_index(other, 10)
        cached.write_bytes((tmp_path / f"other.jsonl{suffix}").read_bytes())
    if damage != "flip":  # ranks that do not build read no content, but see what does not belong together
        with pytest.raises(DataError, match="no valid index"):
            open_dataset(path, 10, build=False)
    assert build_index(path, 10).built == 1
    assert cached.read_bytes()[-1] == data[-1] ^ (damage == "flip")
    assert [open_dataset(path, 10, build=False).read(i).tolist() for i in (0, 1)] == [[1, 2], [3]]


def test_cache_directory_where_the_data_cannot_be_written(
    tmp_path: Path, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2])
    access = os.access  # replaced because root may write anywhere
    monkeypatch.setattr(os, "access", lambda p, mode: Path(p) != tmp_path and access(p, mode))
    assert build_index(path, 10).built == 1
    assert build_index(path, 10).built == 0
    assert sorted(os.listdir(tmp_path)) == ["cache", "train.jsonl"]
    assert len(os.listdir(cache_directory)) == 2
    assert open_dataset(path, 10, build=False).read(0).tolist() == [1, 2]
    for file in cache_directory.iterdir():
        file.unlink()
    cache_directory.rmdir()
    cache_directory.write_text("a file")
    with pytest.raises(DataError, match="TORCHTITAN_NPU_CACHE"):
        build_index(path, 10)


def test_a_failed_write_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_module, "_convert", full)
    with pytest.raises(DataError, match="No space left.*TORCHTITAN_NPU_CACHE"):
        build_index(path, 10)
    assert os.listdir(tmp_path) == ["train.jsonl"]


def test_a_file_that_grows_during_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2])
    read = index_module.read_token_lines

    def growing(*args: object) -> object:
        yield from read(*args)  # type: ignore[arg-type]
        with path.open("ab") as file:
            file.write(GOOD)

    monkeypatch.setattr(index_module, "read_token_lines", growing)
    with pytest.raises(DataError, match="changed while it was being converted"):
        build_index(path, 10)
    assert os.listdir(tmp_path) == ["train.jsonl"]


def test_other_ranks_need_the_builder(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [1, 2])
    with pytest.raises(DataError, match="no valid index.*Local rank 0 builds it"):
        open_dataset(path, 10, build=False)
    reports: list[str] = []
    build_index(path, 10, report=reports.append)
    assert open_dataset(path, 10, build=False).read(0).tolist() == [1, 2]
    os.utime(path, ns=(1, 1))
    build_index(path, 10, report=reports.append)
    assert reports == ["train.jsonl: 0 of 0 MiB", "train.jsonl: 0 MiB compared"]


def test_builders_at_the_same_time(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *[[i % 10] * (i % 5) for i in range(500)])
    results: list[tuple[int, str]] = []

    def build() -> None:
        data = open_dataset(path, 10)
        results.append((int(data.read(499).sum()), data.fingerprint))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4 and len(set(results)) == 1 and results[0][0] == 9 * 4
    assert sorted(os.listdir(tmp_path)) == ["train.jsonl", "train.jsonl.bin", "train.jsonl.idx"]
