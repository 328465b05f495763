"""The optimizer of a run: its kind, and the settings of each parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchtitan_npu.checkpoint.tensors import initialize_optimizer_state
from torchtitan_npu.config import Config, match_parameter_groups
from torchtitan_npu.train.stored_moments import StoredMomentsAdamW

_SCALE = "learning_rate_scale"


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
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: frozenset[str], cfg: Config
) -> torch.optim.Optimizer:
    """AdamW (arXiv:1711.05101) or SGD over the trainable parameters, with its state allocated.

    Args:
        named_parameters: of the wrapped model, by the names that ``decayed`` was made from.
        decayed: names of the parameters that ``training.weight_decay`` applies to.
        cfg: the learning rate is set anew before every step.

    Raises:
        ConfigError: an item of ``training.parameter_groups`` has no parameters.
    """
    training = cfg.training
    named = list(named_parameters)
    rules = match_parameter_groups(cfg, [name for name, _ in named])
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}  # by factor of the learning rate and weight decay
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        rule = rules.get(name)
        weight_decay = training.weight_decay if name in decayed else 0.0
        if rule is not None and rule.weight_decay is not None:
            weight_decay = rule.weight_decay
        scale = 1.0 if rule is None else rule.learning_rate_scale
        groups.setdefault((scale, weight_decay), []).append(parameter)
    optimizer = _make(
        cfg,
        [
            {"params": parameters, _SCALE: scale, "weight_decay": weight_decay}
            for (scale, weight_decay), parameters in groups.items()
        ],
    )
    initialize_optimizer_state(optimizer)
    return optimizer


def _make(cfg: Config, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    training = cfg.training
    how = {training.optimizer_impl: True}
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.learning_rate, momentum=training.momentum, **how)
    if training.optimizer_state_dtype == "fp32" and not training.optimizer_state_offload:
        return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, **how)
    return StoredMomentsAdamW(
        groups,
        dtype=torch.bfloat16 if training.optimizer_state_dtype == "bf16" else torch.float32,
        on_host=training.optimizer_state_offload,
        seed=training.seed,
        lr=training.learning_rate,
        betas=training.betas,
        fused=training.optimizer_impl == "fused",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Use ``learning_rate`` for the next step, times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_SCALE, 1.0)
