"""Tensors inside arbitrary inputs and outputs of modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch


def tensors_in(value: Any, found: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists, mappings and dataclasses."""
    if found is None:
        found = []
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            tensors_in(item, found)
    elif isinstance(value, Mapping):
        for item in value.values():
            tensors_in(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            tensors_in(getattr(value, field.name), found)
    return found


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor replaced by ``change(tensor)``; the same object where nothing changed, the same
    types throughout.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        return type(value)(**changed) if dataclasses.is_dataclass(value) else type(value)(changed)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: map_tensors(item, change) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        return dataclasses.replace(value, **changed)
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with every floating-point tensor in ``dtype``."""
    return map_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t)
