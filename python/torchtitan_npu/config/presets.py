"""The models that ``model.name`` can name, and their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

from .schema import DEFAULT_FROM, PRESET, ModelConfig

PRESET_FIELDS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.metadata.get(DEFAULT_FROM) == PRESET
)
"""The fields of ``model`` that a preset gives."""

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_seq_len": 8192,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
}

# Llama 3 was released as 8B and 70B. 7B and 13B are Llama 2's shapes (multi-head attention) with Llama 3's vocabulary.
PRESETS: dict[str, dict[str, Any]] = {
    "llama3_debug": _LLAMA3
    | {
        "dim": 256,
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "ffn_dim": 688,
        "vocab_size": 320,
        "max_seq_len": 1024,
    },
    "llama3_7b": _LLAMA3 | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "ffn_dim": 11008},
    "llama3_8b": _LLAMA3 | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336},
    "llama3_13b": _LLAMA3 | {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824},
    "llama3_70b": _LLAMA3 | {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "ffn_dim": 28672},
}


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset ``name`` as a :class:`ModelConfig`, with some fields replaced. Values are not checked.

    Raises:
        KeyError: there is no such preset.
    """
    return ModelConfig(name=name, **(PRESETS[name] | overrides))
