"""Optimizer state with names and places, for checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.piece import Piece
from torchtitan_npu.fsdp.state import FSDPState, ShardedParam, state_of
from torchtitan_npu.fsdp.state_dict import local_part, piece_of


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [...]}``.

    State tensors that have the shape of a parameter's piece become ``Piece``; parameters in groups are named. Shares
    memory with the optimizer; no communication.
    """
    state = state_of(model)
    by_id = {id(param.sharded): param for param in state.params}
    entries: dict[str, Any] = {}
    for parameter, values in optimizer.state.items():
        param = _known(by_id, parameter)
        entries[param.name] = {key: _wrap(state, param, value) for key, value in values.items()}
    groups = [
        {**group, "params": [_known(by_id, parameter).name for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": entries, "param_groups": groups}


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Takes back what ``optimizer_state_dict`` gave: pieces of this rank, or whole tensors.

    Groups are matched by the names of their parameters. Raises ValueError that names what does not fit. Copies the
    values.
    """
    state = state_of(model)
    by_name = {param.name: param for param in state.params}
    by_id = {id(param.sharded): param for param in state.params}
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the saved state {len(saved_groups)}"
        )
    for group, saved in zip(optimizer.param_groups, saved_groups, strict=True):
        names = [_known(by_id, parameter).name for parameter in group["params"]]
        if sorted(names) != sorted(saved["params"]):
            differing = sorted(set(names) ^ set(saved["params"]))
            raise ValueError(f"parameter groups differ from the saved ones: {', '.join(differing[:5])}")
        group.update({key: value for key, value in saved.items() if key != "params"})
    for name, values in state_dict["state"].items():
        param = by_name.get(name)
        if param is None:
            raise ValueError(f"the saved optimizer state has '{name}', which is no parameter of this model")
        optimizer.state[param.sharded] = {key: _unwrap(state, param, f"{name}.{key}", v) for key, v in values.items()}


def _known(by_id: dict[int, ShardedParam], parameter: torch.Tensor) -> ShardedParam:
    param = by_id.get(id(parameter))
    if param is None:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of this FSDP "
            f"model's: build it from "
            "model.parameters() after FSDP(...)"
        )
    return param


def _wrap(state: FSDPState, param: ShardedParam, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == param.sharded.shape and value.dim() > 0:
        return piece_of(state, param, value)
    return value


def _unwrap(state: FSDPState, param: ShardedParam, key: str, value: Any) -> Any:
    if isinstance(value, Piece) or (isinstance(value, torch.Tensor) and value.dim() > 0):
        return local_part(state, param, key, value, None).clone()
    return value.clone() if isinstance(value, torch.Tensor) else value
