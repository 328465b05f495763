"""Activation checkpointing by FSDP itself, and users' own around and inside units."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from twin import DIM, LAYERS, Block, SmallModel, Twin, floats_for, next_token_loss, part_of, squared_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy


def norms(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, Block))  # nested: a norm lies inside a block


CHOICES: dict[str, Any] = {
    "units": True,
    "selective": "selective",
    "inside": lambda m: isinstance(m, nn.LayerNorm),
    "nested": norms,
    "head": lambda m: isinstance(m, nn.Linear) and m.bias is not None,  # one in the root, others in units
}


@pytest.mark.parametrize(
    ("choice", "cap", "communicator"),
    [
        ("units", None, "auto"),
        ("units", 0.0005, "c10d"),
        ("units", 0.02, "auto"),
        ("selective", 0.0005, "auto"),
        ("selective", None, "c10d"),
        ("inside", 0.0005, "auto"),
        ("nested", 0.02, "c10d"),
        ("head", None, "auto"),
    ],
)
@on_ranks(1, 3)
def test_the_same_numbers_and_two_gathers_per_unit(choice: str, cap: float | None, communicator: str) -> None:
    """cap 0.0005: every parameter a bucket; 0.02: two blocks of 10,080 bytes each are one unit."""
    twin = Twin(SmallModel, activation_checkpointing=CHOICES[choice], bucket_cap_mb=cap, communicator=communicator)
    twin.train(3)
    assert twin.counters.gathers <= 3 * 2 * len(twin.state.plan.units)
    assert twin.counters.overflow_places == 0


@on_ranks(2)
def test_names_types_and_state_dicts_stay() -> None:
    plain, model = SmallModel(), FSDP(SmallModel(), activation_checkpointing=True)
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(isinstance(layer, Block) for layer in model.layers)
    assert repr(model.layers) == repr(plain.layers)


class Counting(nn.Module):
    """Counts its runs; dropout makes them random, a keyword has the name of one of checkpoint's own options."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.runs = {"first": 0, "last": 0}
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, *, debug: torch.Tensor) -> torch.Tensor:
        self.runs["first"] += 1
        self.dtypes |= {x.dtype, debug.dtype, self.first.weight.dtype}
        x = F.dropout(torch.tanh(self.first(x)), 0.3, self.training) * debug
        self.runs["last"] += 1
        return self.last(x)


class CountingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, debug=torch.full((1,), 1.5))
        return x


def seeded_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(int(x.abs().sum().item() * 1e6) % 2**31)
    return squared_loss(model, x)


@pytest.mark.parametrize("mode", [True, "selective"])
@on_ranks(1, 2)
def test_dropout_is_the_same_in_the_recomputation(mode: Any) -> None:
    """Bit for bit the plain model's gradients, and the generator ends in the plain model's state."""
    twin = Twin(CountingModel, seeded_loss, floats_for, activation_checkpointing=mode)
    twin.train(3)
    # Each of the 3 steps runs a unit twice.
    assert [layer.runs["first"] for layer in twin.model.layers] == [6] * LAYERS
    x = floats_for(7, twin.rank)
    states = []
    for model in (twin.model, twin.plain):
        seeded_loss(model, x).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("early_stop", [True, False])
@on_ranks(2)
def test_early_stop(early_stop: bool) -> None:
    """The last linear's result is not needed for its own backward: with early stop it is not computed again, and the
    forward is cut short where a hook after it would never run."""
    with set_checkpoint_early_stop(early_stop):
        twin = Twin(CountingModel, seeded_loss, floats_for, activation_checkpointing=True)
        ended: list[int] = []
        for layer in twin.model.layers:
            layer.register_forward_hook(lambda *_: ended.append(1))
        twin.train(2)
    assert len(ended) == 2 * LAYERS * (1 if early_stop else 2)
    assert twin.counters.gathers <= 2 * 2 * len(twin.state.plan.units)


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("cast", [True, False])
@on_ranks(1, 2)
def test_recomputation_sees_the_dtypes_of_the_forward(mode: Any, cast: bool) -> None:
    """bfloat16 parameters, float32 inputs: gradients bit for bit those without checkpointing."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=cast)

    def gradients(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = FSDP(CountingModel(), mixed_precision=policy, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not cast):
            loss = seeded_loss(model, floats_for(0, 0))
        loss.backward()
        assert all(layer.dtypes == model.layers[0].dtypes for layer in model.layers[1:])
        assert model.layers[1].dtypes == {torch.bfloat16} if cast else {torch.bfloat16, torch.float32}
        return [p.grad for p in model.parameters()]

    for got, want in zip(gradients(activation_checkpointing=mode), gradients(), strict=True):
        assert torch.equal(got, want) and got.dtype == torch.float32


def held_bytes(model: Any, loss: Callable[[Any], torch.Tensor]) -> int:
    """Bytes that a forward leaves allocated for its backward: what operators allocated minus what was freed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = loss(model)
    held = sum(event.self_cpu_memory_usage for event in profiler.events())
    result.backward()
    return held


