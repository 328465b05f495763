"""Which modules are gathered and freed together: the units of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

WrapPolicy = Callable[[nn.Module], bool]

UNIT_OPTIONS = "_torchtitan_npu_unit_options"
"""Attribute that ``fully_shard`` leaves on a module."""


@dataclass
class Unit:
    """Modules that are gathered and freed together."""

    name: str
    modules: list[nn.Module]
    reshard_after_forward: bool | None = None
    """None: the model-wide setting."""
    parameters: list[str] = field(default_factory=list)
    """First names of the parameters that it owns, in registration order."""

    def __contains__(self, module: nn.Module) -> bool:
        return any(module is m for m in self.modules)


def fully_shard(module: nn.Module, *, reshard_after_forward: bool | None = None) -> nn.Module:
    """Marks ``module`` as a unit of its own, and returns it. ``FSDP(model)`` on the root then uses the marks.

    Marks take the place of the automatic grouping for the whole model. ``reshard_after_forward`` overrides the root's
    setting for this unit. A marked module refuses to run until ``FSDP`` was called on a module around it.
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"fully_shard needs an nn.Module, got {type(module).__name__}")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(
            f"fully_shard({type(module).__name__}) would never run its hooks: it has no forward; mark its items"
        )
    if UNIT_OPTIONS in module.__dict__:
        raise ValueError(f"fully_shard was already called on this {type(module).__name__}")

    def refuse(module: nn.Module, args: object) -> None:
        raise RuntimeError(
            f"{type(module).__name__} was marked with fully_shard, but FSDP was not called on the model around it: "
            "call FSDP(model, ...) after the last fully_shard and before the optimizer is built"
        )

    module.__dict__[UNIT_OPTIONS] = (reshard_after_forward, module.register_forward_pre_hook(refuse))
    return module


def find_units(model: nn.Module, policy: WrapPolicy | None) -> list[Unit]:
    """Units of ``model``, the root first, then in module order.

    From ``fully_shard`` marks if there are any, else from ``policy`` (a predicate over modules), else the children of
    each outermost ``nn.ModuleList``.
    """
    marked = {m: m.__dict__.pop(UNIT_OPTIONS) for m in model.modules() if UNIT_OPTIONS in m.__dict__}
    for _, handle in marked.values():
        handle.remove()
    units = [Unit("root", [model])]
    if marked:
        if policy is not None:
            raise ValueError("auto_wrap_policy together with fully_shard marks: use one of the two")
        root_option = marked.pop(model, (None, None))[0]
        units[0].reshard_after_forward = root_option
        units += [
            Unit(name, [m], reshard_after_forward=marked[m][0]) for name, m in model.named_modules() if m in marked
        ]
    elif policy is not None:
        units += [Unit(name, [m]) for name, m in model.named_modules() if m is not model and policy(m)]
        for unit in units[1:]:
            if isinstance(unit.modules[0], (nn.ModuleList, nn.ModuleDict)):
                raise ValueError(
                    f"auto_wrap_policy chose '{unit.name}', a container without a forward; choose its items"
                )
    else:
        _from_module_lists(model, "", units)
    return units


def _from_module_lists(module: nn.Module, prefix: str, units: list[Unit]) -> None:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            units += [Unit(f"{path}.{i}", [item]) for i, item in enumerate(child)]
        else:
            _from_module_lists(child, f"{path}.", units)


def assign_parameters(model: nn.Module, units: list[Unit]) -> dict[str, list[str]]:
    """Gives every parameter to the innermost unit that contains all modules that hold it (tied ones: their common
    ancestor).

    Returns first name → all names. Fills ``unit.parameters``; drops units that are left without any, except the root.
    """
    unit_of_module: dict[nn.Module, int] = {}
    parents: list[list[int]] = []  # per unit: the chain of units around it, the root first, itself last
    index_of = {id(m): i for i, unit in enumerate(units) for m in unit.modules}

    def walk(module: nn.Module, chain: list[int]) -> None:
        index = index_of.get(id(module))
        if index is not None and index not in chain:
            chain = [*chain, index]
            chains[index] = chain
        if module in unit_of_module and len(chains[unit_of_module[module]]) <= len(chain):
            return  # a module that stands in two places belongs to the outer one
        unit_of_module[module] = chain[-1]
        for child in module.children():
            walk(child, chain)

    chains: dict[int, list[int]] = {}
    walk(model, [])
    parents = [chains.get(i, [0]) for i in range(len(units))]

    names: dict[int, list[str]] = {}
    owners: dict[int, list[int]] = {}
    first: dict[int, str] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            full_name = f"{module_name}.{name}" if module_name else name
            first.setdefault(key, full_name)
            names.setdefault(key, []).append(full_name)
            chain = parents[unit_of_module[module]]
            common = owners.setdefault(key, chain)
            owners[key] = [a for a, b in zip(common, chain, strict=False) if a == b]
    for key, chain in owners.items():
        units[chain[-1]].parameters.append(first[key])
    units[1:] = [unit for unit in units[1:] if unit.parameters]
    return {first[key]: all_names for key, all_names in names.items()}


def owners(model: nn.Module, units: Sequence[Unit]) -> dict[nn.Module, int]:
    """Every module → the innermost unit around it; a module that stands in two places: of the outer place."""
    index_of = {id(m): i for i, unit in enumerate(units) for m in unit.modules}
    found: dict[nn.Module, int] = {}
    depth_of: dict[nn.Module, int] = {}

    def walk(module: nn.Module, unit: int, depth: int) -> None:
        index = index_of.get(id(module), unit)
        depth += index != unit
        if module in found and depth_of[module] <= depth:
            return
        found[module], depth_of[module] = index, depth
        for child in module.children():
            walk(child, index, depth)

    walk(model, 0, 0)
    return found


def merge_small(units: list[Unit], bytes_of: Callable[[Unit], int], cap_bytes: int | None) -> list[Unit]:
    """Merges neighbours in the same container while together they fit into one bucket of ``cap_bytes``."""
    if cap_bytes is None:
        return units
    merged = [units[0]]
    for unit in units[1:]:
        last = merged[-1]
        siblings = (
            last is not units[0]
            and last.name.rpartition(".")[0] == unit.name.rpartition(".")[0]
            and last.name.rpartition(".")[2].split("-")[0].isdigit()
            and last.reshard_after_forward == unit.reshard_after_forward
        )
        if siblings and bytes_of(last) + bytes_of(unit) <= cap_bytes:
            container = last.name.rpartition(".")[0]
            begin = last.name.rpartition(".")[2].split("-")[0]
            end = unit.name.rpartition(".")[2]
            merged[-1] = Unit(
                f"{container}.{begin}-{end}",
                last.modules + unit.modules,
                last.reshard_after_forward,
                last.parameters + unit.parameters,
            )
        else:
            merged.append(unit)
    return merged


def nesting_depth(units: list[Unit], reshards: list[bool]) -> int:
    """Most units that reshard and contain one another, at least 1."""
    inside: dict[int, int] = {}  # id(module) → unit
    for i, unit in enumerate(units):
        for module in unit.modules:
            inside[id(module)] = i
    deepest = 1

    def walk(module: nn.Module, depth: int) -> None:
        nonlocal deepest
        unit = inside.get(id(module))
        if unit is not None and reshards[unit]:
            depth += 1
            deepest = max(deepest, depth)
        for child in module.children():
            walk(child, depth)

    walk(units[0].modules[0], 0)
    return deepest
