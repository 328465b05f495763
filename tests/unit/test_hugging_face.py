"""Llama and Qwen3 models to and from transformers: the same logits, whatever saved them; bad input is named."""

from __future__ import annotations

import ctypes
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from torchtitan_npu import cli
from torchtitan_npu.checkpoint import CheckpointStore, TrainState
from torchtitan_npu.checkpoint.state import META
from torchtitan_npu.checkpoint.writer import SummingWriter
from torchtitan_npu.config import ModelConfig, config_from_dict, to_dict
from torchtitan_npu.config.presets import preset
from torchtitan_npu.models import Llama, build_model
from torchtitan_npu.safetensors_file import TensorEntry, write_safetensors

SHAPES: list[dict[str, Any]] = [
    {"n_heads": 4, "n_kv_heads": 2, "tie_embeddings": False},
    {"n_heads": 4, "n_kv_heads": 1, "tie_embeddings": True},
    {"n_heads": 2, "n_kv_heads": 2, "tie_embeddings": False, "rope_theta": 10000.0, "norm_eps": 1e-6},
    # Of 6 rotations, at 16 positions: 2.5 turns is between, the others make 0.29 and less
    {
        "n_heads": 4,
        "n_kv_heads": 2,
        "tie_embeddings": True,
        "rope_scaling_factor": 8.0,
        "rope_original_max_seq_len": 16,
    },
    {"n_heads": 4, "n_kv_heads": 2, "tie_embeddings": True, "head_dim": 20},
    {"name": "qwen3_debug", "n_heads": 4, "n_kv_heads": 2, "tie_embeddings": False, "head_dim": 16},
    {"name": "qwen3_debug", "n_heads": 2, "n_kv_heads": 1, "tie_embeddings": True, "head_dim": 24, "norm_eps": 1e-5},
]
TOKENS = torch.randint(0, 61, (2, 24), generator=torch.Generator().manual_seed(3))


def our_config(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {"dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 88}
    values |= {"vocab_size": 61, "max_seq_len": 32, "rope_theta": 500000.0, "norm_eps": 1e-5} | changes
    return preset(values.pop("name", "llama3_debug"), **values)


def their_model(name: str = "llama3_debug", **changes: Any) -> PreTrainedModel:
    torch.manual_seed(5)
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 61,
        "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        # Far from uniform logits: an error in any matrix is seen.
        "initializer_range": 0.2,
        "eos_token_id": 7,
    }
    if name.startswith("qwen3"):
        model = Qwen3ForCausalLM(Qwen3Config(**(values | changes)))
    else:
        model = LlamaForCausalLM(LlamaConfig(**(values | changes)))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5)
    return model.eval()


