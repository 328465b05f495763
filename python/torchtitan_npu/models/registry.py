"""From a model configuration to a module."""

from __future__ import annotations

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.models.llama3 import Llama


def build_model(cfg: ModelConfig, *, document_mask: bool = False) -> Llama:
    """Build the model that ``cfg`` describes, on the current default device.

    Under ``torch.device("meta")`` nothing is allocated; initialise it later with ``reset_parameters`` of each layer.

    Raises:
        ValueError: ``document_mask`` is asked for, which is not supported.
    """
    if document_mask:
        raise ValueError("data.document_mask=true is not supported: attention inside documents is not built; set false")
    return Llama(cfg)
