"""``torchtitan-npu generate`` on what training saved."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from torchtitan_npu import cli
from torchtitan_npu.models import Llama

from .conftest import Workspace

TEXT = "the quick brown fox jumps over the lazy dog; "


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Two ranks learn one sentence by heart."""
    directory = tmp_path_factory.mktemp("generate")
    (directory / "text.txt").write_text(f"{TEXT * 8}\n" * 40)
    data = directory / "data.jsonl"
    command = (
        "prepare",
        "--input",
        directory / "text.txt",
        "--output",
        data,
        "--tokenizer",
        "byte",
        "--max_seq_len",
        "512",
    )
    assert cli.main([str(part) for part in command]) == 0
    (directory / "config.yaml").write_text(
        "model: {name: llama3_debug, dim: 64, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 160, max_seq_len: 128}\n"
        "training: {batch_size: 4, learning_rate: 1e-2, warmup_steps: 5, max_steps: 80}\n"
        "parallel: {dtype: fp32}\n"
    )
    work = Workspace(directory, data, directory / "config.yaml")
    result = work.train(ranks=2)
    assert result.returncode == 0, result.stderr
    return work


def run(work: Workspace, *flags: object) -> int:
    return cli.main(["generate", str(work.checkpoints), *map(str, flags)])


def test_it_says_what_it_has_learnt(trained: Workspace, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tokenizer", "byte", "--prompt", "the quick brown ", "--max_new_tokens", 29)
    assert run(trained, *flags, "--temperature", 0) == 0
    assert capsys.readouterr().out.rstrip("\n") == TEXT
    # The same seed draws the same samples; the second of one run is another draw.
    hot = (*flags, "--temperature", 3, "--top_p", 1, "--num_samples", 2)
    outs = []
    for seed in (1, 1, 2):
        assert run(trained, *hot, "--seed", seed) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]
    first, second = outs[0].removeprefix("--- 1 of 2\n").split("--- 2 of 2\n")
    assert first != second and first.startswith("the quick brown ")


def test_a_tokenizer_of_more_ids_than_the_model(
    trained: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It cannot be the one of training, and its first ids would pass for the model's."""
    path = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({f"w{i}": i for i in range(400)}, unk_token="w0")).save(str(path))
    assert run(trained, "--tokenizer", path, "--prompt", "w7", "--max_new_tokens", 1) == 0
    assert f"warning: tokenizer {path} has 400 ids, the model 320: " in capsys.readouterr().err


def test_a_model_without_a_cache_says_the_same(
    trained: Workspace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples that end at max_seq_len, 128; the cache has 2 x 2 layers x 2 heads x 128 x 16 numbers of 4 bytes."""
    flags = ("--tokenizer", "byte", "--prompt", "the quick", "--max_new_tokens", 500, "--temperature", 2)
    outs = []
    for cached in (True, False):
        if not cached:
            monkeypatch.delattr(Llama, "new_cache")
        assert run(trained, *flags, "--num_samples", 2) == 0
        captured = capsys.readouterr()
        outs.append(captured.out)
        assert ("room for the keys and values of 128 positions: 0.1 MB" in captured.err) == cached
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--tokenizer is missing"),
        (["--tokenizer", "nowhere"], "no such file or directory"),
        (["--tokenizer", "byte", "--prompt", "x" * 128], "has 129 tokens; it must have at least 1 and fewer than"),
    ],
)
def test_wrong_use(
    trained: Workspace, flags: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(trained, *flags) == 1
    assert message in capsys.readouterr().err
