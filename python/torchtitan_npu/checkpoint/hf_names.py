"""Names of our models' parameters here and in Hugging Face's files.

Shapes are the same. So is the order of rows in ``q_proj`` and ``k_proj``: both rotate the coordinates ``i`` and
``i + D/2`` of a head (ops/rotary.py), so nothing is permuted. (Meta's own files rotate ``2i`` and ``2i + 1``; Hugging
Face's have been permuted already.)
"""

from __future__ import annotations

import re

from torchtitan_npu.config import ModelConfig

_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}

LM_HEAD = _OUTSIDE["output.weight"]
EMBEDDING = _OUTSIDE["tok_embeddings.weight"]

# The rotary frequencies that early versions of transformers saved; they follow from the configuration.
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")


def hf_name(name: str) -> str:
    """Of the parameter ``name`` of our model. Raises KeyError: it has none of that name."""
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"model.layers.{match[1]}.{_INSIDE[match[2]]}" if match else _OUTSIDE[name]


def shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of our model's parameters by our names, in the model's order."""
    import torch

    from torchtitan_npu.models import build_model

    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in build_model(cfg).named_parameters()}


def compare(wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> list[str]:
    """One line for each tensor that is missing, extra, or of another shape."""
    lines = [
        (name, "missing" if name not in found else f"{list(found[name])} instead of {list(shape)}")
        for name, shape in wanted.items()
        if found.get(name) != shape
    ]
    lines += [(name, "not in the model") for name in found if name not in wanted]
    width = max((len(name) for name, _ in lines), default=0)
    return [f"{name:<{width}}  {what}" for name, what in lines]
