"""Units of a model: marks, policy, ModuleLists; who owns a parameter; merging."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtitan_npu.fsdp.grouping import (
    Unit,
    assign_parameters,
    find_units,
    fully_shard,
    merge_small,
    nesting_depth,
)


def linear() -> nn.Linear:
    return nn.Linear(2, 2)


class Nested(nn.Module):
    """ModuleLists at the top, inside a child, and inside an item."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.blocks = nn.ModuleList(nn.ModuleDict({"experts": nn.ModuleList([linear(), linear()])}) for _ in range(2))
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([linear()])


def names(units: list[Unit]) -> list[str]:
    return [unit.name for unit in units]


def test_children_of_the_outermost_module_lists() -> None:
    assert names(find_units(Nested(), None)) == ["root", "blocks.0", "blocks.1", "decoder.layers.0"]
    assert names(find_units(linear(), None)) == ["root"]


def test_a_policy_replaces_them() -> None:
    model = Nested()
    found = names(find_units(model, lambda m: isinstance(m, nn.Linear)))
    assert found == ["root", *(f"blocks.{i}.experts.{j}" for i in (0, 1) for j in (0, 1)), "decoder.layers.0"]
    assert names(find_units(model, lambda m: m is model)) == ["root"], "the root is a unit anyway"


def test_marks_replace_them_and_are_used_up() -> None:
    model = Nested()
    fully_shard(model)
    assert fully_shard(model.embed, reshard_after_forward=False) is model.embed
    units = find_units(model, None)
    assert names(units) == ["root", "embed"]
    assert [unit.reshard_after_forward for unit in units] == [None, False]
    assert names(find_units(model, None)) == ["root", "blocks.0", "blocks.1", "decoder.layers.0"]
    model.embed(torch.tensor([1]))  # runs again


def test_marking_errors() -> None:
    with pytest.raises(ValueError, match="fully_shard needs an nn.Module, got list"):
        fully_shard([linear()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"fully_shard\(ModuleList\) would never run its hooks"):
        fully_shard(nn.ModuleList([linear()]))
    module = fully_shard(linear())
    with pytest.raises(ValueError, match="fully_shard was already called on this Linear"):
        fully_shard(module)
    with pytest.raises(ValueError, match="auto_wrap_policy together with fully_shard marks"):
        find_units(nn.Sequential(module), lambda m: False)


def owners(model: nn.Module, units: list[Unit]) -> dict[str, list[str]]:
    assign_parameters(model, units)
    return {unit.name: unit.parameters for unit in units}


def test_parameters_belong_to_the_innermost_unit() -> None:
    model = nn.Sequential(linear(), nn.Sequential(linear(), linear()))
    inner = model[1]
    units = [Unit("root", [model]), Unit("1", [inner]), Unit("1.0", [inner[0]])]
    assert owners(model, units) == {
        "root": ["0.weight", "0.bias"],
        "1": ["1.1.weight", "1.1.bias"],
        "1.0": ["1.0.weight", "1.0.bias"],
    }


def test_tied_parameters_belong_to_the_common_ancestor() -> None:
    model = nn.Sequential(linear(), nn.Sequential(linear(), linear()), linear())
    inner = model[1]
    inner[1].weight = inner[0].weight
    model[2].bias = model[0].bias
    units = [
        Unit("root", [model]),
        Unit("0", [model[0]]),
        Unit("1", [inner]),
        Unit("1.0", [inner[0]]),
        Unit("2", [model[2]]),
    ]
    all_names = assign_parameters(model, units)
    assert all_names["1.0.weight"] == ["1.0.weight", "1.1.weight"]
    assert all_names["0.bias"] == ["0.bias", "2.bias"]
    by_name = {unit.name: unit.parameters for unit in units}
    assert by_name == {
        "root": ["0.bias"],
        "0": ["0.weight"],
        "1": ["1.0.weight", "1.1.bias"],
        "1.0": ["1.0.bias"],
        "2": ["2.weight"],
    }


def test_a_module_in_two_places() -> None:
    """Registered twice: one set of parameters, with both names, owned outside of both units if it is in both."""
    shared = linear()
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Sequential(shared, linear()), nn.Sequential(shared)])
    units = find_units(model, None)
    all_names = assign_parameters(model, units)
    assert all_names["layers.0.0.weight"] == ["layers.0.0.weight", "layers.1.0.weight"]
    assert sum(len(unit.parameters) for unit in units) == 4


def test_units_without_parameters_are_dropped() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ReLU(), linear()])
    units = find_units(model, None)
    assert owners(model, units) == {"root": [], "layers.1": ["layers.1.weight", "layers.1.bias"]}


def sized(name: str, size: int, reshard: bool | None = None) -> Unit:
    return Unit(name, [nn.ReLU()], reshard, [str(size)])


def merged(units: list[Unit], cap: int | None) -> list[str]:
    return names(merge_small([sized("root", 1), *units], lambda u: sum(int(p) for p in u.parameters), cap))


def test_neighbours_merge_up_to_the_cap() -> None:
    layers = [sized(f"layers.{i}", 10) for i in range(5)]
    assert merged(layers, None) == ["root", *names(layers)]
    assert merged(layers, 9) == ["root", *names(layers)]
    assert merged(layers, 20) == ["root", "layers.0-1", "layers.2-3", "layers.4"]
    assert merged(layers, 50) == ["root", "layers.0-4"]
    assert merged([sized("layers.0", 30), *layers[1:]], 30) == ["root", "layers.0", "layers.1-3", "layers.4"]


def test_what_does_not_merge() -> None:
    """Other containers, units by name, and units that are kept differently."""
    assert merged([sized("a.0", 1), sized("b.0", 1), sized("b.1", 1)], 9) == ["root", "a.0", "b.0-1"]
    assert merged([sized("embed", 1), sized("head", 1)], 9) == ["root", "embed", "head"]
    assert merged([sized("a.0", 1, False), sized("a.1", 1), sized("a.2", 1)], 9) == ["root", "a.0", "a.1-2"]


def test_nesting_depth() -> None:
    model = nn.Sequential(nn.Sequential(linear()), linear())
    units = [Unit("root", [model]), Unit("0", [model[0]]), Unit("0.0", [model[0][0]]), Unit("1", [model[1]])]
    assert nesting_depth(units, [False, True, True, True]) == 2
    assert nesting_depth(units, [False, False, True, True]) == 1
    assert nesting_depth(units, [False, False, False, False]) == 1