def rope_parameters(shape: dict[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.get("rope_theta", 500000.0)}
    if "rope_scaling_factor" in shape:
        parameters |= {"rope_type": "llama3", "factor": shape["rope_scaling_factor"], "low_freq_factor": 1.0}
        parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": shape["rope_original_max_seq_len"]}
    return parameters


def our_model(cfg: ModelConfig) -> Llama:
    torch.manual_seed(6)
    model = build_model(cfg)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(std=0.2)
    return model


def our_checkpoint(root: Path, model: Llama, step: int = 4) -> Path:
    """As training saves it, with optimizer state, by one rank."""
    config = config_from_dict({"model": {"name": "llama3_debug"}, "training": {"learning_rate": 1, "max_steps": 1}})
    section = to_dict(config) | {"model": vars(model.cfg)}
    store = CheckpointStore(root)
    store.prepare()
    temporary = store.begin(step, needed_bytes=1)
    writer = SummingWriter(temporary)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"optimizer.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()}
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    state = TrainState(step=step, tokens=0, world_size=1, config=section)
    return store.commit(temporary, step, {META: state.write(temporary), **writer.sums})


def load_ours(path: Path, cfg: ModelConfig) -> Llama:
    model = build_model(cfg)
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return model


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("shape", SHAPES)
def test_exported_logits_are_ours(shape: dict[str, Any], tmp_path: Path) -> None:
    ours = our_model(our_config(**shape))
    our_checkpoint(tmp_path / "checkpoints", ours)
    # Files of 100 kB; the model has 170 to 190
    assert (
        run("export", tmp_path / "checkpoints", "--to", "hf", "--output", tmp_path / "hf", "--max_shard_gb", 1e-4) == 0
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert isinstance(theirs, Qwen3ForCausalLM if "qwen3" in str(shape.get("name")) else LlamaForCausalLM)
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, ours(TOKENS), rtol=0, atol=1e-5)
        assert ours(TOKENS).std() > 0.5
    # The index is complete, and every file within the limit.
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    sizes: dict[str, int] = {}
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hf" / file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        sizes[file] = sizes.get(file, 0) + tensor.nbytes
    assert len(sizes) > 1 and max(sizes.values()) <= 100_000
    assert sum(sizes.values()) == index["metadata"]["total_size"] == sum(p.nbytes for p in ours.parameters())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_imported_logits_are_theirs(
    shape: dict[str, Any], max_shard_size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = their_model(
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        tie_word_embeddings=shape["tie_embeddings"],
        rope_parameters=rope_parameters(shape),
        rms_norm_eps=shape.get("norm_eps", 1e-5),
        head_dim=shape.get("head_dim"),
        name=shape.get("name", "llama3_debug"),
    )
    theirs.save_pretrained(tmp_path / "hf", max_shard_size=max_shard_size)
    assert run("import", tmp_path / "hf", "--from", "hf", "--output", tmp_path / "checkpoints") == 0
    import yaml

    section = yaml.safe_load(capsys.readouterr().out.partition("\n\n")[2])["model"]
    cfg = config_from_dict({"model": section, "training": {"learning_rate": 1, "max_steps": 1}}).model
    assert cfg == our_config(**shape | {"name": cfg.name})  # the nearest preset, whichever that is
    ours = load_ours(tmp_path / "checkpoints/step-00000000", cfg)
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-5)
    # And back: the same tensors, bit for bit.
    assert run("export", tmp_path / "checkpoints", "--to", "hf", "--output", tmp_path / "again") == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))
    assert again.config.eos_token_id == 7


def test_dtype_vocabulary_and_tokenizer(tmp_path: Path) -> None:
    """bf16 weights with 61 ids become fp32 with 64, of which export keeps 61 in bf16; the tokenizer's files follow."""
    theirs = their_model().bfloat16()
    theirs.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf/tokenizer.json").write_text("{}")
    checkpoints = tmp_path / "checkpoints"
    assert run(*("import", tmp_path / "hf", "--from", "hf", "--output", checkpoints), "--vocab_multiple", 8) == 0
    assert (checkpoints / "tokenizer/tokenizer.json").read_text() == "{}"
    path = checkpoints / "step-00000000"
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    assert {entry.properties.dtype for entry in saved.values()} == {torch.bfloat16}  # type: ignore[union-attr]
    ours = load_ours(path, our_config(vocab_size=64))
    assert (ours.tok_embeddings.weight[61:] == 0).all() and (ours.tok_embeddings.weight[:61] != 0).any()
    flags = ("export", checkpoints, "--to", "hf", "--output", tmp_path / "again", "--dtype", "bf16")
    assert run(*flags, "--vocab_size", 61) == 0
    again = LlamaForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))
    assert (tmp_path / "again/tokenizer.json").read_text() == "{}"
    assert run(*flags, "--overwrite", "--vocab_size", 65) == 1


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = our_model(our_config())
    our_checkpoint(tmp_path / "checkpoints", ours)
    file = tmp_path / "model.safetensors"
    assert run("merge", tmp_path / "checkpoints", "--output", file) == 0
    merged = load_file(file)
    assert merged.keys() == ours.state_dict().keys()
    assert all(torch.equal(merged[name], value) for name, value in ours.state_dict().items())
    before = file.read_bytes()
    assert run("merge", tmp_path / "checkpoints", "--output", file, "--dtype", "bf16") == 1
    assert f"--output {file} exists; name another, or give --overwrite" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert run("merge", tmp_path / "checkpoints", "--output", file, "--dtype", "bf16", "--overwrite") == 0
    assert all(torch.equal(value, ours.state_dict()[name].bfloat16()) for name, value in load_file(file).items())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    """The writer has dropped each tensor before it asks for the next; the library reads what it wrote."""
    entries = [
        TensorEntry(f"t{i}", (i, 3), dtype) for i, dtype in enumerate([torch.bool, torch.float32, torch.bfloat16])
    ]
    entries.append(TensorEntry("scalar", (), torch.int64))
    alive: list[weakref.ref[torch.Tensor]] = []

    def read(entry: TensorEntry) -> torch.Tensor:
        assert all(ref() is None for ref in alive)
        tensor = torch.ones(entry.shape).to(entry.dtype)
        alive.append(weakref.ref(tensor))
        return tensor

    write_safetensors(tmp_path / "file", entries, read)
    found = load_file(tmp_path / "file")
    assert len(alive) == 4
    assert all((found[e.name].shape, found[e.name].dtype) == (torch.Size(e.shape), e.dtype) for e in entries)
    assert all((tensor == 1).all() for tensor in found.values())


