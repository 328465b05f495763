"""The ways in which models are called: order, repetition, evaluation, outputs, checkpointing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from twin import SmallModel, Twin, floats_for, next_token_loss, squared_loss, tokens_for


class Twice(SmallModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in (self.layers[0], self.layers[1], self.layers[0], self.layers[2], self.layers[2]):
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("cap", [None, 0.0005])
@on_ranks(1, 2, 3)
def test_a_unit_called_twice(cap: float | None) -> None:
    Twin(Twice, bucket_cap_mb=cap).train(3)


class AnyOrder(SmallModel):
    def forward(self, batch: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        tokens, order = batch
        x = self.embed(tokens)
        for i in order:
            x = self.layers[i](x)
        return self.head(x)


ORDERS = [[0, 1, 2], [2, 0, 1], [1], [0, 1, 2], [2, 1, 0], [0, 0, 2], []]


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(2, 3)
def test_another_order_in_every_step(communicator: str) -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, list[int]]) -> torch.Tensor:
        return F.cross_entropy(model(batch).flatten(0, 1), batch[0].flatten())

    twin = Twin(AnyOrder, loss, lambda step, rank: (tokens_for(step, rank), ORDERS[step]), communicator=communicator)
    twin.train(len(ORDERS))
    assert twin.counters.order_misses > 0


@on_ranks(1, 2, 3)
def test_two_forwards_before_one_backward() -> None:
    """The second forward gathers again, so the first one's backward must find the same weights at other places."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        first, second = model(tokens), model(tokens.flip(0))
        return F.cross_entropy((first + 2 * second).flatten(0, 1), tokens.flatten())

    Twin(SmallModel, loss).train(3)


@on_ranks(2)
def test_two_backwards_of_one_loss_each() -> None:
    """Two forwards, then their backwards one by one, the first one first: gradients add up."""
    twin = Twin(SmallModel)
    losses = [next_token_loss(twin.model, tokens_for(step, twin.rank)) for step in (0, 1)]
    for loss in losses:
        loss.backward()
    twin.plain_backward([0, 1])
    twin.check_gradients()


@on_ranks(2)
def test_the_graph_can_be_kept() -> None:
    twin = Twin(SmallModel)
    loss = next_token_loss(twin.model, tokens_for(0, twin.rank))
    loss.backward(retain_graph=True)
    loss.backward()
    twin.plain_backward([0, 0])
    twin.check_gradients()


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2, 3)
def test_evaluation_between_training_steps(reshard: bool) -> None:
    """After a forward, between forward and backward, and after a backward; also in inference mode."""
    twin = Twin(SmallModel, reshard_after_forward=reshard)
    ours = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2)

    def evaluate(context: Callable[[], Any]) -> None:
        twin.model.eval()
        with context():
            got, want = twin.model(tokens_for(9, twin.rank)), twin.plain(tokens_for(9, twin.rank))
        assert torch.equal(got, want)
        twin.model.train()

    for step in range(3):
        evaluate(torch.no_grad)
        ours.zero_grad()
        loss = next_token_loss(twin.model, tokens_for(step, twin.rank))
        evaluate(torch.no_grad)
        loss.backward()
        twin.plain_backward([step])
        twin.check_gradients()
        evaluate(torch.inference_mode)
        ours.step()
        theirs.step()
    evaluate(torch.no_grad)


@on_ranks(2)
def test_forward_without_backward() -> None:
    """Losses that are dropped leave nothing behind."""
    twin = Twin(SmallModel)
    for step in range(3):
        next_token_loss(twin.model, tokens_for(step, twin.rank))
    twin.train(2)


@on_ranks(2)
def test_a_unit_called_by_itself() -> None:
    """Outside the root's forward, for evaluation and with a backward."""
    twin = Twin(SmallModel)
    x = floats_for(0, twin.rank)
    with torch.no_grad():
        assert torch.equal(twin.model.layers[1](x), twin.plain.layers[1](x))
    twin.model.layers[1](x).pow(2).mean().backward()
    for rank in range(2):
        twin.plain.layers[1](floats_for(0, rank)).pow(2).mean().backward()
    for p in twin.plain.parameters():
        if p.grad is not None:
            p.grad /= 2
    twin.check_gradients()
    twin.model.zero_grad()
    twin.train(2)


# ---- outputs and inputs ----------------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Pair(NamedTuple):
    first: torch.Tensor
    second: tuple[torch.Tensor, None]


class Opaque:
    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def wrap_output(kind: str, x: torch.Tensor) -> Any:
    if kind == "dict":
        return {"hidden": x, "none": None}
    if kind == "nested":
        return [x * 1, {"deep": (x, None, [x * 2])}]
    if kind == "dataclass":
        return Output(x)
    if kind == "namedtuple":
        return Pair(x, (x, None))
    return Opaque(x)


