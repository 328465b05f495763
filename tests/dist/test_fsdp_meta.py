"""Models built on the meta device: sharded first, initialised unit by unit afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from twin import DIM, VOCAB, SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, StateDictType


class WithBuffer(nn.Module):
    """Owns a parameter and a buffer, and initialises both."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(DIM))
        self.register_buffer("table", torch.empty(3, DIM), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        with torch.no_grad():
            self.table.copy_(torch.arange(3 * DIM).view(3, DIM) / 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + self.table[0]


class MetaModel(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.extra = WithBuffer()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.extra(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class TiedMetaModel(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight


def full_values(make: type[nn.Module], cap: float | None, seed: int | None) -> dict[str, Any]:
    with torch.device("meta"):
        model = make()
    model = FSDP(model, bucket_cap_mb=cap, init_seed=seed)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        values = model.state_dict()
    if make is MetaModel:
        assert torch.equal(model.extra.table, torch.arange(3 * DIM).view(3, DIM) / 7)
    return {name: value.numpy() for name, value in values.items()}


@pytest.mark.parametrize("make", [MetaModel, TiedMetaModel])
def test_first_values_do_not_depend_on_ranks_or_cap(rank_pool: Any, make: type[nn.Module]) -> None:
    results = [
        rank_pool.run(size, full_values, make=make, cap=cap, seed=5)[0]
        for size, cap in ((1, None), (2, None), (3, 0.0005), (4, 25), (4, None))
    ]
    assert len(results[0]) > 10
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all((other[name] == value).all() for name, value in results[0].items())
    another_seed = rank_pool.run(1, full_values, make=make, cap=None, seed=6)[0]
    assert (another_seed["head.weight"] != results[0]["head.weight"]).any()


@on_ranks(2)
def test_values_are_those_of_the_layers_own_initialisation() -> None:
    """nn.Linear(20, 60): uniform within 1/sqrt(20); nn.Embedding: standard normal; different from layer to layer."""
    values = {name: torch.from_numpy(value) for name, value in full_values(MetaModel, None, 5).items()}
    if not values:
        return  # only the first rank has them
    up = values["layers.0.up.weight"]
    assert up.abs().max() <= 20**-0.5 and up.abs().max() > 0.9 * 20**-0.5
    assert abs(values["embed.weight"].std() - 1) < 0.15  # 740 samples: 0.15 is more than five standard errors
    assert not torch.equal(up, values["layers.1.up.weight"])
    assert torch.equal(values["layers.0.norm.weight"], torch.ones(DIM))


@on_ranks(2, 3)
def test_rank_0s_seed_counts_without_init_seed() -> None:
    import torch.distributed as dist

    torch.manual_seed(100 + dist.get_rank())
    everyone: list[Any] = [None] * dist.get_world_size()
    with torch.device("meta"):
        model = MetaModel()
    model = FSDP(model)
    before = torch.initial_seed()
    assert before == 100 + dist.get_rank(), "the rank's own random state is left alone"
    dist.all_gather_object(everyone, model.extra.table)
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    next_token_loss(model, tokens_for(0, dist.get_rank())).backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
def test_param_init_fn() -> None:
    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            nn.init.constant_(p, 0.25)
        for b in module.buffers(recurse=False):
            b.zero_()

    with torch.device("meta"):
        model = MetaModel()
    model = FSDP(model, param_init_fn=fill)
    assert all(bool((p == 0.25).all()) for p in model.parameters())


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM))


class ForgetsBuffer(WithBuffer):
    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (NoReset, r"module 'layers.1' \(NoReset\) is on the meta device and has no reset_parameters\(\)"),
        (ForgetsBuffer, r"'layers.1.table' was on the meta device and was not initialised by reset_parameters of"),
    ],
)
@on_ranks(1, 2)
def test_what_is_not_initialised_is_named(kind: type[nn.Module], message: str) -> None:
    with torch.device("meta"):
        model = SmallModel()
        model.layers[1] = kind()
    with pytest.raises(ValueError, match=message):
        FSDP(model)
