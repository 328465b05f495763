"""Configuration: presets, strict values, rules, overrides, and all problems in one report (R16-R36)."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.config import (
    PRESETS,
    Config,
    ConfigError,
    ParameterGroup,
    config_from_dict,
    configured_world_size,
    load_config,
    preset,
    to_dict,
    validate_world,
)
from torchtitan_npu.config.keys import KEYS, SECTIONS
from torchtitan_npu.config.presets import PRESET_FIELDS
from torchtitan_npu.config.reference import render_reference
from torchtitan_npu.config.rules import HINTS, RULES
from torchtitan_npu.config.unsupported import REFUSED

ROOT = Path(__file__).resolve().parents[2]
SMALL = "model:\n  name: llama3_debug\ntraining:\n  learning_rate: 3e-4\n  max_steps: 100\n"


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> dict[str, str]:
    """The problems of a configuration as where → what; fails where there are none."""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, *overrides)
    return {problem.where: problem.what for problem in caught.value.problems}


def small(**sections: dict[str, Any]) -> dict[str, Any]:
    """A valid configuration with some keys replaced, as nested dicts."""
    base: dict[str, dict[str, Any]] = yaml.safe_load(SMALL)
    base["training"]["learning_rate"] = 3e-4
    return {name: base.get(name, {}) | sections.get(name, {}) for name in ("model", "training", "parallel", "data")}


def test_the_articles_yaml_loads_with_these_values() -> None:
    config = load_config(ROOT / "examples/train_config.yaml")
    assert (config.model.dim, config.model.n_layers, config.model.n_heads) == (4096, 32, 32)
    assert (config.model.n_kv_heads, config.model.ffn_dim) == (32, 11008)  # not in the file: from the preset
    assert config.model.use_flash_attention is True
    assert config.training.learning_rate == 3e-4
    assert config.training.seq_len == 8192
    assert config.training.checkpoint.save_interval == 5000
    assert config.parallel.dtype == "bf16"
    assert config.preset_overrides == {}  # the file repeats the preset's values
    assert config.training.checkpoint.async_save is True
    assert config.warnings == []


def test_the_debug_example_loads_on_any_number_of_ranks() -> None:
    config = load_config(ROOT / "examples/llama3_debug.yaml")
    assert config.warnings == []
    assert config.model.vocab_size >= 259  # the byte tokenizer: 256 bytes and 3 special ids
    assert [validate_world(config, ranks).dp for ranks in (1, 2, 3)] == [1, 2, 3]


def parameters(name: str) -> int:
    """Parameters of a preset: embedding and head; per block q, o, k, v, three ffn matrices, two norms; last norm."""
    model = preset(name)
    kv_width = model.dim // model.n_heads * model.n_kv_heads
    block = 2 * model.dim**2 + 2 * model.dim * kv_width + 3 * model.dim * model.ffn_dim + 2 * model.dim
    return 2 * model.vocab_size * model.dim + model.n_layers * block + model.dim


def test_presets_have_the_published_sizes() -> None:
    assert parameters("llama3_7b") == 7_526_944_768
    assert parameters("llama3_8b") == 8_030_261_248
    assert parameters("llama3_70b") == 70_553_706_496
    # 2*128256*5120 + 40*(4*5120^2 + 3*5120*13824 + 2*5120) + 5120 = 1,313,341,440 + 40*317,204,480 + 5,120
    assert parameters("llama3_13b") == 14_001_525_760


@pytest.mark.parametrize("name", PRESETS)
def test_each_preset_satisfies_the_rules(name: str) -> None:
    config = config_from_dict(small(model={"name": name}))
    assert config.model == preset(name)
    assert config.training.seq_len == config.model.max_seq_len  # the default


def test_explicit_keys_override_the_preset_and_are_recorded() -> None:
    config = config_from_dict(small(model={"dim": 512, "n_layers": 6}))
    assert config.model == preset("llama3_debug", dim=512)
    assert config.preset_overrides == {"model.dim": (256, 512)}  # n_layers repeats the preset's 6


def test_all_problems_are_reported_together_in_the_files_order(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "model:",  # 1
            "  name: llama3_7c",
            "  n_headz: 32",
            "  dim: 4096.5",
            "training:",  # 5
            "  learning_rate: fast",
            "  checkpoint:",
            "    max_keep: -1",
            "paralel: {}",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, "--data.shufle", "true")
    assert str(caught.value).splitlines() == [
        f"{tmp_path}/config.yaml: 8 problems",
        f"  model.name: 'llama3_7c' is not a known model; did you mean llama3_7b? known: {', '.join(PRESETS)} (line 2)",
        "  model.n_headz: unknown key; did you mean model.n_heads? (line 3)",
        "  model.dim: 4096.5 is not an integer (line 4)",
        "  training.learning_rate: 'fast' is not a number (line 6)",
        "  training.checkpoint.max_keep: -1 is out of range; it must be >= 0 (line 8)",
        "  paralel: unknown section; did you mean parallel? (line 9)",
        "  training.max_steps: required, and not given",
        "  --data.shufle: unknown key; did you mean data.shuffle?",
    ]


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.batchsize", "training.batch_size"),
        ("training.dtype", "parallel.dtype"),  # the right name in the wrong section
        ("training.max_keep", "training.checkpoint.max_keep"),
        ("training.lr", "training.learning_rate"),
        ("model.num_hidden_layers", "model.n_layers"),
        ("data.appendeos", "data.append_eos"),
        ("parallel.bucket_cap", "parallel.bucket_cap_mb"),
    ],
)
def test_an_unknown_key_names_the_nearest_valid_one(key: str, nearest: str) -> None:
    section, _, leaf = key.partition(".")
    with pytest.raises(ConfigError) as caught:
        config_from_dict(small(**{section: {leaf: 1}}))
    assert str(caught.value.problems[0]) == f"{key}: unknown key; did you mean {nearest}?"


def test_an_unknown_key_without_a_near_one_lists_the_valid_ones(tmp_path: Path) -> None:
    found = problems(tmp_path, SMALL + "data:\n  xyzzy: 1\n")
    assert found == {
        "data.xyzzy": "unknown key; valid in data: pack, append_eos, eos_id, document_mask, shuffle, mixture,"
        " num_workers"
        " (line 7)"
    }


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("learning_rate", "3e-4", 3e-4),
        ("learning_rate", '"3e-4"', 3e-4),  # text to a YAML 1.1 reader and to a quoting template
        ("learning_rate", "1", 1.0),
        ("learning_rate", ".5", 0.5),
        ("learning_rate", "+2.5E-1", 0.25),
        ("learning_rate", ".5e1", 5.0),
        ("max_steps", '"100"', 100),
        ("max_grad_norm", "null", None),
        ("max_grad_norm", "2", 2.0),
        ("betas", "[0, 0.5]", (0.0, 0.5)),
        ("deterministic", "True", True),
        ("resume", "none", "none"),
    ],
)
def test_values_become_the_declared_type(tmp_path: Path, key: str, value: str, expected: object) -> None:
    lines = [line for line in SMALL.splitlines() if not line.strip().startswith(f"{key}:")]
    config = load(tmp_path, "\n".join([*lines, f"  {key}: {value}"]))
    got = getattr(config.training, key)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.max_steps", "1_000", "'1_000' is not an integer"),
        ("training.max_steps", '"1_000"', "'1_000' is not an integer"),
        ("training.max_steps", "010", "'010' is not an integer"),
        ("training.max_steps", "1:30", "'1:30' is not an integer"),
        ("training.max_steps", "0x10", "'0x10' is not an integer"),
        ("training.max_steps", "1e5", "100000.0 is not an integer; write 100000"),
        ("training.max_steps", "2.5", "2.5 is not an integer"),
        ("training.max_steps", "true", "true is not an integer"),
        ("training.max_steps", "null", "null is not an integer"),
        ("training.max_steps", "0", "0 is out of range; it must be >= 1"),
        ("training.max_steps", "9223372036854775808", "9223372036854775808 is out of range; it must fit in 64 bits"),
        ("training.learning_rate", ".nan", "nan is out of range; it must be finite"),
        ("training.learning_rate", ".inf", "inf is out of range; it must be finite"),
        ("training.learning_rate", "1e400", "inf is out of range; it must be finite"),
        ("training.learning_rate", "0", "0.0 is out of range; it must be > 0"),
        ("training.learning_rate", "false", "false is not a number"),
        ("training.deterministic", "yes", "'yes' is not true or false; write true, without quotes"),
        ("training.deterministic", '"false"', "'false' is not true or false; write false, without quotes"),
        ("training.deterministic", "1", "1 is not true or false"),
        ("training.betas", "0.9", "0.9 is not a list of 2 numbers"),
        ("training.betas", "[0.9, 0.95, 0.99]", "[0.9, 0.95, 0.99] is not a list of 2 numbers"),
        ("training.betas", "[0.9, 1]", "1.0 is out of range; it must be >= 0 and < 1"),
        ("training.max_grad_norm", "0", "0.0 is out of range; it must be > 0"),
        ("training.max_grad_norm", "big", "'big' is not a number or null"),
        ("training.resume", "3", "3 is not text"),
        ("training.resume", '""', "empty; leave the key out to use its default"),
        ("training.lr_schedule", "cosin", "'cosin' is not one of cosine, linear, constant, wsd; did you mean cosine?"),
        ("training.checkpoint", "5", "5 is not a section; put its keys below it, indented"),
        ("training.activation_checkpointing", "yes", "'yes' is not true or false or selective; write true, without"),
        ("model.name", "7", "7 is not text"),
        ("model.dim", "{a: 1}", "{'a': 1} is not an integer"),
        ("parallel.dp_degree", "0", "0 is out of range; it must be >= 1, or -1"),
        ("parallel.dp_degree", "-2", "-2 is out of range; it must be >= 1, or -1"),
        ("parallel.dtype", "bf61", "'bf61' is not one of fp32, bf16, fp16; did you mean bf16?"),
    ],
)
def test_wrong_values_are_named_with_rule_and_way_out(tmp_path: Path, key: str, value: str, message: str) -> None:
    *sections, leaf = key.split(".")
    values = yaml.safe_load(SMALL)
    values["training"]["learning_rate"] = 3e-4
    values.setdefault(sections[0], {})[leaf] = "PLACEHOLDER"
    text = yaml.safe_dump(values).replace("PLACEHOLDER", value)
    found = problems(tmp_path, text)
    assert list(found) == [key]
    assert found[key].startswith(message)


@pytest.mark.parametrize(
    ("sections", "where", "message"),
    [
        (
            {"model": {"n_heads": 7, "n_kv_heads": 7}},
            "model.n_heads",
            "7 must divide model.dim where model.head_dim is null; model.dim is 256 (from llama3_debug), "
            "model.head_dim is null (from llama3_debug); change one of them or set model.head_dim",
        ),
        ({"model": {"dim": 24, "n_heads": 8, "n_kv_heads": 8}}, "model.n_heads", "8 must leave heads of even width"),
        (
            {"model": {"n_heads": 2}},
            "model.n_kv_heads",
            "4 (from llama3_debug) must divide model.n_heads; model.n_heads is 2; set both to match",
        ),
        ({"training": {"seq_len": 1025}}, "training.seq_len", "1025 must be <= model.max_seq_len"),
        ({"training": {"min_lr": 1e-3}}, "training.min_lr", "0.001 must be <= training.learning_rate"),
        (
            {"training": {"lr_schedule": "wsd"}},
            "training.decay_steps",
            "null (the default) must be a number where training.lr_schedule is wsd",
        ),
        (
            {"parallel": {"strategy": "ddp", "reduce_dtype": "bf16"}},
            "parallel.reduce_dtype",
            "'bf16' must be fp32 where parallel.strategy is ddp",
        ),
        (
            {"parallel": {"replicate_degree": 2}},
            "parallel.replicate_degree",
            "2 must be 1 where parallel.strategy is not hsdp; parallel.strategy is 'fsdp' (the default)",
        ),
        (
            {"parallel": {"strategy": "hsdp", "replicate_degree": 3, "dp_degree": 4}},
            "parallel.replicate_degree",
            "3 must divide parallel.dp_degree",
        ),
        (
            {"parallel": {"tp_degree": 3}, "training": {"seq_len": 1023}},
            "parallel.tp_degree",
            "3 must divide model.n_heads, model.n_kv_heads, model.ffn_dim and model.vocab_size; model.n_heads is 8",
        ),
        (
            {"parallel": {"tp_degree": 2, "strategy": "ddp"}},
            "parallel.tp_degree",
            "2 must be 1 where parallel.strategy is ddp (not supported yet)",
        ),
        (
            {"parallel": {"tp_degree": 4}, "training": {"seq_len": 1022}},
            "training.seq_len",
            "1022 must be a multiple of parallel.tp_degree",
        ),
        ({"data": {"append_eos": True}}, "data.append_eos", "true needs data.eos_id"),
        ({"data": {"append_eos": True, "eos_id": 320}}, "data.eos_id", "320 must be < model.vocab_size"),
    ],
)
def test_rules_between_keys(sections: dict[str, dict[str, Any]], where: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(small(**sections))
    (problem,) = caught.value.problems
    assert problem.where == where
    assert problem.what.startswith(message)


def test_values_on_the_edge_of_the_rules_pass() -> None:
    config_from_dict(small(training={"seq_len": 1024, "warmup_steps": 100, "min_lr": 3e-4}))
    config_from_dict(small(data={"append_eos": True, "eos_id": 319}))


def test_a_rule_is_not_checked_on_invalid_values(tmp_path: Path) -> None:
    found = problems(tmp_path, SMALL + "  seq_len: 9999\n", "--model.max_seq_len", "abc")
    assert list(found) == ["--model.max_seq_len"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parallel.cp_degree", 2),
        ("parallel.pp_degree", 2),
        ("parallel.ep_degree", 2),
    ],
)
def test_what_is_not_built_is_refused(tmp_path: Path, key: str, value: object) -> None:
    found = problems(tmp_path, SMALL, f"--{key}={yaml.safe_dump(value).splitlines()[0]}")
    assert list(found) == [f"--{key}"]
    assert "is not supported yet; " in found[f"--{key}"]


def test_tables_name_existing_keys_and_defaults_pass_them() -> None:
    for row in REFUSED:
        assert not row.matches(KEYS[row.key].default), row.key
    for rule in RULES:
        assert {rule.key, *rule.others} <= KEYS.keys()
    for hint in HINTS:
        assert set(hint.keys) <= KEYS.keys()


def test_hints() -> None:
    config = config_from_dict(
        small(
            model={"max_seq_len": 2048},
            training={"lr_schedule": "constant", "min_lr": 1e-5, "warmup_steps": 101, "decay_steps": 7},
            parallel={"strategy": "ddp", "reshard_after_forward": True, "prefetch": 2},
            data={"eos_id": 257},
        )
    )
    assert config.warnings == [
        "model.use_flash_attention is false with training.seq_len 2048: true saves memory and time",
        "parallel.strategy is 'ddp', so parallel.reshard_after_forward true has no effect",
        "parallel.strategy is 'ddp', so parallel.prefetch 2 has no effect",
        "training.warmup_steps is 101, so training.max_steps 100 ends before the learning rate reaches its peak",
        "training.lr_schedule is 'constant', so training.decay_steps 7 has no effect",
        "training.lr_schedule is 'constant', so training.min_lr 1e-05 has no effect",
        "data.append_eos is false, so data.eos_id 257 has no effect",
    ]


def test_hint_of_a_decay_that_does_not_fit() -> None:
    training = {"lr_schedule": "wsd", "warmup_steps": 60, "decay_steps": 40}
    assert config_from_dict(small(training=training)).warnings == []
    assert config_from_dict(small(training=training | {"decay_steps": 41})).warnings == [
        "training.lr_schedule is 'wsd' with training.warmup_steps 60 and training.decay_steps 41, more than "
        "training.max_steps 100 together: the decay is shorter, and nothing is between the two"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# nothing\n", "the file is empty"),
        ("- model\n", "holds a list, not sections"),
        ("model: [\n", "not valid YAML: line 2, column 1"),
        ("model:\n\tname: x\n", "not valid YAML: line 2, column 1"),
        ("a: 1\n---\nb: 2\n", "not valid YAML: line 2, column 1"),
        ("model: !!python/object:os.system {}\n", "not valid YAML: line 1, column 8"),
        (f"training: {{max_steps: {'9' * 5000}}}\n", "not valid YAML: "),
        ("[" * 1200, "not valid YAML: "),
    ],
)
def test_what_is_not_a_configuration_file(tmp_path: Path, text: str, message: str) -> None:
    found = problems(tmp_path, text)
    assert list(found) == ["--config"]
    assert found["--config"].startswith(message)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary").write_bytes(b"model:\xff")
    with pytest.raises(ConfigError, match=r"not UTF-8 text \(byte 6\)"):
        load_config(tmp_path / "binary")


def test_duplicate_and_dotted_keys(tmp_path: Path) -> None:
    found = problems(tmp_path, SMALL + "  max_steps: 200\nmodel:\n  name: llama3_7b\ntraining.seed: 1\n")
    assert found["training.max_steps"] == "given twice, in line 5 and line 6; keep one"
    assert found["model"] == "given twice, in line 1 and line 7; keep one"
    assert found["training.seed"].startswith("keys are nested in the file")


def test_an_empty_section_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + SMALL + "parallel:\n").parallel.strategy == "fsdp"


def test_overrides_replace_the_files_values(tmp_path: Path) -> None:
    text = SMALL.replace("max_steps: 100", "max_steps: wrong")  # replaced, so it is no problem
    config = load(
        tmp_path,
        text,
        *("--training.max_steps", "5", "--model.dim=128", "--training.betas", "[0.8, 0.9]"),
        *("--parallel.dp_degree", "-1", "--training.resume", "[odd] path: 1", "--training.max_grad_norm=null"),
        *("--training.seed", "1", "--training.seed", "2"),
    )
    assert config.training.max_steps == 5
    assert config.model.dim == 128
    assert config.preset_overrides == {"model.dim": (256, 128)}
    assert config.training.betas == (0.8, 0.9)
    assert config.training.resume == "[odd] path: 1"
    assert config.training.max_grad_norm is None
    assert config.training.seed == 2


def test_wrong_overrides_name_the_flag(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        SMALL,
        *("--training.max_stps", "5", "--training.log_interval", "0", "--training.checkpoint", "5"),
        *("--model.n_heads=7", "--data.shuffle", "--training.betas", "[0.1", "stray"),
    )
    assert found == {
        "--training.log_interval": "0 is out of range; it must be >= 1",
        "--model.n_heads": "7 must divide model.dim where model.head_dim is null; model.dim is 256 (from "
        "llama3_debug), model.head_dim is null (from llama3_debug); change one of them or set model.head_dim",
        "--training.max_stps": "unknown key; did you mean training.max_steps?",
        "--training.checkpoint": "is a section; set one of its keys: --training.checkpoint.<key> <value>",
        "--data.shuffle": "needs a value: --data.shuffle <value>",
        "--training.betas": "'[0.1' is not a YAML value",
        "stray": "not an override; write --section.key value",
        "model.n_kv_heads": "4 (from llama3_debug) must divide model.n_heads; model.n_heads is 7; set both to match"
        " (set by --model.n_heads)",
    }


def test_world_size() -> None:
    rest = config_from_dict(small())
    assert configured_world_size(rest) == 1
    assert (validate_world(rest, 6).dp, validate_world(rest, 6).tp) == (6, 1)
    four = config_from_dict(small(parallel={"dp_degree": 4}), source="four.yaml")
    assert configured_world_size(four) == 4
    assert validate_world(four, 4).dp == 4
    with pytest.raises(ConfigError) as caught:
        validate_world(four, 2)
    assert str(caught.value) == (
        "four.yaml: 1 problem\n"
        "  parallel.dp_degree: 4 x parallel.tp_degree 1 = 4, but WORLD_SIZE is 2; start 4 ranks "
        "(torchrun --nproc_per_node) or set parallel.dp_degree to -1 (the rest)"
    )
    with pytest.raises(ConfigError, match="WORLD_SIZE: 0 is out of range"):
        validate_world(four, 0)
    hybrid = config_from_dict(small(parallel={"strategy": "hsdp", "replicate_degree": 2}))
    assert configured_world_size(hybrid) == 2
    degrees = validate_world(hybrid, 6)
    assert (degrees.dp, degrees.replicate, degrees.shard) == (6, 2, 3)
    with pytest.raises(
        ConfigError,
        match=r"parallel.replicate_degree: 2 must divide the data-parallel degree, which is 5 \(WORLD_SIZE 5",
    ):
        validate_world(hybrid, 5)
    # Tensor parallelism is refused by the loader today, so its arithmetic is checked on the dataclass.
    tp3 = dataclasses.replace(rest, parallel=dataclasses.replace(rest.parallel, tp_degree=3))
    assert (validate_world(tp3, 6).dp, validate_world(tp3, 6).tp) == (2, 3)  # 6 = 2 x 3
    with pytest.raises(ConfigError, match="parallel.tp_degree: 3 must divide WORLD_SIZE, which is 4"):
        validate_world(tp3, 4)


@settings(max_examples=50, deadline=None)
@given(
    st.builds(
        small,
        training=st.fixed_dictionaries(
            {
                "learning_rate": st.floats(1e-12, 10.0),
                "max_steps": st.integers(1, 2**63 - 1),
                "betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
                "resume": st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip),
                "max_grad_norm": st.none() | st.floats(1e-30, 1e30),
            }
        ),
        model=st.fixed_dictionaries({"name": st.sampled_from(list(PRESETS)), "norm_eps": st.floats(1e-20, 1)}),
    )
)
def test_a_written_configuration_loads_to_the_same(values: dict[str, Any]) -> None:
    config = config_from_dict(values)
    again = config_from_dict(yaml.safe_load(yaml.safe_dump(to_dict(config))))
    assert again == config


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda s: st.lists(s, max_size=3))
)
def test_no_value_of_any_key_raises_anything_but_config_error(value: object) -> None:
    for name in KEYS:
        section, _, leaf = name.rpartition(".")
        nested: dict[str, Any] = small()
        inner = nested
        for part in section.split("."):
            inner = inner.setdefault(part, {})
        inner[leaf] = value
        with contextlib.suppress(ConfigError):
            assert isinstance(config_from_dict(nested), Config)


def test_the_documentation_is_the_generated_one() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8") == render_reference(), (
        "run: python -m torchtitan_npu.config.reference > docs/configuration.md"
    )


def test_chunks_of_the_loss_unless_chosen() -> None:
    """1,024 tokens, or what is written; 0 is no chunks, and the whole micro-batch under tensor parallelism."""
    assert config_from_dict(small()).loss_chunk_tokens == 1024
    assert config_from_dict(small(training={"loss_chunk_tokens": 0})).loss_chunk_tokens == 0
    whole = {"loss_chunk_tokens": 0, "batch_size": 3, "seq_len": 64}
    assert config_from_dict(small(training=whole, parallel={"tp_degree": 2})).loss_chunk_tokens == 192
    for parallel in ({}, {"tp_degree": 2}):
        assert config_from_dict(small(training={"loss_chunk_tokens": 7}, parallel=parallel)).loss_chunk_tokens == 7


def test_each_field_has_a_docstring() -> None:
    tree = ast.parse((ROOT / "python/torchtitan_npu/config/schema.py").read_text(encoding="utf-8"))
    undocumented = []
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name != "Config"):
        for field, after in zip(cls.body, [*cls.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and not isinstance(after, ast.Expr):
                undocumented.append(f"{cls.name}.{ast.unparse(field.target)}")
    assert undocumented == []
    assert list(SECTIONS) == ["model", "training", "training.checkpoint", "parallel", "data", "validation", "profile"]
    assert all(set(values) == set(PRESET_FIELDS) for values in PRESETS.values())


def test_parameter_groups(tmp_path: Path) -> None:
    text = SMALL + "  parameter_groups:\n    - match: '*.bias'\n      weight_decay: 1e-3\n    - {match: 'a*'}\n"
    file = tmp_path / "groups.yaml"
    file.write_text(text)
    config = load_config(file)
    assert config.training.parameter_groups == (
        ParameterGroup(match="*.bias", weight_decay=1e-3),
        ParameterGroup(match="a*", learning_rate_scale=1.0, weight_decay=None),
    )
    assert config_from_dict(json.loads(json.dumps(to_dict(config)))).training == config.training
    flag = ["--training.parameter_groups", "[{match: b, learning_rate_scale: 2}]"]
    assert load_config(file, flag).training.parameter_groups == (ParameterGroup(match="b", learning_rate_scale=2.0),)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "'text' is not a list, each item a mapping of match, learning_rate_scale, weight_decay"),
        ("[x]", "item 1: 'x' is not a mapping of match, learning_rate_scale, weight_decay"),
        ("[{match: a}, {}]", "item 2: {} lacks match"),
        ("[{match: a, weightdecay: 1}]", "item 1: unknown key 'weightdecay'; did you mean weight_decay?"),
        ("[{match: a, 7: 1}]", "item 1: unknown key 7; valid: match, learning_rate_scale, weight_decay"),
        ("[{match: a, learning_rate_scale: -1}]", "item 1: learning_rate_scale: -1.0 is out of range; it must be >= 0"),
        ("[{match: '', weight_decay: 1}]", "item 1: match: empty; leave the key out to use its default"),
    ],
)
def test_bad_parameter_groups(tmp_path: Path, value: str, message: str) -> None:
    found = problems(tmp_path, SMALL, f"--training.parameter_groups={value}")
    assert found == {"--training.parameter_groups": message}
