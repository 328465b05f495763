"""Binary token files without a JSONL: writing, reading, what counts as data, and what is wrong with pairs."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data import DataError, build_index, open_dataset
from torchtitan_npu.data.bin_writer import BinWriter, token_dtype
from torchtitan_npu.data.index_file import idx_of
from torchtitan_npu.data.standalone import token_files
from torchtitan_npu.data.tokenizer import ByteTokenizer


def prepare(folder: Path, name: str, *texts: str, tokenizer: str = "byte", flags: tuple[str, ...] = ()) -> Path:
    folder.mkdir(exist_ok=True)
    source = folder / "source.txt"
    source.write_text("".join(text + "\n" for text in texts))
    argv = ["--input", str(source), "--output", str(folder / name), "--tokenizer", tokenizer, *flags]
    assert main(argv) == 0
    source.unlink()
    return folder / name


def test_the_same_documents_as_through_jsonl(tmp_path: Path) -> None:
    texts = ["hello", "a", "ünï" * 50]
    binary = prepare(tmp_path, "train.bin", *texts)
    rows = prepare(tmp_path / "rows", "train.jsonl", *texts)
    for data in (open_dataset(binary, 259), open_dataset(binary, 259, build=False)):
        through = open_dataset(rows, 259)
        assert [data.read(i).tolist() for i in range(3)] == [through.read(i).tolist() for i in range(3)]
        assert (data.num_documents, data.num_tokens, data.largest_id) == (3, 6 + 2 + 251, 256)
        assert data.files[0].dtype == np.dtype("<u2")
    (mark,) = [file.tokenizer for file in data.files]
    assert mark is not None and (mark.name, mark.vocab_size) == ("byte", 259)
    # 64 bytes and 259 tokens of 2; 4096 bytes and 4 offsets of 8
    assert (binary.stat().st_size, idx_of(binary).stat().st_size) == (64 + 259 * 2, 4096 + 4 * 8)
    with pytest.raises(DataError, match=r"train.bin:1: token id 256 at position 0 is not below model.vocab_size = 256"):
        open_dataset(binary, 256)


def test_its_identity_is_its_content(tmp_path: Path) -> None:
    prints = []
    for number, texts in enumerate((["ab", "c"], ["ab", "c"], ["a", "bc"], ["ab", "d"])):
        prints.append(build_index(prepare(tmp_path / str(number), "t.bin", *texts, flags=("--bos", "never")), 259))
    assert [p.built for p in prints] == [0] * 4
    first, same, cut_elsewhere, other = (p.fingerprint for p in prints)
    assert first == same and len({first, cut_elsewhere, other}) == 3


def test_width_follows_the_vocabulary(tmp_path: Path) -> None:
    assert [token_dtype(n).str for n in (1, 65536, 65537, 2**32)] == ["<u2", "<u2", "<u4", "<u4"]
    for bad in (0, 2**32 + 1):
        with pytest.raises(DataError, match="vocabulary"):
            token_dtype(bad)
    writer = BinWriter(tmp_path / "t.bin", tmp_path / "t.idx", token_dtype(100_000))
    writer.append(np.array([99_999, 1, 2], "<u4"), np.array([1, 2]))
    writer.finish(99_999, ByteTokenizer())
    data = open_dataset(tmp_path / "t.bin", 100_000)
    assert [data.read(i).tolist() for i in range(2)] == [[99_999], [1, 2]]


def test_what_counts_in_a_directory_and_a_glob(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A JSONL with its cache, a standalone pair, a foreign .bin, and a cache whose JSONL is gone."""
    prepare(tmp_path, "b.bin", "b")
    rows = prepare(tmp_path, "c.jsonl", "c")
    gone = prepare(tmp_path, "d.jsonl", "d")
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    build_index([rows, gone], 259)
    gone.unlink()
    for path in (tmp_path, f"{tmp_path}/*"):
        caplog.clear()
        data = open_dataset(path, 259)
        assert [data.read(i)[1:].tolist() for i in range(len(data))] == [[ord("b")], [ord("c")]]
        assert "d.jsonl.bin: left out: it was converted from a JSONL that is no longer there" in caplog.text
    assert token_files(f"{tmp_path}/*.bin", "--data_dir") == [tmp_path / "b.bin"]
    # Named, it is used.
    assert open_dataset(tmp_path / "d.jsonl.bin", 259).read(0).tolist() == [256, ord("d")]
    for named, message in (
        ("c.jsonl.bin", r"is the converted form of .*c.jsonl; name that one"),
        ("b.idx", r"b.idx is the index of .*b.bin; name that one"),
        ("pytorch_model.bin", r"pytorch_model.idx cannot be read.*A binary token file is a pair"),
    ):
        with pytest.raises(DataError, match=message):
            open_dataset(tmp_path / named, 259)
    for name in ("b.bin", "b.idx", "c.jsonl"):
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="none of the 3 files"):
        open_dataset(f"{tmp_path}/*.bin", 259)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no idx", r"a.idx cannot be read: No such file"),
        ("torn bin", "the .bin is not whole"),
        ("torn idx", "the .idx is not whole"),
        ("empty bin", "the .bin is damaged, or not ours"),
        ("empty idx", "the .idx is damaged, or not ours"),
        ("changed bin", "the .bin is damaged"),
        ("changed offsets", "the .idx is damaged"),
        ("changed header", "the .idx is damaged, or not ours"),
        ("swapped", "the .bin belongs to another .idx"),
    ],
)
def test_a_damaged_pair_is_named(tmp_path: Path, damage: str, message: str) -> None:
    binary = prepare(tmp_path, "a.bin", "hello", "world")
    idx = idx_of(binary)

    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    if damage == "no idx":
        idx.unlink()
    elif damage.startswith(("torn", "empty")):
        path = binary if damage.endswith("bin") else idx
        path.write_bytes(path.read_bytes()[: -1 if damage.startswith("torn") else 0])
    elif damage == "changed bin":
        flip(binary, 70)
    elif damage == "changed offsets":
        flip(idx, 4096 + 8)
    elif damage == "changed header":
        flip(idx, 100)
    else:
        other = prepare(tmp_path / "other", "b.bin", "hallo", "world")
        shutil.copy(idx_of(other), idx)
    for path in (binary, tmp_path):
        with pytest.raises(DataError, match=message) as caught:
            open_dataset(path, 259)
        assert str(caught.value).startswith(f"{binary}: ")


