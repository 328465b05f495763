"""A checkpoint's model in one process, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchtitan_npu.checkpoint.hf_names import compare, shapes
from torchtitan_npu.checkpoint.manifest import CheckpointError
from torchtitan_npu.checkpoint.tensor_source import TensorSource
from torchtitan_npu.config import ModelConfig

if TYPE_CHECKING:
    from torchtitan_npu.models import Llama


def check_model(source: TensorSource, cfg: ModelConfig) -> None:
    """
    Raises:
        CheckpointError: with all the tensors that are missing, extra, or of another shape than ``cfg`` says.
    """
    problems = compare(shapes(cfg), {name: entry.shape for name, entry in source.entries.items()})
    if problems:
        raise CheckpointError(
            f"{source.path} does not hold the model that its configuration describes ({len(problems)} tensors "
            "differ):\n  " + "\n  ".join(problems)
        )


def load_whole_model(source: TensorSource, cfg: ModelConfig, dtype: torch.dtype | None = None) -> Llama:
    """The model of ``cfg`` on the CPU, with the checkpoint's values.

    Host memory: the model, and one tensor as it is read.

    Args:
        dtype: of the parameters; None keeps each one's.

    Raises:
        CheckpointError: the checkpoint holds another model, or a tensor cannot be read.
    """
    from torchtitan_npu.models import build_model

    check_model(source, cfg)
    with torch.device("meta"):
        model = build_model(cfg)
    for prefix, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            value = source.read(f"{prefix}.{name}" if prefix else name, dtype)
            setattr(module, name, torch.nn.Parameter(value))
        if next(module.buffers(recurse=False), None) is not None:  # not saved: they follow from the configuration
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()
    return model
