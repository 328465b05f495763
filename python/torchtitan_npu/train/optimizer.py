"""AdamW with weight decay on matrices only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from torchtitan_npu.checkpoint.tensors import initialize_adamw_state
from torchtitan_npu.config import TrainingConfig


def decayed_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: at least 2-D, and not a bias.

    Ask before the model is sharded: a shard's number of dimensions need not be its parameter's.
    """
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and name.rpartition(".")[2] != "bias"
    )


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: frozenset[str], cfg: TrainingConfig
) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) over the trainable parameters, with its state allocated.

    Args:
        named_parameters: of the wrapped model, by the names that ``decayed`` was made from.
        decayed: names of the parameters that ``cfg.weight_decay`` applies to.
        cfg: learning rate, betas and weight decay; the learning rate is set anew before every step.
    """
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[name in decayed].append(parameter)
    optimizer = torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": cfg.weight_decay if decay else 0.0}
            for decay, parameters in groups.items()
            if parameters
        ],
        lr=cfg.learning_rate,
        betas=cfg.betas,
        fused=True,
    )
    initialize_adamw_state(optimizer)
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` for the next step of every group."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
