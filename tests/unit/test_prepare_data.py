"""R43: text to JSONL token files."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import atomic_write, expand_paths
from torchtitan_npu.data.tokenizer import ByteTokenizer, load_tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
BOS, EOS = 256, 257


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(tmp_path: Path, *flags: str, tokenizer: str = "byte") -> int:
    output = ["--output", str(tmp_path / "out.jsonl"), "--tokenizer", tokenizer]
    return main(["--input", str(tmp_path / "in.txt"), *output, *flags])


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """[UNK]=0, <s>=1, </s>=2, a=3, b=4; adds <s>; saved with a truncation to 2 and a padding to 8."""
    tokenizers = pytest.importorskip("tokenizers")
    vocab = {"[UNK]": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    tok = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tok.add_special_tokens(["<s>", "</s>"])
    tok.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tok.enable_truncation(2)
    tok.enable_padding(length=8)
    directory = tmp_path / "tok"
    directory.mkdir()
    tok.save(str(directory / "tokenizer.json"))
    return directory


def test_strips_skips_empty_and_writes_tokens_with_length(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_bytes(b"\xef\xbb\xbf  hi \r\n\n   \n\xc3\xa9")  # BOM, CRLF, no newline at the end
    assert run(tmp_path) == 0
    # "hi" is 0x68 0x69, "é" is 0xC3 0xA9 in UTF-8
    assert records(tmp_path / "out.jsonl") == [
        {"tokens": [BOS, 0x68, 0x69], "length": 3},
        {"tokens": [BOS, 0xC3, 0xA9], "length": 3},
    ]


def test_byte_tokenizer_round_trip() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (259, 256, 257, 258)
    (ids,) = tokenizer.encode_batch(["naïve 文\n"])
    assert ids[0] == BOS and tokenizer.decode([*ids, EOS]) == "naïve 文\n"


@pytest.mark.parametrize(
    ("flags", "lengths", "ends_with_eos"),
    [
        ((), [8192, 3], [False, False]),  # 10000 letters + BOS, cut at the default 8192; "hi" + BOS
        (("--no_truncate",), [10001, 3], [False, False]),
        (("--no_truncate", "--eos"), [10002, 4], [True, True]),
        (("--max_seq_len", "4", "--eos"), [4, 4], [False, True]),  # a cut document does not end: no EOS
    ],
)
def test_truncation_and_eos(
    tmp_path: Path, flags: tuple[str, ...], lengths: list[int], ends_with_eos: list[bool]
) -> None:
    (tmp_path / "in.txt").write_text("x" * 10000 + "\nhi\n")
    assert run(tmp_path, *flags) == 0
    out = records(tmp_path / "out.jsonl")
    assert [r["length"] for r in out] == lengths == [len(r["tokens"]) for r in out]
    assert [r["tokens"][-1] == EOS for r in out] == ends_with_eos


def test_jsonl_keeps_newlines_and_bad_lines_are_counted_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [b'{"text": "a\\nb"}', b"", b"{", b'{"txt": "a"}', b'{"text": " "}', b'{"text": "\\ud800"}', b"\xff", b"[]"]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(lines))
    with caplog.at_level(logging.INFO):
        assert (
            main(["--input", f"{tmp_path}/in.jsonl", "--output", f"{tmp_path}/out.jsonl", "--tokenizer", "byte"]) == 0
        )
    assert records(tmp_path / "out.jsonl") == [{"tokens": [BOS, 97, 10, 98], "length": 4}]
    where = f"{tmp_path}/in.jsonl"
    for reason in (
        f"1 dropped: empty line (first: {where}:2)",
        f"1 dropped: not JSON (first: {where}:3)",
        f'2 dropped: no string field "text" (first: {where}:4)',
        f"1 dropped: empty text (first: {where}:5)",
        f"1 dropped: unpaired surrogate in the text (first: {where}:6)",
        f"1 dropped: not UTF-8 (first: {where}:7)",
        "1 documents, 4 tokens, largest id 256",
    ):
        assert reason in caplog.text


def test_format_text_takes_json_lines_as_text(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text('{"text": "a"}\n')
    assert run(tmp_path, "--input_format", "text") == 0
    assert records(tmp_path / "out.jsonl")[0]["length"] == 1 + len('{"text": "a"}')
    assert run(tmp_path, "--input_format", "jsonl") == 0
    assert records(tmp_path / "out.jsonl")[0]["tokens"] == [BOS, 97]


def test_directory_in_sorted_order_without_its_own_output(tmp_path: Path) -> None:
    for name, text in (("b.txt", "b"), ("a.txt", "a"), ("skipped.md", "m")):
        (tmp_path / name).write_text(text)
    for _ in range(2):  # the second time the output lies in the input directory
        argv = ["--input", str(tmp_path), "--output", str(tmp_path / "out.jsonl"), "--tokenizer", "byte"]
        assert main(argv) == 0
        assert [r["tokens"] for r in records(tmp_path / "out.jsonl")] == [[BOS, 97], [BOS, 98]]


def test_processes_give_the_same_bytes(tmp_path: Path) -> None:
    """Two 1 MiB chunks and a rest, on two spawned processes, through the script at the root."""
    (tmp_path / "in.txt").write_text("".join(f"line {i} " + "y" * 1000 + "\n" for i in range(2500)))
    outputs = []
    for processes in ("1", "2"):
        out = tmp_path / f"out{processes}.jsonl"
        command = [sys.executable, str(REPOSITORY / "prepare_data.py"), "--input", str(tmp_path / "in.txt")]
        command += ["--output", str(out), "--tokenizer", "byte", "--num_proc", processes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert "tokens/s" in done.stderr and done.stdout == ""
        outputs.append(out.read_bytes())
    assert outputs[0] == outputs[1]
    assert outputs[0].count(b"\n") == 2500


def test_tokenizer_json_with_special_tokens_and_without_its_truncation(tmp_path: Path, word_tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_text("a b a\nb\n")
    for name in (word_tokenizer, word_tokenizer / "tokenizer.json"):
        assert run(tmp_path, "--eos", tokenizer=str(name)) == 0
        assert [r["tokens"] for r in records(tmp_path / "out.jsonl")] == [[1, 3, 4, 3, 2], [1, 4, 2]]


def test_transformers_directory(tmp_path: Path, word_tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(word_tokenizer / "tokenizer.json"), eos_token="</s>", model_max_length=4
    )
    saved.save_pretrained(tmp_path / "hf")
    tokenizer = load_tokenizer(str(tmp_path / "hf"))
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (6, 2)  # 5 words, and the [PAD] that the file's padding names
    assert tokenizer.encode_batch(["a b a b a", "b"]) == [[1, 3, 4, 3, 4, 3], [1, 4]]


def test_eos_without_an_eos_token_is_refused(tmp_path: Path, word_tokenizer: Path) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    (word_tokenizer / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    assert load_tokenizer(str(word_tokenizer / "tokenizer.json")).eos_id is None
    assert run(tmp_path, "--eos", tokenizer=str(word_tokenizer / "tokenizer.json")) == 1
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--input", "{dir}/none.txt"], "none.txt' does not exist"),
        (["--input", "{dir}/*.none"], "no file matches"),
        (["--input", "{dir}/empty_dir"], "holds no *.txt"),
        (["--input", "{dir}/blank.txt"], "no document left to write (2 dropped: empty line"),
        (["--input", "{dir}/out.jsonl"], "is the only --input"),
        (["--input", "{dir}/in.txt", "--output", "{dir}/empty_dir"], "not a regular file"),
        (["--input", "{dir}/in.txt", "--tokenizer", "meta-llama/x"], "nothing is downloaded"),
        (["--input", "{dir}/in.txt", "--tokenizer", "{dir}/in.txt"], "not a tokenizer.json"),
        (["--input", "{dir}/in.txt", "--tokenizer", "{dir}/empty_dir"], "holds neither"),
    ],
)
def test_bad_input_is_one_line_and_keeps_the_old_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, argv: list[str], message: str
) -> None:
    (tmp_path / "in.txt").write_text("a\n")
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "empty_dir").mkdir()
    (tmp_path / "out.jsonl").write_text("old")
    before = sorted(os.listdir(tmp_path))
    full = ["--output", "{dir}/out.jsonl", "--tokenizer", "byte", *argv]
    assert main([a.replace("{dir}", str(tmp_path)) for a in full]) == 1
    assert message in caplog.text
    assert (tmp_path / "out.jsonl").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    "flags", [("--max_seq_len", "0"), ("--num_proc", "0"), ("--max_seq_len", "9", "--no_truncate")]
)
def test_bad_flags_exit_with_2(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, *flags)
    assert caught.value.code == 2


def test_atomic_write_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"old")
    target.chmod(0o640)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(KeyError), atomic_write(target) as file:
        file.write(b"half")
        file.flush()
        raise KeyError
    assert target.read_bytes() == b"old" and len(os.listdir(tmp_path)) == 2
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640


def test_temporary_files_that_a_kill_has_left(tmp_path: Path) -> None:
    """Old and locked by nobody. Not: one in use, one just made, those of other files."""
    names = [".a[1].x1.tmp", ".a[1].x2.tmp", ".a[1].x3.tmp", ".a1.x4.tmp", ".a[1].b.tmp.x5"]
    for name in names:
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (1, 1))
    os.utime(tmp_path / names[2])
    with (tmp_path / names[1]).open("rb") as used:
        fcntl.flock(used, fcntl.LOCK_EX)
        with atomic_write(tmp_path / "a[1]") as file:
            os.utime(file.fileno(), (1, 1))
            with atomic_write(tmp_path / "a[1]") as other:
                other.write(b"other")
            file.write(b"whole")
    assert sorted(os.listdir(tmp_path)) == sorted([*names[1:], "a[1]"])
    assert (tmp_path / "a[1]").read_bytes() == b"whole"


def test_expand_paths(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "x[1].jsonl", ".hidden.jsonl", "a.jsonl.idx"):
        (tmp_path / name).write_text("")

    def names(path: object) -> list[str]:
        return [f.name for f in expand_paths(path, (".jsonl",), "--data_dir")]  # type: ignore[arg-type]

    assert names(tmp_path) == ["a.jsonl", "b.jsonl", "x[1].jsonl"]
    assert names(f"{tmp_path}/x[1].jsonl") == ["x[1].jsonl"]  # an existing name is not a pattern
    assert names(f"{tmp_path}/[ab].jsonl") == ["a.jsonl", "b.jsonl"]
    assert names([f"{tmp_path}/b.jsonl", f"{tmp_path}/a.jsonl"]) == ["b.jsonl", "a.jsonl"]
    with pytest.raises(DataError, match="more than once"):
        names([tmp_path, tmp_path / "a.jsonl"])


def test_collect_stdlib_is_sorted_capped_and_readable(tmp_path: Path) -> None:
    root = tmp_path / "lib"
    (root / "pkg").mkdir(parents=True)
    (root / "site-packages").mkdir()
    files = {"b.py": b"b = 1\n", "a.py": b"a\n\nb\n", "latin.py": b"\xe9", "pkg/c.py": b"c" * 10, "empty.py": b"\n"}
    for name, data in {**files, "site-packages/x.py": b"x", "note.txt": b"n"}.items():
        (root / name).write_bytes(data)
    script = [sys.executable, str(REPOSITORY / "examples" / "collect_stdlib.py"), "--root", str(root), "--output"]
    out = tmp_path / "std.jsonl"
    subprocess.run([*script, str(out)], check=True, capture_output=True, timeout=60)
    assert [r["text"] for r in records(out)] == ["a\n\nb", "b = 1", "c" * 10]
    # 4 + 5 bytes fit into 12, the next 10 do not
    subprocess.run([*script, str(out), "--max_mb", "0.000012"], check=True, capture_output=True, timeout=60)
    assert [r["text"] for r in records(out)] == ["a\n\nb", "b = 1"]
