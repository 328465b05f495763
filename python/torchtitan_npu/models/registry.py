"""From a model configuration to a module."""

from __future__ import annotations

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.models.llama3 import Llama


def build_model(cfg: ModelConfig) -> Llama:
    """Build the model that ``cfg`` describes, on the current default device.

    Under ``torch.device("meta")`` nothing is allocated; initialise it later with ``reset_parameters`` of each layer.
    """
    return Llama(cfg)
