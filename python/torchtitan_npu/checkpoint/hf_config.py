"""Between the section ``model`` and ``config.json`` of Hugging Face's Llama and Qwen3."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_npu.checkpoint.manifest import CheckpointError
from torchtitan_npu.config import ConfigError, ModelConfig, config_from_dict
from torchtitan_npu.config.presets import LLAMA3, PRESETS, QWEN3, family, preset

CONFIG = "config.json"

_SAME: dict[str, str] = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
"""Our key: theirs, with the same meaning; required in ``config.json``."""

_SCALING: dict[str, str] = {
    "rope_scaling_factor": "factor",
    "rope_original_max_seq_len": "original_max_position_embeddings",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
}
"""Our key: theirs in ``rope_scaling`` of the type ``llama3``."""

_KINDS: dict[str, str] = {LLAMA3: "llama", QWEN3: "qwen3"}
"""Our family: their ``model_type``."""

_ARCHITECTURES: dict[str, str] = {LLAMA3: "LlamaForCausalLM", QWEN3: "Qwen3ForCausalLM"}

_WRITTEN: dict[str, dict[str, Any]] = {
    LLAMA3: {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    QWEN3: {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
}
"""Their keys of which our model has one value only, and which their files have."""

_FIXED: dict[str, Any] = {"quantization_config": None, "partial_rotary_factor": 1.0, "pretraining_tp": 1}
"""More of them, which files need not have."""

_QWEN3_HEAD_DIM = 128
"""Of a Qwen3 file that does not say it."""


def config_to_hf(model: ModelConfig, dtype: str, special_tokens: dict[str, Any]) -> dict[str, Any]:
    """The content of ``config.json``. Keys are those that every version of transformers reads (the rotary base on its
    own, not in ``rope_parameters``, which came with version 5).

    Args:
        dtype: of the tensors, as torch names it (``bfloat16``).
        special_tokens: ``bos_token_id`` and the like.
    """
    kind = family(model.name)
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": _KINDS[kind],
        **{theirs: getattr(model, ours) for ours, theirs in _SAME.items()},
        "num_key_value_heads": model.n_kv_heads,
        "head_dim": model.head_width,
        "rope_theta": model.rope_theta,
        "rope_scaling": None
        if model.rope_scaling_factor == 1
        else {"rope_type": "llama3", **{theirs: getattr(model, ours) for ours, theirs in _SCALING.items()}},
        "tie_word_embeddings": model.tie_embeddings,
        **_WRITTEN[kind],
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": dtype,
        **special_tokens,
    }


def read_hf_config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Raises:
        CheckpointError: there is none, or it describes no model of ours.
    """
    path = directory / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory} is no Hugging Face model: it has no {CONFIG}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    kind = content.get("model_type")
    if kind not in _KINDS.values():
        known = " and ".join(_KINDS.values())
        raise CheckpointError(f"{path}: model_type is {kind!r}; only {known} can be imported")
    return content


def config_from_hf(path: Path, content: dict[str, Any], **replaced: Any) -> ModelConfig:
    """Our model section for ``content`` of the file ``path``, with some values replaced, based on the nearest preset.

    Raises:
        CheckpointError: with all that is missing or that our model does not have.
    """
    kind = next(ours for ours, theirs in _KINDS.items() if theirs == content["model_type"])
    problems = [f"{theirs}: is missing" for theirs in _SAME.values() if theirs not in content]
    problems += [
        f"{key}: {content[key]!r} is not supported, only {value!r}"
        for key, value in (_WRITTEN[kind] | _FIXED).items()
        if content.get(key, value) != value
    ]
    values = {ours: content.get(theirs) for ours, theirs in _SAME.items()}
    values["n_kv_heads"] = content.get("num_key_value_heads") or values["n_heads"]
    values["tie_embeddings"] = content.get("tie_word_embeddings", False)
    rope, rope_problems = _rope(content)
    values |= rope
    problems += rope_problems
    values["head_dim"] = content.get("head_dim") or (_QWEN3_HEAD_DIM if kind == QWEN3 else None)
    if not problems:
        if kind == LLAMA3 and values["head_dim"] and values["head_dim"] * values["n_heads"] == values["dim"]:
            values["head_dim"] = None
        values |= replaced
        presets = (name for name in PRESETS if family(name) == kind)
        name = min(presets, key=lambda name: len(_differences(PRESETS[name], values)))
        section = {"name": name, **_differences(PRESETS[name], values)}
        try:
            # The other sections' required keys do not matter here.
            return config_from_dict(
                {"model": section, "training": {"learning_rate": 1.0, "max_steps": 1}}, source=str(path)
            ).model
        except ConfigError as error:
            raise CheckpointError(f"{path} cannot be imported: {error}") from error
    raise CheckpointError(f"{path} cannot be imported ({len(problems)} keys):\n  " + "\n  ".join(problems))


def yaml_of(model: ModelConfig) -> str:
    """The section ``model`` as YAML: the preset and what differs from it."""
    values, preset_values = asdict(model), asdict(preset(model.name))
    lines = [f"  name: {model.name}"]
    lines += [f"  {key}: {json.dumps(value)}" for key, value in values.items() if value != preset_values[key]]
    return "model:\n" + "\n".join(lines) + "\n"


def _rope(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our keys of the rotary embedding, and what is wrong. Version 5 of transformers nests them in
    ``rope_parameters``, earlier ones give ``rope_theta`` and put scaling into ``rope_scaling``; neither is base 10000
    without scaling.
    """
    parameters = content.get("rope_parameters") or {}
    scaling = content.get("rope_scaling") or parameters
    values = {"rope_theta": parameters.get("rope_theta", content.get("rope_theta", 10000.0))}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return values, []
    if kind != "llama3":
        return values, [f"rope_scaling: {kind!r} is not supported, only 'llama3' or none"]
    missing = [theirs for theirs in _SCALING.values() if theirs not in scaling]
    return (
        values | {ours: scaling.get(theirs) for ours, theirs in _SCALING.items()},
        [f"rope_scaling.{theirs}: is missing" for theirs in missing],
    )


def _differences(preset: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if preset.get(key) != value}
