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


def words(folder: Path, *more: str) -> str:
    """A tokenizer.json with the words a and ``more``."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {word: number for number, word in enumerate(("[UNK]", "a", *more))}
    path = folder / f"words{len(more)}.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]")).save(str(path))
    return str(path)


@pytest.mark.parametrize(("first", "second"), [("a.bin", "d.bin"), ("a.jsonl", "d.bin"), ("a.jsonl", "d.jsonl")])
def test_files_of_different_tokenizers(tmp_path: Path, first: str, second: str) -> None:
    """A JSONL that prepare did not write, c, has no mark: it goes with any."""
    data = tmp_path / "data"
    prepare(data, first, "a")
    prepare(data, "b.bin", "a")
    (data / "c.jsonl").write_text('{"tokens": [1]}\n')
    assert len(open_dataset(data, 259)) == 3
    other = prepare(data, second, "a", tokenizer=words(tmp_path))
    for build in (True, False):
        for path in (data, f"{data}/*"):
            with pytest.raises(DataError) as caught:
                open_dataset(path, 259, build=build)
            message = str(caught.value)
            assert f"{data}/{first} was prepared with byte, {other} with {tmp_path}/words0.json" in message
            marked = first if first.endswith(".jsonl") else second
            assert (f"remove {data}/{marked}.tokenizer if it is wrong" in message) == marked.endswith(".jsonl")
    assert len(open_dataset([data / "c.jsonl", other], 259)) == 2


@pytest.mark.parametrize("name", ["a.bin", "a.jsonl"])
def test_tokenizers_with_one_name_are_told_apart(tmp_path: Path, name: str) -> None:
    path = words(tmp_path)
    prepare(tmp_path / "data", name, "a", tokenizer=path)
    Path(words(tmp_path, "b")).replace(path)
    prepare(tmp_path / "data", "z.bin", "a", tokenizer=path)
    with pytest.raises(
        DataError, match=r"words0.json \(fingerprint \w{32}\), .* with .*words0.json \(fingerprint \w{32}\)"
    ):
        open_dataset(tmp_path / "data", 259)


@pytest.mark.parametrize("name", ["a.bin", "a.jsonl"])
def test_a_tokenizer_with_more_ids_than_the_model(tmp_path: Path, name: str) -> None:
    """The data's ids are below 258, so each is in the vocabulary; but PAD, 258, is not."""
    path = prepare(tmp_path, name, "a", flags=("--eos",))
    assert len(open_dataset(path, 259)) == 1
    for build in (True, False):
        with pytest.raises(
            DataError, match=rf"{name} was prepared with byte, whose ids go up to 258, but model.vocab_s"
        ):
            open_dataset(path, 258, build=build)


@pytest.mark.parametrize("change", ["longer", "not JSON", "not a mark", "no mark"])
def test_a_mark_that_says_nothing(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    path = prepare(tmp_path, "a.jsonl", "a")
    mark = tmp_path / "a.jsonl.tokenizer"
    values = json.loads(mark.read_text())
    assert values == {
        "name": "byte",
        "fingerprint": ByteTokenizer.fingerprint,
        "vocab_size": 259,
        "jsonl_bytes": path.stat().st_size,
    }
    if change == "longer":
        with path.open("a") as file:
            file.write('{"tokens":[1]}\n')
    elif change == "no mark":
        mark.unlink()
    else:
        mark.write_text("{" if change == "not JSON" else json.dumps({**values, "vocab_size": "259"}))
    with caplog.at_level(logging.INFO):
        assert open_dataset(path, 259).files[0].tokenizer is None
    assert (f"{mark}: ignored: " in caplog.text) == (change != "no mark")
    with pytest.raises(DataError, match="a.jsonl.tokenizer says which tokenizer .*a.jsonl is of; name that one"):
        mark.touch()
        open_dataset(mark, 259)


@pytest.mark.parametrize("suffix", [".bin", ".jsonl"])
def test_a_tokenizer_whose_path_is_long(tmp_path: Path, suffix: str) -> None:
    """Eight folders of 60 characters, of which each takes twelve bytes in JSON: the end of the path is kept."""
    folder = tmp_path.joinpath(*["𝄞" * 60] * 8)
    folder.mkdir(parents=True)
    path = prepare(tmp_path / "data", f"a{suffix}", "a", tokenizer=words(folder))
    mark = open_dataset(path, 259).files[0].tokenizer
    assert mark is not None and mark.name.endswith("𝄞/words0.json") and 900 < len(json.dumps(mark.name)) <= 1000


def test_a_mark_beside_the_file_that_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "a.jsonl").write_text("older")
    (tmp_path / "link.jsonl").symlink_to("there/a.jsonl")
    path = prepare(tmp_path, "link.jsonl", "a")
    mark = open_dataset(path, 259).files[0].tokenizer
    assert mark is not None and mark.name == "byte"
    assert (tmp_path / "there" / "a.jsonl.tokenizer").is_file()


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