def unwrap_output(kind: str, output: Any) -> torch.Tensor:
    if kind == "dict":
        return output["hidden"]
    if kind == "nested":
        return output[1]["deep"][0] + output[1]["deep"][2][0]
    if kind == "dataclass" or kind == "opaque":
        return output.hidden
    return output.first + output.second[0]


class Wrapping(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(20, 20)

    def forward(self, *, x: torch.Tensor) -> Any:
        return wrap_output(self.kind, torch.tanh(self.inner(x)))


class KeywordModel(nn.Module):
    """Units take keyword arguments only and give containers; so does the root."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Wrapping(kind) for _ in range(3))

    def forward(self, *, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = unwrap_output(self.kind, layer(x=x))
        return wrap_output(self.kind, x)


@pytest.mark.parametrize("kind", ["dict", "nested", "dataclass", "namedtuple"])
@on_ranks(1, 2)
def test_outputs_in_containers_and_keyword_inputs(kind: str) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return unwrap_output(kind, model(x=x)).pow(2).mean()

    Twin(lambda: KeywordModel(kind), loss, floats_for).train(3)


class WithNone(SmallModel):
    """A unit that gives None and is used for its side effect only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Silent())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers[:-1]:
            x = layer(x)
        found: list[torch.Tensor] = []
        assert self.layers[-1](x, found) is None
        return self.head(x)


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20))

    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> None:
        found.append((x * self.weight).sum().detach())


@on_ranks(2)
def test_a_unit_that_returns_none() -> None:
    Twin(WithNone).train(3)


@on_ranks(1, 2)
def test_an_opaque_output_is_refused_or_right() -> None:
    """A tensor inside an object that nothing looks into: either our error, or the right numbers."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x=x).hidden.pow(2).mean()

    twin = Twin(lambda: KeywordModel("opaque"), loss, floats_for)
    try:
        twin.backward(0)
    except RuntimeError as error:
        assert "is sharded" in str(error)
    else:
        twin.check_gradients()


class InPlace(SmallModel):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
            x += 1
            x[:, 0] *= 2
            F.relu_(x)
        return self.head(x)


class ViewOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(-1, 4, 5)[:, :, :]


class InPlaceOnViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ViewOutput() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            y[:, 1] *= 3
            y.add_(1)
            x = torch.tanh(y).reshape(-1, 20)
        return x


@on_ranks(1, 2)
def test_in_place_operations_on_outputs() -> None:
    Twin(InPlace).train(3)
    Twin(InPlaceOnViews, squared_loss, floats_for).train(3)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


class CheckpointedInside(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class Checkpointed(SmallModel):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "inside":
            self.layers = nn.ModuleList(CheckpointedInside(layer) for layer in self.layers)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.where == "two at once":
            x = checkpoint(lambda x: self.layers[1](self.layers[0](x)), x, use_reentrant=False)
            return self.head(self.layers[2](x))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.where == "outside" else layer(x)
        return self.head(x)


@pytest.mark.parametrize("cap", [None, 0.0005])
@pytest.mark.parametrize("where", ["inside", "outside", "two at once"])
@on_ranks(1, 2, 3)
def test_activation_checkpointing(where: str, cap: float | None) -> None:
    """Memory as without it: two gathers per unit and step, no unit stays gathered after its backward."""
    twin = Twin(lambda: Checkpointed(where), bucket_cap_mb=cap)
    twin.train(3)
    assert twin.counters.gathers <= 3 * 2 * len(twin.state.plan.units)
    assert twin.counters.overflow_places == (0 if where != "two at once" else twin.counters.overflow_places)


@pytest.mark.parametrize("with_loss", [False, True])
@on_ranks(1, 2)
def test_the_whole_model_checkpointed(with_loss: bool) -> None:
    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        if with_loss:
            return checkpoint(next_token_loss, model, tokens, use_reentrant=False)
        logits = checkpoint(model, tokens, use_reentrant=False)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

    Twin(SmallModel, loss).train(3)


@on_ranks(2)
def test_hooks_on_parameters_see_the_whole_gradient() -> None:
    """A user's hook on the leaf that stands in the module runs once, on the rank's own, unreduced gradient."""
    twin = Twin(SmallModel)
    seen: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any) -> None:
        if not seen:
            module.weight.register_hook(lambda g: seen.append(g.clone()))

    twin.model.head.register_forward_pre_hook(hook)
    next_token_loss(twin.model, tokens_for(0, twin.rank)).backward()
    next_token_loss(twin.plain, tokens_for(0, twin.rank)).backward()
    assert len(seen) == 1 and torch.equal(seen[0], twin.plain.head.weight.grad)


@on_ranks(2)
def test_optimizer_in_backward() -> None:
    """post-accumulate-grad hooks on the pieces run when the reduced gradient is there."""
    twin = Twin(SmallModel)
    seen: dict[str, torch.Tensor] = {}
    for name, p in twin.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    twin.backward(0)
    twin.check_gradients()
    for param in twin.state.params:
        assert torch.equal(seen[param.name], param.sharded.grad)
