"""`torchtitan-npu tokenizer`: what it learns, that it is the same every time, and who can open it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtitan_npu import cli
from torchtitan_npu.data.tokenizer import FastTokenizer, load_tokenizer
from torchtitan_npu.data.tokenizer_train import BOS, EOS, PAD

WORDS = tuple(
    ["the", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "12345", "naïve", "文字", "cats"]
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = "".join(" ".join(WORDS[i % 7 :: 1 + i % 3]) + f" {i % 50}\n" for i in range(2000))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text(text[: len(text) // 2])
    (tmp_path / "in" / "b.txt.gz").write_bytes(gzip.compress(text[len(text) // 2 :].encode()))
    return tmp_path / "in"


def train(corpus: Path, output: Path, *flags: str, vocab_size: int = 400) -> int:
    argv = ["tokenizer", "--input", str(corpus), "--output", str(output), "--vocab_size", str(vocab_size), *flags]
    return cli.main(argv)


def test_any_text_comes_back_and_documents_begin_with_bos(corpus: Path, tmp_path: Path) -> None:
    assert train(corpus, tmp_path / "tok", vocab_size=320) == 0
    tokenizer = load_tokenizer(str(tmp_path / "tok"))
    assert isinstance(tokenizer, FastTokenizer)  # without transformers
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (320, 0, 1)
    text = " The quick\n\tbrown naïve 文字 \x00 🙂 99 "
    (ids,) = tokenizer.encode_batch([text])
    assert ids[0] == 0 and max(ids) < 320 and tokenizer.decode([*ids, 1]) == text
    # It has learnt: a word of the corpus takes fewer ids than bytes.
    assert len(tokenizer.encode_batch([" quick"])[0]) < 1 + len(" quick")


def test_transformers_opens_it_and_agrees(corpus: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert train(corpus, tmp_path / "tok", "--special_tokens", "<|im_start|>", "<|im_end|>") == 0
    ours = load_tokenizer(str(tmp_path / "tok"))
    for theirs in (
        transformers.AutoTokenizer.from_pretrained(str(tmp_path / "tok")),
        transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path / "tok")),
    ):
        assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == (BOS, EOS, PAD)
        assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
        assert theirs.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [3, 4]
        text = "<|im_start|>the naïve fox<|im_end|> jumps"
        assert theirs(text)["input_ids"] == ours.encode_batch([text])[0]
        assert theirs.decode(theirs(text)["input_ids"], skip_special_tokens=True) == "the naïve fox jumps"
        assert len(theirs) == ours.vocab_size


def test_the_same_text_gives_the_same_files(corpus: Path, tmp_path: Path) -> None:
    """In processes with other hash seeds and numbers of threads."""
    found = []
    for seed, threads in (("1", "1"), ("2", "4")):
        output = tmp_path / f"tok{seed}"
        argv = ["tokenizer", "--input", str(corpus), "--output", str(output), "--vocab_size", "330"]
        environment = os.environ | {"PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads}
        command = [sys.executable, "-m", "torchtitan_npu.cli", *argv]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        found.append({path.name: path.read_bytes() for path in output.iterdir()})
    assert found[0] == found[1]
    assert sorted(found[0]) == ["special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]


def test_a_sample_reads_the_whole_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 of 2 MB in chunks of 256 KiB: every second one, the last third of the file too."""
    (tmp_path / "in.txt").write_text("a first\n" * 125_000 + "zz last\n" * 125_000)
    assert train(tmp_path / "in.txt", tmp_path / "tok", "--sample_mb", "1", vocab_size=270) == 0
    tokens = json.loads((tmp_path / "tok" / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("fi" in token for token in tokens) and any("zz" in token for token in tokens)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--vocab_size", "258"), "--vocab_size 258: must be at least 259"),
        (("--special_tokens", EOS), "are there already"),
        (("--output", "{dir}/in"), "exists and is not an empty directory"),
        (("--input", "{dir}/none"), "does not exist"),
        (("--input", "{dir}/blank.txt"), "no text to learn from"),
        (("--input", "{dir}/cut.txt.gz"), "damaged or cut off"),
        (("--output", "{dir}/blank.txt/tok"), "is not written"),
    ],
)
def test_errors_leave_nothing(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, flags: tuple[str, ...], message: str
) -> None:
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"the fox\n" * 1000)[:-9])
    before = sorted(tmp_path.rglob("*"))
    assert train(corpus, tmp_path / "tok", *(flag.replace("{dir}", str(tmp_path)) for flag in flags)) == 1
    assert message in caplog.text
    assert sorted(tmp_path.rglob("*")) == before


def test_too_little_text_for_the_vocabulary(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "in.txt").write_text("ab ab\n")
    assert train(tmp_path / "in.txt", tmp_path / "tok", vocab_size=1000) == 0
    size = load_tokenizer(str(tmp_path / "tok")).vocab_size
    assert 259 <= size < 270
    assert f"set model.vocab_size to {size}" in caplog.text


def test_a_name_in_the_hugging_face_cache(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The layout of the cache: models--ORG--NAME/{refs/main, snapshots/COMMIT/files}."""
    assert train(corpus, tmp_path / "tok") == 0
    hub = tmp_path / "hub" / "models--some-org--small"
    (hub / "refs").mkdir(parents=True)
    (hub / "refs" / "main").write_text("c0ffee")
    (hub / "snapshots").mkdir()
    (tmp_path / "tok").rename(hub / "snapshots" / "c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    tokenizer = load_tokenizer("some-org/small")
    assert tokenizer.name == "some-org/small" and tokenizer.eos_id == 1
    argv = ["prepare", "--input", str(corpus), "--output", str(tmp_path / "o.jsonl"), "--tokenizer", "some-org/other"]
    assert cli.main(argv) == 1
    assert (
        "not in the Hugging Face cache of this machine" in caplog.text and "hf download some-org/other" in caplog.text
    )
