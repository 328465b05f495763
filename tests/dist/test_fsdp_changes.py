"""What users do to parameters between steps: freeze, unfreeze, write, replace, hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import on_ranks
from torch import nn
from twin import DIM, SmallModel, Twin, floats_for, next_token_loss, part_of, tokens_for

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])


def on_both(twin: Twin, change: Callable[[nn.Module], Any]) -> None:
    change(twin.model)
    change(twin.plain)


# ---- requires_grad_() ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("communicator", "cap"), [("auto", None), ("auto", 0.0005), ("c10d", 0.0005)])
@on_ranks(1, 2, 3)
def test_frozen_and_unfrozen_between_steps(communicator: str, cap: float | None) -> None:
    """A whole unit, single parameters of units and of the root; then all again. No unit outlives its backward."""
    twin = Twin(SmallModel, communicator=communicator, bucket_cap_mb=cap)

    def freeze(model: nn.Module, frozen: bool) -> None:
        model.layers[1].requires_grad_(not frozen)
        model.layers[2].up.weight.requires_grad_(not frozen)
        model.head.bias.requires_grad_(not frozen)

    for frozen in (False, True, False, True):
        on_both(twin, lambda model, frozen=frozen: freeze(model, frozen))
        twin.train(2)
        with_gradient = {p.name for p in twin.state.params if p.sharded.grad is not None}
        assert with_gradient == {n for n, p in twin.plain.named_parameters() if p.requires_grad}
        on_both(twin, lambda model: model.zero_grad())
    assert twin.counters.overflow_places == 0


@on_ranks(2)
def test_a_frozen_parameter_keeps_its_gradient() -> None:
    """As in torch: freezing does not clear what is there, and nothing is added to it."""
    twin = Twin(SmallModel)
    twin.backward(0)
    first = twin.model.head.weight.grad.clone()
    on_both(twin, lambda model: model.head.weight.requires_grad_(False))
    next_token_loss(twin.model, tokens_for(1, twin.rank)).backward()
    assert torch.equal(twin.model.head.weight.grad, first)


class FrozenEmbedding(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)


@on_ranks(2)
def test_unfreezing_what_was_frozen_at_the_wrap_is_refused() -> None:
    twin = Twin(FrozenEmbedding)
    twin.train(1)
    twin.model.embed.requires_grad_(True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'embed.weight' was frozen when FSDP\(...\) wrapped.*Wrap the model"):
            twin.model(tokens_for(0, twin.rank))
    twin.model.embed.requires_grad_(False)
    twin.train(1)


class FreezesInForward(SmallModel):
    freeze: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.freeze is not None:
            self.layers[1].requires_grad_(not self.freeze)
        return super().forward(tokens)


@on_ranks(1, 2)
def test_requires_grad_inside_forward() -> None:
    """Takes effect at once, as in torch, and stays."""
    twin = Twin(FreezesInForward)
    twin.train(1)
    for freeze in (True, None, False, None):
        on_both(twin, lambda model, freeze=freeze: setattr(model, "freeze", freeze))
        for model in (twin.model, twin.plain):
            model.zero_grad()
        twin.backward(1)
        twin.check_gradients()
    assert all(p.sharded.requires_grad for p in twin.state.params)


# ---- hooks on the sharded parameters ---------------------------------------------------------------------------------


@COMMUNICATORS
@on_ranks(1, 3)
def test_hooks_of_sharded_parameters(communicator: str) -> None:
    """Run once in each backward, on this rank's part of the average that this backward adds; what they return counts."""
    twin = Twin(SmallModel, communicator=communicator)
    seen: list[torch.Tensor] = []
    weight = twin.model.layers[1].up.weight

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return 2 * gradient

    handle = weight.register_hook(double)
    total = torch.zeros_like(weight)
    param = next(p for p in twin.state.params if p.sharded is weight)
    for step in range(2):  # no zero_grad: the second one is added
        twin.backward(step)
        average = part_of(param, twin.plain.layers[1].up.weight.grad)
        assert len(seen) == step + 1 and torch.equal(seen[step], average)
        total += 2 * average
        assert torch.equal(weight.grad, total)
    handle.remove()
    twin.model.zero_grad()
    twin.train(1)