def test_files_of_different_tokenizers(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "words.json"))
    data = tmp_path / "data"
    prepare(data, "a.bin", "a")
    prepare(data, "b.bin", "a")
    rows = prepare(data, "c.jsonl", "a")
    assert len(open_dataset(data, 259)) == 3
    prepare(data, "d.bin", "a", tokenizer=str(tmp_path / "words.json"))
    for build in (True, False):
        with pytest.raises(DataError) as caught:
            open_dataset(data, 259, build=build)
        message = str(caught.value)
        assert f"{data}/a.bin was prepared with byte, {data}/d.bin with {tmp_path}/words.json" in message
    assert len(open_dataset([rows, data / "d.bin"], 259)) == 2  # JSONL does not say


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("x.jsonl", ("--format", "bin"), "must end in .bin"),
        ("x.bin", ("--format", "jsonl"), "must not end in .bin"),
        ("source.txt.bin", (), "is where .*source.txt's converted form lies"),
        ("new.jsonl.bin", (), "is where .*new.jsonl's converted form lies"),
        ("folder.bin", (), "not a regular file"),
    ],
)
def test_names_that_do_not_suit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "folder.bin").mkdir()
    (tmp_path / "source.txt").write_text("a\n")
    argv = ["--input", str(tmp_path / "source.txt"), "--output", str(tmp_path / name), "--tokenizer", "byte", *flags]
    assert main(argv) == 1
    assert re.search(message, caplog.text)


def test_the_summary_counts_the_same_in_both_forms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for name in ("a.bin", "a.jsonl"):
            prepare(tmp_path, name, "hello", "", "x" * 20, flags=("--max_seq_len", "10", "--eos"))
    said = [line.partition(":")[2] for line in caplog.messages if "largest id" in line]
    assert (
        said == [" 2 documents, 17 tokens, largest id 257. Tokenizer byte: model.vocab_size must be at least 259"] * 2
    )
    rows = [json.loads(line)["tokens"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    data = open_dataset(tmp_path / "a.bin", 259)
    assert [data.read(i).tolist() for i in range(2)] == rows
