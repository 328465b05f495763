"""From a model configuration to a module."""

from __future__ import annotations

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.config.presets import LLAMA3, QWEN3, family
from torchtitan_npu.models.llama3 import Llama
from torchtitan_npu.models.qwen3 import Qwen3

_MODELS: dict[str, type[Llama]] = {LLAMA3: Llama, QWEN3: Qwen3}


def build_model(cfg: ModelConfig) -> Llama:
    """Build the model that ``cfg`` describes, on the current default device.

    Under ``torch.device("meta")`` nothing is allocated; initialise it later with ``reset_parameters`` of each layer.
    """
    return _MODELS[family(cfg.name)](cfg)
