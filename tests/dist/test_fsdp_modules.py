"""Modules of many kinds: normalisation, buffers, layouts, parametrisations, hooks, and inference before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.nn.utils import parametrizations, prune
from twin import DIM, Block, SmallModel, Twin, floats_for, next_token_loss, squared_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(1, 2)
def test_evaluation_before_the_first_step(reshard: bool, context: Callable[[], Any]) -> None:
    """Also of one unit by itself; then training is as if nothing had been."""
    twin = Twin(SmallModel, reshard_after_forward=reshard)
    for step in range(2):
        with context():
            assert torch.equal(twin.model(tokens_for(step, twin.rank)), twin.plain(tokens_for(step, twin.rank)))
            x = floats_for(step, twin.rank)
            assert torch.equal(twin.model.layers[0](x), twin.plain.layers[0](x))
    twin.train(2)
    with context():
        assert torch.equal(twin.model(tokens_for(9, twin.rank)), twin.plain(tokens_for(9, twin.rank)))
    twin.train(1)


@on_ranks(1, 2)
def test_built_in_inference_mode() -> None:
    """Wrapped and loaded inside inference mode, as a server does, and trained later."""
    torch.manual_seed(0)
    plain = SmallModel()
    torch.manual_seed(0)
    with torch.inference_mode():
        model = FSDP(SmallModel())
        model.load_state_dict(plain.state_dict())
        assert torch.equal(model(tokens_for(0, 0)), plain(tokens_for(0, 0)))
    next_token_loss(model, tokens_for(0, 0)).backward()
    next_token_loss(plain, tokens_for(0, 0)).backward()
    twin = object.__new__(Twin)
    twin.plain, twin.state = plain, model._fsdp_state
    twin.check_gradients()


class Dropping(SmallModel):
    """The second block runs and its output is dropped; the third one's, for odd steps, too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        self.layers[1](x)
        return self.head(self.layers[2](x))


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(1, 2, 3)
def test_dropped_outputs(communicator: str) -> None:
    twin = Twin(Dropping, communicator=communicator)
    twin.train(3)
    assert {p.name.split(".")[1] for p in twin.state.params if p.sharded.grad is None} == {"1"}
    assert not any(twin.state.engine.is_gathered(unit) for unit in range(4))


# ---- normalisation and buffers ---------------------------------------------------------------------------------------


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@on_ranks(1, 2)
def test_batch_norm_in_bfloat16() -> None:
    """The norms stay float32, and all is as in a plain model whose linear layers are bfloat16."""
    torch.manual_seed(0)
    plain = Normalised()
    torch.manual_seed(0)
    model: Any = FSDP(Normalised(), mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16))
    for layer in plain.layers:
        layer[0].bfloat16()
    for step in range(2):
        x = floats_for(step, 0)
        got, want = model(x), plain(x.bfloat16())
        assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    got.sum().backward()
    for name, buffer in model.named_buffers():
        assert buffer.dtype == (torch.int64 if "num_batches" in name else torch.float32)
        assert torch.equal(buffer, plain.get_buffer(name)), name
    model.eval()
    plain.eval()
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x.bfloat16()))


class Buffers(nn.Module):
    """Persistent and not, of three dtypes, one a view of another, one shared by two names, one that forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)])
        table = torch.linspace(0, 1, 3 * DIM).view(3, DIM)
        self.register_buffer("table", table)
        self.register_buffer("row", table[1])
        self.register_buffer("hidden", torch.linspace(1, 2, DIM), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(DIM, dtype=torch.bool))
        self.register_buffer("none", None)
        self.register_buffer("same", self.steps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.table[1].fill_(2)
        x = self.layers[1](self.layers[0](x))
        return torch.where(self.mask, x * self.row.to(x.dtype) + self.hidden.to(x.dtype), x)


@on_ranks(1, 2)
def test_buffers_stay_what_they_were() -> None:
    """Views of views, shared memory and dtypes; state dicts as the plain model's."""
    twin = Twin(Buffers, squared_loss, floats_for)
    twin.train(1)
    assert twin.model.steps == 1 and twin.model.same is twin.model.steps
    assert twin.model.row.data_ptr() == twin.model.table[1].data_ptr() and (twin.model.row == 2).all()
    assert twin.model.state_dict().keys() == twin.plain.state_dict().keys()


