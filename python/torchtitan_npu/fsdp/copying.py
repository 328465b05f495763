"""``copy.deepcopy`` of a wrapped model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.forward_method import register_forward_method
from torchtitan_npu.fsdp.state import FSDPState, state_of


def copy_model(model: nn.Module, attributes: dict[str, Any], memo: dict[int, Any]) -> nn.Module:
    """A wrapped model with the same values, options and user hooks, and shards, memory and communicator of its own.

    Collective. ``attributes``: what pickling would save of the model. As with ``copy.deepcopy`` of a plain
    model, gradients and hooks on parameters are not copied; their Python attributes are.
    """
    state = state_of(model)
    state.check_between_steps("copy.deepcopy(model)")
    state.all_here("copy.deepcopy(model)")
    with torch.inference_mode(False):
        return _copy(model, state, attributes, memo)


def _copy(model: nn.Module, state: FSDPState, attributes: dict[str, Any], memo: dict[int, Any]) -> nn.Module:
    new_state = state.copy()
    memo[id(state)] = new_state
    for param, new_param in zip(state.params, new_state.params, strict=True):
        memo[id(param.sharded)] = new_param.sharded

    new: nn.Module = type(model).__new__(type(model))
    memo[id(model)] = new
    new.__setstate__(copy.deepcopy(attributes, memo))
    new_state.attach(new, state, memo)
    for module, name in state.forward_methods:
        del memo[id(module)].__dict__[name]  # it runs the original's
        register_forward_method(memo[id(module)], name)
    return new