@on_ranks(2)
def test_hooks_from_before_the_wrap_move_to_the_piece() -> None:
    calls: list[str] = []

    class Hooked(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.register_hook(lambda g: (calls.append("hook"), g * 4)[1])
            self.head.bias.register_post_accumulate_grad_hook(lambda p: calls.append("post"))

    twin = Twin(Hooked)
    next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    assert sorted(calls) == ["hook", "post"]
    twin.plain_backward([0])
    param = next(p for p in twin.state.params if p.name == "head.weight")
    want = part_of(param, twin.plain.head.weight.grad)  # the plain hook multiplies before the average, by a power of two
    assert torch.equal(param.sharded.grad, want)


# ---- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["in place", "data", ".data.copy_", "foreach"])
@on_ranks(2)
def test_writes_are_seen_by_the_next_forward(how: str, reshard: bool) -> None:
    """After a forward with and without gradients; nothing that was gathered before is used again."""
    twin = Twin(SmallModel, reshard_after_forward=reshard)

    def write(params: list[nn.Parameter]) -> None:
        with torch.no_grad():
            if how == "foreach":
                torch._foreach_mul_(params, 0.5)
            for p in params:
                if how == "in place":
                    p.mul_(0.5)
                elif how == "data":
                    p.data = p.data * 0.5
                elif how == ".data.copy_":
                    p.data.copy_(p.data * 0.5)

    for before in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with before():
            twin.model(tokens_for(0, twin.rank))
        on_both(twin, lambda model: write(list(model.parameters())))
        twin.check_weights()
        with torch.no_grad():
            assert torch.equal(twin.model(tokens_for(0, twin.rank)), twin.plain(tokens_for(0, twin.rank)))
            x = floats_for(0, twin.rank)
            assert torch.equal(twin.model.layers[1](x), twin.plain.layers[1](x))
    twin.train(2)


@on_ranks(2)
def test_data_of_another_shape_or_dtype_is_refused() -> None:
    model = SmallModel()
    Twin(lambda: model)
    bias = model.head.bias
    kept = bias.data
    for data, found in ((torch.zeros(38), "Float"), (kept.double(), "Double")):
        bias.data = data
        with pytest.raises(RuntimeError, match=rf"the .data of parameter 'head.bias' was replaced: it is {found}.*piece"):
            model(tokens_for(0, 0))
    bias.data = kept
    model(tokens_for(0, 0))


@on_ranks(2)
def test_casting_a_part_of_the_model_is_refused() -> None:
    twin = Twin(SmallModel)
    twin.model.layers[1].double()
    with pytest.raises(RuntimeError, match=r"'layers.1.norm.weight' was replaced: it is Double .*MixedPrecisionPolicy"):
        twin.model(tokens_for(0, 0))
    twin.model.layers[1].float()
    twin.train(1)


@on_ranks(1, 2)
def test_replaced_parameters_are_refused() -> None:
    twin = Twin(SmallModel)
    head = twin.model.head
    kept = head.weight
    head.weight = nn.Parameter(torch.zeros(37, DIM))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'head.weight' was replaced by another object after FSDP\(...\)"):
            twin.model(tokens_for(0, 0))
    head.weight = kept
    nn.utils.parametrize.register_parametrization(head, "weight", nn.Identity())
    with pytest.raises(RuntimeError, match=r"'head.weight' was removed after FSDP\(...\).*before FSDP"):
        twin.model(tokens_for(0, 0))


@on_ranks(1, 2)
def test_writing_between_forward_and_backward_is_refused() -> None:
    """torch says that a variable needed for backward was modified; so do we, where a second gather would differ."""
    twin = Twin(SmallModel)
    loss = next_token_loss(twin.model, tokens_for(0, twin.rank))
    with torch.no_grad():
        twin.model.layers[1].up.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match=r"'layers.1.up.weight' of unit 'layers.1' was modified between the forward"):
        loss.backward()
    twin.model.zero_grad()
    twin.train(2)


@on_ranks(2)
def test_optimizer_in_backward_with_values_passed_through() -> None:
    """A unit's hook that comes after its parameters were updated by the same backward is no such case."""

    class PassesThrough(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(DIM, DIM)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.up(x), y

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(PassesThrough() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x
            for layer in self.layers:
                x, y = layer(x, x + y)
            return x + y

    twin = Twin(Model, lambda model, x: model(x).pow(2).mean(), floats_for)

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    for p in twin.model.parameters():
        p.register_post_accumulate_grad_hook(update)
    for step in range(3):
        twin.backward(step)
        with torch.no_grad():
            for p in twin.plain.parameters():
                p.add_(p.grad, alpha=-0.1)
        twin.check_weights()