def clear_resident_peak() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")


def resident_peak() -> int:
    """The largest resident memory in bytes since it was last cleared."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024


def test_host_memory_is_that_of_a_tensor_not_of_the_model(tmp_path: Path) -> None:
    """8 blocks of 3 matrices of 8 MiB and smaller ones: 216 MiB. A third of that is allowed: about three matrices are
    alive at once, and the allocator keeps some freed ones.
    """
    cfg = our_config(dim=512, n_layers=8, ffn_dim=4096)
    with torch.device("meta"):
        model = build_model(cfg)
    our_checkpoint(tmp_path / "checkpoints", model.to_empty(device="cpu"))
    del model
    commands: list[tuple[object, ...]] = [
        ("merge", tmp_path / "checkpoints", "--output", tmp_path / "file"),
        ("export", tmp_path / "checkpoints", "--to", "hf", "--output", tmp_path / "hf"),
        ("import", tmp_path / "hf", "--from", "hf", "--dtype", "bf16", "--output", tmp_path / "again"),
    ]
    for command in commands:
        assert run(*command[:-1], tmp_path / f"first_{command[0]}") == 0  # imports modules
        clear_resident_peak()
        before = resident_peak()
        assert run(*command) == 0
        grown = (resident_peak() - before) / 2**20
        assert grown <= 72, f"{command[0]}: {grown:.1f} MiB"


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def broken_tensors(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(80, 48)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(48)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("good") / "hf"
    their_model().save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (lambda d: change_config(d, model_type="qwen2"), ["model_type is 'qwen2'; only llama and qwen3 can"]),
        (
            lambda d: change_config(d, attention_bias=True, head_dim=16, hidden_act="gelu"),
            ["(2 keys)", "hidden_act: 'gelu' is not supported, only 'silu'", "attention_bias: True is not supported"],
        ),
        (
            lambda d: change_config(d, model_type="qwen3", use_sliding_window=True),
            ["use_sliding_window: True is not supported, only False"],
        ),
        (lambda d: change_config(d, head_dim=15), ["model.head_dim", "must be even"]),
        (lambda d: change_config(d, num_attention_heads=5, head_dim=None), ["model.n_heads", "must divide model.dim"]),
        (
            lambda d: change_config(d, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0}),
            ["rope_scaling: 'yarn' is not supported"],
        ),
        (
            lambda d: change_config(d, rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}),
            ["(2 keys)", "high_freq_factor: is missing", "original_max_position_embeddings: is missing"],
        ),
        (lambda d: (d / "config.json").unlink(), ["it has no config.json"]),
        (lambda d: (d / "config.json").write_text("[]"), ["config.json cannot be read: it is not a JSON object"]),
        (lambda d: (d / "model.safetensors").unlink(), ["only safetensors are imported"]),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-4]),
            ["model.safetensors cannot be read"],
        ),
        (
            lambda d: change_tensors(d, broken_tensors),
            [
                "(3 tensors differ)",
                "model.norm.weight                     missing",
                "model.layers.1.mlp.up_proj.weight     [80, 48] instead of [88, 48]",
                "model.layers.0.self_attn.q_proj.bias  not in the model",
            ],
        ),
        (
            lambda d: change_config(d, tie_word_embeddings=True),
            ["says tie_word_embeddings, but lm_head.weight differs"],
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x.safetensors"}}'),
            ["names '../x.safetensors', which is no file beside it"],
        ),
        (
            lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
            ["names files that are missing: x.safetensors"],
        ),
    ],
)
def test_what_cannot_be_imported_is_named(
    good: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    messages: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = tmp_path / "hf"
    shutil.copytree(good, directory)
    spoil(directory)
    assert run("import", directory, "--from", "hf", "--output", tmp_path / "checkpoints") == 1
    error = capsys.readouterr().err
    assert all(message in error for message in messages), error
    assert "Traceback" not in error
    assert CheckpointStore(tmp_path / "checkpoints").steps() == []


def test_outputs_that_exist(good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "checkpoints"
    into = ("import", good, "--from", "hf", "--output", output)
    assert run(*into) == 0
    assert run(*into) == 1
    assert "holds an imported checkpoint; name another, or give --overwrite" in capsys.readouterr().err
    assert run(*into, "--overwrite", "--dtype", "bf16") == 0
    assert [entry.name for entry in output.glob("step-*")] == ["step-00000000"]

    target = tmp_path / "hf"
    export = ("export", output, "--to", "hf", "--output", target)
    assert run(*export) == 0
    assert run(*export) == 1
    assert "exists and is not empty; name another, or give --overwrite" in capsys.readouterr().err
    assert run(*export, "--overwrite") == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["checkpoints", "hf"]
    (target / "mine").mkdir()
    assert run(*export, "--overwrite") == 1
    assert "holds something other than a Hugging Face model" in capsys.readouterr().err
    assert (target / "mine").is_dir()

    our_checkpoint(output, our_model(our_config()), step=9)
    assert run(*into, "--overwrite") == 1
    assert "holds checkpoints of training (newest: step 9)" in capsys.readouterr().err


def truncate(checkpoint: Path) -> None:
    file = next(checkpoint.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def with_pickled_code(checkpoint: Path) -> None:
    (checkpoint / "COMPLETE").unlink()
    (checkpoint / "meta.json").unlink()
    (checkpoint / ".metadata").write_bytes(b"cos\nsystem\n(S'echo spoilt > spoilt'\ntR.")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "none of its checkpoints is complete"),
        (with_pickled_code, "it names os.system, which is no part of a checkpoint's metadata"),
    ],
)
def test_damaged_checkpoints_are_refused(
    spoil: Callable[[Path], None],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = our_checkpoint(tmp_path / "checkpoints", our_model(our_config()))
    spoil(path)
    given = path if spoil is with_pickled_code else path.parent
    assert run("merge", given, "--output", tmp_path / "file") == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "spoilt").exists() and not (tmp_path / "file").exists()


def test_missing_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in [("none", "no such checkpoint"), ("file", "is a file"), ("empty", "is no checkpoint")]:
        assert run("merge", tmp_path / name, "--output", tmp_path / "x") == 1
        assert message in capsys.readouterr().err
    plain = tmp_path / "plain"
    dcp.save({"a": torch.zeros(3)}, checkpoint_id=plain, no_dist=True)
    assert run("merge", plain, "--output", tmp_path / "x") == 0
    assert list(load_file(tmp_path / "x")) == ["a"]
    capsys.readouterr()
    assert run("export", plain, "--to", "hf", "--output", tmp_path / "hf") == 1
    assert "does not say what its model is (no meta.json); give the YAML with --config" in capsys.readouterr().err
