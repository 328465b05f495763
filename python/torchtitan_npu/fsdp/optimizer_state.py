"""Optimizer state with names and places, for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu.fsdp.layout import groups_of
from torchtitan_npu.fsdp.piece import Piece
from torchtitan_npu.fsdp.state import FSDPState, ShardedParam, state_of
from torchtitan_npu.fsdp.state_dict import StateDictType, gather_piece, local_part, piece_of, wanted_type


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """``{"state": {name: {key: value}}, "param_groups": [...]}``.

    State tensors that have the shape of a parameter's piece become ``Piece``; parameters in groups are named. Shares
    memory with the optimizer; no communication.

    Inside ``FSDP.state_dict_type`` it has that kind, as the model's has: LOCAL has plain tensors instead of pieces;
    FULL has whole CPU tensors on the first rank, gathered one by one, and is an empty dict elsewhere. FULL is
    collective.

    Raises:
        ValueError: the optimizer was built from another model's parameters.
        RuntimeError: FULL, and some ranks do not take part, or hold other state.
    """
    kind = wanted_type(model)
    sharded = _sharded(model, optimizer)
    if kind is StateDictType.FULL_STATE_DICT:
        return _full(state_of(model), sharded)
    if kind is StateDictType.LOCAL_STATE_DICT:
        for values in sharded["state"].values():
            values |= {key: value.plain() for key, value in values.items() if isinstance(value, Piece)}
    return sharded


def _sharded(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = state_of(model)
    by_id = {id(param.sharded): param for param in state.params}
    held = [(_known(by_id, parameter), values) for parameter, values in optimizer.state.items()]
    elementwise = _elementwise_keys(values for _, values in held)
    entries = {
        param.name: {key: _wrap(state, param, value, key in elementwise) for key, value in values.items()}
        for param, values in held
    }
    groups = [
        {**group, "params": [_known(by_id, parameter).name for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": entries, "param_groups": groups}


def _elementwise_keys(states: Iterable[dict[str, Any]]) -> set[str]:
    """Keys of state that has an element for each of the parameter's, such as AdamW's moments, unlike its step.

    Of a scalar parameter neither shape tells; where another parameter's value has dimensions, it is such a key.
    """
    return {
        key
        for values in states
        for key, v in values.items()
        if isinstance(v, torch.Tensor) and len(_whole_shape(v)) > 0
    }


def _whole_shape(value: torch.Tensor) -> torch.Size:
    return value.whole_shape if isinstance(value, Piece) else value.shape


def _full(state: FSDPState, sharded: dict[str, Any]) -> dict[str, Any]:
    state.all_here("a FULL optimizer state dict", ", or use the sharded kind, which needs no communication")
    entries: dict[str, Any] = sharded["state"]
    pieces = sorted((name, key) for name, of in entries.items() for key, v in of.items() if isinstance(v, Piece))
    _check_same_pieces(state, pieces)
    for name, key in pieces:
        entries[name][key] = gather_piece(state, entries[name][key])
    if not state.is_first:
        return {}
    gathered = set(pieces)
    for name, values in entries.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and (name, key) not in gathered:  # step
                values[key] = value.detach().cpu().clone()
    return {"state": entries, "param_groups": sharded["param_groups"]}


def _check_same_pieces(state: FSDPState, pieces: list[tuple[str, str]]) -> None:
    """Ranks that hold other state, after a step that not all of them took, would wait for each other for ever."""
    mine, differing = set(pieces), set[tuple[str, str]]()
    for group in (state.mesh.everyone.group, *groups_of(state.tensor_mesh)):
        if group is not None:
            everyone: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, (mine, differing), group=group)
            differing = differing.union(*(found for _, found in everyone))
            differing |= set.union(*(theirs for theirs, _ in everyone)) - set.intersection(*(s for s, _ in everyone))
    if differing:
        listed = ", ".join(f"{name}.{key}" for name, key in sorted(differing)[:5])
        raise RuntimeError(
            f"a FULL optimizer state dict: some ranks lack state that others have ({listed}); take it between steps "
            "that all ranks have taken"
        )


def load_optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Takes back what ``optimizer_state_dict`` gave: pieces of this rank, or whole tensors, of any number of ranks;
    inside ``FSDP.state_dict_type(model, LOCAL_STATE_DICT)`` also this rank's plain tensors.

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
    elementwise = _elementwise_keys(state_dict["state"].values())
    for name, values in state_dict["state"].items():
        param = by_name.get(name)
        if param is None:
            raise ValueError(f"the saved optimizer state has '{name}', which is no parameter of this model")
        held = optimizer.state.get(param.sharded, {})
        optimizer.state[param.sharded] = {
            key: _copy(_unwrap(state, param, f"{name}.{key}", value, key in elementwise), held.get(key))
            for key, value in values.items()
        }


def _known(by_id: dict[int, ShardedParam], parameter: torch.Tensor) -> ShardedParam:
    param = by_id.get(id(parameter))
    if param is None:
        raise ValueError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of this FSDP "
            f"model's: build it from "
            "model.parameters() after FSDP(...)"
        )
    return param


def _wrap(state: FSDPState, param: ShardedParam, value: Any, elementwise: bool) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == param.sharded.shape and elementwise:
        return piece_of(state, param, value)
    return value


def _unwrap(state: FSDPState, param: ShardedParam, key: str, value: Any, elementwise: bool) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Piece) or value.dim() > 0 or (elementwise and not param.whole_shape):
        return local_part(state, param, key, value, None)
    return value


def _copy(value: Any, held: Any) -> Any:
    """A copy of what was saved, in page-locked host memory where ``held``, which it replaces, lies there."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(held, torch.Tensor) and held.device.type == "cpu" and held.is_pinned():
        return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value)
    return value.clone()