@on_ranks(1, 2)
def test_buffer_dtype_of_every_kind_of_buffer() -> None:
    """Floating ones compute in buffer_dtype and are saved in their own; what shared memory still does."""
    policy = MixedPrecisionPolicy(buffer_dtype=torch.bfloat16)
    model: Any = FSDP(Buffers(), mixed_precision=policy)
    plain = Buffers()
    assert model.hidden.dtype == model.table.dtype == model.row.dtype == torch.bfloat16
    assert model.mask.dtype == torch.bool and model.steps.dtype == torch.int64 and model.none is None
    model(floats_for(0, 0)).sum().backward()
    assert model.same is model.steps and model.steps == 1
    saved = model.state_dict()
    for name, value in plain.state_dict().items():
        assert saved[name].dtype == value.dtype, name
    model.load_state_dict(saved)
    model.load_state_dict({**saved, "table": saved["table"] * 2}, assign=True)
    assert model.table.dtype == torch.bfloat16


# ---- layouts ---------------------------------------------------------------------------------------------------------


class Layouts(nn.Module):
    """A channels-last convolution, a transposed weight, an expanded one and one that is a slice of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 7).t())
        self.sliced = nn.Parameter(torch.randn(9, 6)[::2, 1:])
        self.expanded = nn.Parameter(torch.randn(4, 1).expand(4, 5).detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x.view(-1, 3, 3, 3)).mean((2, 3))
        return y @ self.transposed.t() @ torch.ones(7, 4) @ (self.sliced[:4] * self.expanded)


class LayoutModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layouts()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)


@on_ranks(1, 2, 3)
def test_parameters_that_are_not_contiguous() -> None:
    """Values by index, not by address. Gathered ones are contiguous, so sums may be formed in another order: the
    gradients agree to 16 roundings of the largest element.
    """
    torch.manual_seed(0)
    twin = Twin(LayoutModel, squared_loss, lambda step, rank: floats_for(step, rank, 4, 27))
    twin.check_weights()
    assert not twin.plain.layers[0].transposed.is_contiguous()
    squared_loss(twin.model, twin.batches(0, twin.rank)).backward()
    twin.plain_backward([0])
    twin.check_gradients(relative=16 * 2**-24)
    twin.model.load_state_dict(LayoutModel().state_dict())


# ---- parametrisations ------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight + weight.T) * self.gain


PARAMETRIZE: dict[str, Callable[[nn.Linear], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own, with a parameter": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Symmetric()),
    "old weight_norm": nn.utils.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda m: prune.ln_structured(m, "weight", amount=0.3, n=2, dim=0),
}


@pytest.mark.parametrize("kind", PARAMETRIZE)
@pytest.mark.filterwarnings("ignore:.*weight_norm")
@on_ranks(2)
def test_parametrized_weights(kind: str) -> None:
    """A unit that is the parametrised layer itself, one around it, and the root's."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(DIM, DIM)
            PARAMETRIZE[kind](self.inner)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inner(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
            for module in (layer, self.head):
                PARAMETRIZE[kind](module)
            self.layers = nn.ModuleList([layer, Around()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers[1](self.layers[0](x)))

    def one_rank_at_a_time(step: int, rank: int) -> torch.Tensor:
        return floats_for(step, 0)  # spectral norms count forwards: all ranks and the plain model see the same

    twin = Twin(Model, squared_loss, one_rank_at_a_time)
    loss = squared_loss(twin.model, floats_for(0, 0))
    want = squared_loss(twin.plain, floats_for(0, 0))
    assert torch.equal(loss, want)
    loss.backward()
    want.backward()
    twin.check_gradients()
    assert set(twin.model.state_dict()) == set(twin.plain.state_dict())


# ---- attributes and hooks --------------------------------------------------------------------------------------------


class Guarded(Block):
    """Allows no attribute that it does not know, and renames some reads."""

    KNOWN = frozenset({"norm", "up", "down", "training"})

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in self.KNOWN:
            raise AttributeError(f"no attribute {name}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("up" if name == "expand" else name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.expand(self.norm(x))))


class GuardedModel(SmallModel):
    __slots__ = ("extra",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Guarded() for _ in range(2))
        self.extra = 3

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("embed", "layers", "head", "training", "extra") and not name.startswith("_"):
            raise AttributeError(f"no attribute {name}")
        super().__setattr__(name, value)


@on_ranks(2)
def test_modules_with_attribute_access_of_their_own() -> None:
    twin = Twin(GuardedModel)
    twin.train(2)
    assert twin.model.extra == 3
    with pytest.raises(AttributeError, match="no attribute unknown"):
        twin.model.unknown = 1


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(1, 2)
def test_hooks_of_modules(when: str) -> None:
    """Every kind, on the root, a unit and an inner module, put there before and after the wrap: they run as often and in
    the same order as in a plain model, see whole weights where the module does, and what they return counts.
    """

    def install(model: nn.Module, calls: list[str]) -> None:
        for path in ("", "layers.1", "layers.1.up"):
            module = model.get_submodule(path)

            def note(kind: str, path: str = path) -> None:
                calls.append(f"{kind} {path}")

            def pre(m: nn.Module, args: Any, note: Any = note) -> Any:
                note("pre")
                return tuple(a * 1.5 if a.is_floating_point() else a for a in args)

            def pre_kwargs(m: nn.Module, args: Any, kwargs: Any, note: Any = note) -> None:
                note("pre kwargs")

            def post(m: nn.Module, args: Any, output: torch.Tensor, note: Any = note) -> torch.Tensor:
                note("post")
                return output * 0.5

            def backward_pre(m: nn.Module, grads: Any, note: Any = note) -> Any:
                note("backward pre")
                return tuple(g * 2 for g in grads)

            def backward(m: nn.Module, grads_in: Any, grads_out: Any, note: Any = note) -> Any:
                note("backward")
                return tuple(None if g is None else g * 0.25 for g in grads_in)

            def inner_weight(m: nn.Module, args: Any) -> None:
                calls.append(str(tuple(m.weight.shape)))

            module.register_forward_pre_hook(pre)
            module.register_forward_pre_hook(pre_kwargs, with_kwargs=True)
            module.register_forward_hook(post)
            module.register_full_backward_pre_hook(backward_pre)
            if path:
                module.register_full_backward_hook(backward)
            if path == "layers.1.up":
                module.register_forward_pre_hook(inner_weight)
            module.register_state_dict_post_hook(lambda m, s, prefix, meta, note=note: note("state"))
            module.register_load_state_dict_pre_hook(lambda m, *a, note=note: note("load"))
            module.register_load_state_dict_post_hook(lambda m, keys, note=note: note("loaded"))

    seen: list[list[str]] = []

    def make() -> nn.Module:
        model = SmallModel()
        if when == "before":
            seen.append([])
            install(model, seen[-1])
        return model

    twin = Twin(make)
    if when == "after":
        for model in (twin.plain, twin.model):
            seen.append([])
            install(model, seen[-1])
    theirs, ours = seen
    twin.model(tokens_for(0, twin.rank)).sum().backward()
    twin.plain(tokens_for(0, twin.rank)).sum().backward()
    twin.model.load_state_dict(twin.model.state_dict())
    twin.plain.load_state_dict(twin.plain.state_dict())
    assert ours == theirs and len(ours) == 4 * 3 + 2 + 1 + 3 * 3
    twin.model.zero_grad()
    twin.train(2)


@on_ranks(1, 2)
def test_backward_hooks_may_change_gradients_of_inputs_in_frozen_units() -> None:
    """A unit without trainable parameters, between two with: its backward hook is still in the chain."""
    def make() -> nn.Module:
        model = SmallModel()
        model.layers[1].requires_grad_(False)
        model.layers[1].register_full_backward_hook(lambda m, i, o: (i[0] * 3,))
        return model

    Twin(make).train(2)