class Wide(nn.Module):
    """Keeps, per token of DIM floats: gelu's input (3 DIM) and output (3 DIM) beside its own input (DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class WideModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wide() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("mode", "per_layer"), [(False, 7 * DIM), (True, DIM), ("selective", 4 * DIM)])
@on_ranks(2)
def test_memory_of_activations(mode: Any, per_layer: int) -> None:
    """Floats per token and layer. Selective keeps the first of the two products: 3 DIM beside the layer's input.

    1000 tokens; the model's input was there before, the loss keeps the last output's square root, and small change
    (hooks, the generator's 5 kB per layer) is less than one DIM-sized tensor altogether.
    """
    tokens = 1000
    x = torch.randn(tokens, DIM)
    model = FSDP(WideModel(), activation_checkpointing=mode)
    loss = lambda m: m(x).sum()  # noqa: E731  (keeps nothing)
    loss(model).backward()
    held = held_bytes(model, loss)
    expected = 4 * tokens * (per_layer * LAYERS - DIM)
    assert abs(held - expected) < 4 * tokens * DIM, (held / 4 / tokens / DIM, expected / 4 / tokens / DIM)


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class OpaqueBlock(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(super().forward(x))


class OpaqueModel(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OpaqueBlock() for _ in range(LAYERS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x).value
        return self.head(x)


@on_ranks(1, 2)
def test_units_whose_outputs_nothing_looks_into() -> None:
    """The recomputation itself says that the unit's backward begins."""
    twin = Twin(OpaqueModel, activation_checkpointing=True)
    twin.train(3)
    assert twin.counters.gathers <= 3 * 2 * len(twin.state.plan.units)


class Twice(SmallModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in (0, 1, 0, 2, 2):
            x = self.layers[i](x)
        return self.head(x)


@pytest.mark.parametrize("mode", [True, "selective"])
@on_ranks(1, 3)
def test_units_called_twice(mode: Any) -> None:
    Twin(Twice, activation_checkpointing=mode).train(3)


class Nested(nn.Module):
    """Units inside units."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), Block(), Block()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for outer in self.outer:
            x = torch.tanh(outer(x))
        return x


@pytest.mark.parametrize("inner_only", [True, False])
@on_ranks(1, 2)
def test_nested_units(inner_only: bool) -> None:
    choice: Any = (lambda m: isinstance(m, Block)) if inner_only else True
    twin = Twin(
        Nested,
        squared_loss,
        floats_for,
        activation_checkpointing=choice,
        auto_wrap_policy=lambda m: isinstance(m, (nn.Sequential, Block)),
    )
    twin.train(3)
    assert twin.counters.gathers <= 3 * 2 * len(twin.state.plan.units)


@on_ranks(2)
def test_accumulation_evaluation_and_retained_graphs() -> None:
    twin = Twin(SmallModel, activation_checkpointing=True)
    with twin.model.no_sync():
        next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    with torch.no_grad():
        assert torch.equal(twin.model(tokens_for(5, 0)), twin.plain(tokens_for(5, 0)))
    next_token_loss(twin.model, tokens_for(1, twin.rank)).backward()
    twin.plain_backward([0, 1])
    twin.check_gradients(relative=1e-6)  # added up in another order
    twin.model.zero_grad()
    loss = next_token_loss(twin.model, tokens_for(2, twin.rank))
    loss.backward(retain_graph=True)
    loss.backward()
    twin.plain_backward([2, 2])
    twin.check_gradients()


@on_ranks(1)
def test_bad_options() -> None:
    for option, message in [
        ("full", "activation_checkpointing must be False, True, 'selective' or a predicate over modules, got 'full'"),
        (1, "must be False, True, 'selective' or a predicate over modules, got 1"),
        (lambda m: False, "activation_checkpointing chose no module"),
        (lambda m: isinstance(m, SmallModel), "chose the root module: its recomputation would gather all units"),
        (lambda m: isinstance(m, nn.ModuleList), "chose 'layers', a container without a forward"),
    ]:
        with pytest.raises(ValueError, match=message):
            FSDP(SmallModel(), activation_checkpointing=option)
    with pytest.raises(ValueError, match="Linear has none but the root: mark some with fully_shard"):
        FSDP(nn.Linear(2, 2), activation_checkpointing=True)


# ---- users' own checkpointing, re-entrant ------------------------------------------------------------------------------


class Reentrant(SmallModel):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.where == "two at once":
            x = checkpoint(lambda x: self.layers[1](self.layers[0](x)), x, use_reentrant=True)
            return self.head(self.layers[2](x))
        order = (0, 1, 0, 2, 2) if self.where == "twice" else range(LAYERS)
        for i in order:
            x = checkpoint(self.layers[i], x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize("cap", [None, 0.0005])
@pytest.mark.parametrize("where", ["outside", "two at once"])
@on_ranks(1, 3)
def test_reentrant_checkpoints(where: str, cap: float | None) -> None:
    twin = Twin(lambda: Reentrant(where), bucket_cap_mb=cap)
    twin.train(3)
    assert twin.counters.gathers <= 3 * 2 * len(twin.state.plan.units)


@on_ranks(2)
def test_the_whole_model_in_a_reentrant_checkpoint() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, DIM)
            self.inner = Middle()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, self.embed(tokens), use_reentrant=True)

    torch.manual_seed(0)
    around: Any = Around()
    plain = copy.deepcopy(around)
    around.inner = FSDP(around.inner)
    for model in (around, plain):
        model(tokens_for(0, 0)).pow(2).mean().backward()
    want = [p.grad for p in plain.inner.parameters()]
    for param, gradient in zip(around.inner._fsdp_state.params, want, strict=True):
        assert torch.equal(param.sharded.grad, part_of(param, gradient))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@on_ranks(1, 2)
def test_a_unit_twice_in_reentrant_checkpoints_is_refused() -> None:
    """Each nested backward gives the unit's gradient of its own, the second one after the first was reduced."""
    twin = Twin(lambda: Reentrant("twice"))
    with pytest.raises(
        RuntimeError, match="received another gradient after its bucket was reduced.*use_reentrant=False"
    ):
        next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    twin.model.zero_grad()
    for model in (twin.model, twin.plain):
        model.where = "outside"
    twin.train(2)
