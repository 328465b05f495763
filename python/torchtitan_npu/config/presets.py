"""The models that ``model.name`` can name, and their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

from .schema import DEFAULT_FROM, PRESET, ModelConfig

PRESET_FIELDS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(ModelConfig) if field.metadata.get(DEFAULT_FROM) == PRESET
)
"""The fields of ``model`` that a preset gives."""

LLAMA3, QWEN3 = "llama3", "qwen3"

_LLAMA3: dict[str, Any] = {
    "vocab_size": 128256,
    "max_seq_len": 8192,
    "rope_theta": 500000.0,
    "norm_eps": 1e-5,
    "tie_embeddings": False,
    "head_dim": None,
}
_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "max_seq_len": 40960,
    "rope_theta": 1000000.0,
    "norm_eps": 1e-6,
    "tie_embeddings": False,
    "head_dim": 128,
    "n_kv_heads": 8,
}
_DEBUG: dict[str, Any] = {
    "dim": 256,
    "n_layers": 6,
    "n_heads": 8,
    "n_kv_heads": 4,
    "ffn_dim": 688,
    "vocab_size": 320,
    "max_seq_len": 1024,
}

# 7B and 13B are Llama 2's shapes (multi-head attention) with Llama 3's vocabulary; 1B and 3B are Llama 3.2's, the
# others Llama 3's (arXiv:2407.21783, table 3). Qwen3's are those of its released config.json files (arXiv:2505.09388).
_FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    LLAMA3: {
        "llama3_debug": _LLAMA3 | _DEBUG,
        "llama3_1b": _LLAMA3
        | {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "tie_embeddings": True},
        "llama3_3b": _LLAMA3
        | {"dim": 3072, "n_layers": 28, "n_heads": 24, "n_kv_heads": 8, "ffn_dim": 8192, "tie_embeddings": True},
        "llama3_7b": _LLAMA3 | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32, "ffn_dim": 11008},
        "llama3_8b": _LLAMA3 | {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 14336},
        "llama3_13b": _LLAMA3 | {"dim": 5120, "n_layers": 40, "n_heads": 40, "n_kv_heads": 40, "ffn_dim": 13824},
        "llama3_70b": _LLAMA3 | {"dim": 8192, "n_layers": 80, "n_heads": 64, "n_kv_heads": 8, "ffn_dim": 28672},
        "llama3_405b": _LLAMA3 | {"dim": 16384, "n_layers": 126, "n_heads": 128, "n_kv_heads": 8, "ffn_dim": 53248},
    },
    QWEN3: {
        "qwen3_debug": _QWEN3 | _DEBUG | {"head_dim": 48},
        "qwen3_0.6b": _QWEN3 | {"dim": 1024, "n_layers": 28, "n_heads": 16, "ffn_dim": 3072, "tie_embeddings": True},
        "qwen3_1.7b": _QWEN3 | {"dim": 2048, "n_layers": 28, "n_heads": 16, "ffn_dim": 6144, "tie_embeddings": True},
        "qwen3_4b": _QWEN3 | {"dim": 2560, "n_layers": 36, "n_heads": 32, "ffn_dim": 9728, "tie_embeddings": True},
        "qwen3_8b": _QWEN3 | {"dim": 4096, "n_layers": 36, "n_heads": 32, "ffn_dim": 12288},
        "qwen3_14b": _QWEN3 | {"dim": 5120, "n_layers": 40, "n_heads": 40, "ffn_dim": 17408},
        "qwen3_32b": _QWEN3 | {"dim": 5120, "n_layers": 64, "n_heads": 64, "ffn_dim": 25600},
    },
}

PRESETS: dict[str, dict[str, Any]] = {name: shape for shapes in _FAMILIES.values() for name, shape in shapes.items()}


def family(name: str) -> str:
    """The architecture that the preset ``name`` is a shape of. Raises KeyError: there is no such preset."""
    for known, shapes in _FAMILIES.items():
        if name in shapes:
            return known
    raise KeyError(name)


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The preset ``name`` as a :class:`ModelConfig`, with some fields replaced. Values are not checked.

    Raises:
        KeyError: there is no such preset.
    """
    return ModelConfig(name=name, **(PRESETS[name] | overrides))
