"""Other ways into the modules than forward: registered methods, whole parameters, casts of the whole model."""

from __future__ import annotations

import inspect
import os
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from twin import DIM, VOCAB, Block, SmallModel, Twin, floats_for, next_token_loss, part_of, squared_loss, tokens_for

from torchtitan_npu.fsdp import (
    FSDP,
    MixedPrecisionPolicy,
    StateDictType,
    full_params,
    register_forward_method,
    walk_full_params,
)

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])

# ---- register_forward_method -----------------------------------------------------------------------------------------


class MethodBlock(Block):
    def features(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"hidden": F.linear(x, self.up.weight, self.up.bias) * scale}

    def later(self, x: torch.Tensor) -> Any:
        yield self.up(x)


class Encoder(nn.Module):
    """Not a unit: its projection belongs to the root, its blocks are units."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(MethodBlock() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.project(x)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers[1](x), self.project.weight)


class MethodModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, x: torch.Tensor, inside: bool = False) -> torch.Tensor:
        if inside:
            return self.head(self.encoder.features(x) + self.encoder.layers[0].features(x)["hidden"][..., :DIM])
        return self.head(self.encoder(x))

    def energy(self, x: torch.Tensor) -> torch.Tensor:
        return (self.encoder(x) @ self.head.weight.T).pow(2).mean()


def register(model: nn.Module) -> None:
    register_forward_method(model, "energy")
    register_forward_method(model.encoder, "features")
    register_forward_method(model.encoder.layers[0], "features")


LOSSES = {
    "a unit's": lambda m, x: m.encoder.layers[0].features(x, scale=2.0)["hidden"].pow(2).mean(),
    "an inner module's": lambda m, x: m.encoder.features(x).pow(2).mean(),
    "the root's": lambda m, x: m.energy(x),
    "inside forward": lambda m, x: m(x, inside=True).pow(2).mean(),
    "two and forward": lambda m, x: m.encoder.features(x).mean() + m.energy(x) + m(x).pow(2).mean(),
    "checkpointed": lambda m, x: checkpoint(lambda y: m.encoder.features(y).pow(2).mean(), x, use_reentrant=False),
}


@pytest.mark.parametrize("whose", LOSSES)
@COMMUNICATORS
@on_ranks(3)
def test_registered_methods(communicator: str, whose: str) -> None:
    """Gradients and weights like a plain model's; afterwards nothing is left gathered."""
    twin = Twin(MethodModel, LOSSES[whose], floats_for, communicator=communicator)
    register(twin.model)
    twin.train(2)
    with torch.no_grad():
        assert torch.equal(LOSSES[whose](twin.model, floats_for(5, twin.rank)), twin.loss(twin.plain, floats_for(5, twin.rank)))
    assert not any(twin.state.engine.is_gathered(unit) for unit in range(len(twin.state.plan.units)))
    twin.loss = lambda m, x: m(x).pow(2).mean()
    twin.train(1)


@on_ranks(2)
def test_registered_methods_cast_like_forward_and_survive_exceptions() -> None:
    model = FSDP(MethodModel(), mixed_precision=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float64))
    register(model)
    register(model)
    x = floats_for(0, 0)
    with pytest.raises(TypeError, match="unexpected keyword"):
        model.encoder.layers[0].features(x, wrong=1)
    with pytest.raises(RuntimeError, match="shape"):
        model.energy(x[:, 1:])
    assert model.encoder.layers[0].features(x)["hidden"].dtype == torch.bfloat16
    assert model.energy(x).dtype == torch.float64
    model(x).sum().backward()


@on_ranks(2)
def test_what_cannot_be_registered() -> None:
    model = MethodModel()
    with pytest.raises(ValueError, match="MethodModel is not part of a wrapped model"):
        register_forward_method(model, "energy")
    FSDP(model)
    with pytest.raises(ValueError, match="MethodModel has no method 'energies'"):
        register_forward_method(model, "energies")
    with pytest.raises(ValueError, match="later is a generator or coroutine: it would run after"):
        register_forward_method(model.encoder.layers[0], "later")


@on_ranks(1, 2, 3)
def test_a_module_called_outside_of_its_unit() -> None:
    """Computing with pieces is refused, on every rank and for one rank, too: by calls of inner modules, by their
    forward, by methods that are not registered.
    """
    twin = Twin(MethodModel, squared_loss, floats_for)
    model, x = twin.model, floats_for(0, 0)
    for act, path in [
        (lambda: model.head(x), "head"),
        (lambda: model.encoder.layers[1].up(x), "encoder.layers.1.up"),
        (lambda: model.encoder.layers[1].norm(x), "encoder.layers.1.norm"),
        (lambda: model.encoder.layers[1].forward(x), "encoder.layers.1.norm"),
        (lambda: model.encoder(x), "encoder.project"),
        (lambda: model.energy(x), "encoder.project"),
        (lambda: model.forward(x), "encoder.project"),
    ]:
        with pytest.raises(RuntimeError, match=rf"'{path}' \(.*\) was called while its unit '.*' is sharded.*register_for"):
            act()
    with full_params(model):
        assert torch.equal(model.head(x), twin.plain.head(x))
    assert inspect.signature(model.encoder.layers[0].up.forward) == inspect.signature(twin.plain.head.forward)
    register_forward_method(model.encoder, "forward")
    with torch.no_grad():
        assert torch.equal(model.encoder(x), twin.plain.encoder(x))
    twin.train(2)
    patched = model.head.forward  # users wrap forward, too, while it is guarded
    model.head.forward = lambda x: 2 * patched(x)
    with torch.no_grad():
        assert torch.equal(model(x), 2 * twin.plain(x))
        with pytest.raises(RuntimeError, match="'head' .* was called while"):
            model.head(x)


# ---- full_params -----------------------------------------------------------------------------------------------------


class Mixed(SmallModel):
    """Tied, frozen, scalar, empty, integer, float64 and bfloat16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.table = nn.Parameter(torch.arange(DIM), requires_grad=False)
        self.fine = nn.Parameter(torch.randn(7, 3, dtype=torch.float64))
        self.coarse = nn.Parameter(torch.randn(5, dtype=torch.bfloat16))
        self.scale.note = "kept"  # type: ignore[assignment]


BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize("cap", [None, 0.0005])
@COMMUNICATORS
@on_ranks(1, 2, 3)
def test_whole_parameters(communicator: str, cap: float | None) -> None:
    """The float32 values, also where the model computes in bfloat16; nothing is left of them afterwards."""
    twin = Twin(Mixed, communicator=communicator, bucket_cap_mb=cap, mixed_precision=BF16)
    plain = dict(twin.plain.named_parameters())
    pieces = dict(twin.model.named_parameters())
    with full_params(twin.model):
        whole = dict(twin.model.named_parameters())
        assert list(whole) == list(plain) and twin.model.head.weight is twin.model.embed.weight
        for name, p in whole.items():
            assert isinstance(p, nn.Parameter) and p.requires_grad == plain[name].requires_grad and p.is_contiguous()
            assert p.dtype == plain[name].dtype and torch.equal(p, plain[name]), name
        assert twin.model.scale.note == "kept"
        assert twin.model.state_dict().keys() == twin.plain.state_dict().keys()
        assert all(torch.equal(v, twin.plain.state_dict()[k]) for k, v in twin.model.state_dict().items())
        with torch.no_grad():
            twin.model.fine.zero_()  # dropped
    assert all(a is b for a, b in zip(twin.model.parameters(), pieces.values(), strict=True))
    twin.check_weights()
    with full_params(twin.model, module=twin.model.layers[2]):
        assert torch.equal(twin.model.layers[2].up.weight, plain["layers.2.up.weight"])
        assert twin.model.layers[1].up.weight is pieces["layers.1.up.weight"]
    with full_params(twin.model, recurse=False):
        assert torch.equal(twin.model.fine, plain["fine"]) and twin.model.embed.weight is pieces["embed.weight"]


@COMMUNICATORS
@on_ranks(1, 2, 3)
def test_writing_to_whole_parameters(communicator: str) -> None:
    twin = Twin(Mixed, communicator=communicator)

    def write(model: nn.Module) -> None:
        with torch.no_grad():
            for i, p in enumerate(model.parameters()):
                p.copy_((torch.arange(p.numel()).view(p.shape) % (7 + i)).to(p.dtype))
            model.layers[0].up.weight = nn.Parameter(model.layers[0].up.weight * 2)
            model.scale.data = torch.tensor(4.0)

    with full_params(twin.model, writeback=True):
        write(twin.model)
    write(twin.plain)
    twin.check_weights()
    with pytest.raises(KeyError), full_params(twin.model, writeback=True):
        twin.model.embed.weight.data.zero_()
        raise KeyError
    twin.check_weights()
    with full_params(twin.model, writeback=True):
        twin.model.load_state_dict(twin.plain.state_dict(), assign=True)
    twin.check_weights()
    with pytest.raises(RuntimeError, match=r"'scale' has shape \(2,\) at the end of full_params"):
        with full_params(twin.model, writeback=True):
            twin.model.scale = nn.Parameter(torch.zeros(2))
    twin.model(tokens_for(0, 0))


@on_ranks(1, 2, 3)
def test_walking_unit_by_unit() -> None:
    """Each unit in turn, whole, in the modules and in the dict; the others are pieces. Also with changes."""
    twin = Twin(SmallModel)
    plain = dict(twin.plain.named_parameters())
    seen: dict[str, torch.Tensor] = {}
    units = []
    for unit, params in walk_full_params(twin.model, writeback=True):
        units.append(unit)
        holding_whole = {n for n, p in twin.model.named_parameters() if p is params.get(n)}
        assert holding_whole == set(params) and len(twin.state.whole) == len(params)
        for name, p in params.items():
            assert torch.equal(p, plain[name])
            with torch.no_grad():
                p.mul_(2)
            seen[name] = p
    assert units == [u.name for u in twin.state.plan.units] and seen.keys() == plain.keys()
    with torch.no_grad():
        torch._foreach_mul_(list(twin.plain.parameters()), 2)
    twin.check_weights()
    for _ in walk_full_params(twin.model):
        break  # on all ranks
    twin.train(1)


@on_ranks(2)
def test_whole_parameters_at_the_wrong_moment() -> None:
    twin = Twin(SmallModel)
    inside: list[Any] = [None]
    handle = twin.model.layers[1].register_forward_pre_hook(lambda m, a: inside[0]())

    def ask() -> None:
        with pytest.raises(RuntimeError, match=r"full_params\(model\) inside (forward|backward): call it before forward"):
            full_params(twin.model).__enter__()

    inside[0] = ask
    output = twin.model(tokens_for(0, 0))
    twin.model.layers[1](floats_for(0, 0))
    handle.remove()
    output.register_hook(lambda g: ask())
    output.sum().backward()
    with full_params(twin.model):
        for call in (lambda: twin.model(tokens_for(0, 0)), lambda: twin.model.layers[0](floats_for(0, 0))):
            with pytest.raises(RuntimeError, match=r"a forward inside full_params\(model\)"):
                call()
        with pytest.raises(RuntimeError, match="walk_full_params\\(model\\) inside full_params or walk_full_params"):
            next(walk_full_params(twin.model))
        assert twin.model.head.weight.shape == (VOCAB, DIM), "still whole"
    with pytest.raises(ValueError, match="Linear is not part of a wrapped model"):
        full_params(twin.model, module=nn.Linear(1, 1)).__enter__()
    twin.model.zero_grad()
    twin.train(1)


@on_ranks(2, own_group=True)
def test_whole_parameters_on_one_rank_only() -> None:
    os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"] = "1.5"
    twin = Twin(SmallModel)
    if twin.rank == 0:
        with pytest.raises(RuntimeError, match=r"(?s)full_params\(model\) is collective.*within 1.5 s.*on all ranks"):
            full_params(twin.model).__enter__()
        assert twin.model.head.weight is next(p for p in twin.state.params if p.name == "head.weight").sharded
    else:
        time.sleep(2.5)


# ---- .to() and friends -----------------------------------------------------------------------------------------------


class WithBuffers(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(3, dtype=torch.float64))


@on_ranks(1, 2)
def test_casts_that_change_nothing_and_casts_that_do() -> None:
    twin = Twin(WithBuffers)
    model = twin.model
    for same in (model.to("cpu"), model.cpu(), model.float(), model.to(torch.float32), model.to(device="cpu"), model.to()):
        assert same is model
    assert model.offset.dtype == torch.float32, "like in torch, .float() casts buffers"
    for act in (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match=r"not supported: .to\(\).*'embed.weight' from torch.float32 on cpu to .*Mixed"):
            act()
    with pytest.raises((RuntimeError, AssertionError), match="(?i)not supported|cuda"):
        model.cuda()
    twin.train(1)


# ---- load_state_dict(assign=True) ------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_assign_copies_into_the_shards() -> None:
    """The optimizer's parameters, their attributes and memory stay; nothing aliases the loaded dict."""
    torch.manual_seed(7)
    loaded = Mixed().state_dict()
    kept = {key: value.clone() for key, value in loaded.items()}
    twin = Twin(Mixed)
    before = {n: (p, p.data_ptr()) for n, p in twin.model.named_parameters()}
    twin.model.load_state_dict(loaded, assign=True)
    twin.plain.load_state_dict(kept)
    assert {n: (p, p.data_ptr()) for n, p in twin.model.named_parameters()}.items() == before.items()
    assert twin.model.scale.note == "kept"
    twin.check_weights()
    twin.model.layers[0].load_state_dict(twin.plain.layers[0].state_dict(), assign=True)
    for value in loaded.values():
        value.zero_()
    twin.train(1)


@on_ranks(2)
def test_a_bfloat16_checkpoint_into_float32_and_back() -> None:
    """Values are cast to the parameter's dtype; the other way they are rounded. No memory is shared."""
    torch.manual_seed(7)
    original = SmallModel().state_dict()
    rounded = {key: value.bfloat16() for key, value in original.items()}
    for assign in (False, True):
        model = FSDP(SmallModel())
        model.load_state_dict(rounded, assign=assign)
        state = model._fsdp_state
        for param in state.params:
            assert param.sharded.dtype == torch.float32
            assert torch.equal(param.sharded, part_of(param, rounded[param.name].float()))
        low = FSDP(SmallModel().bfloat16())
        low.load_state_dict(original, assign=assign)
        for param in low._fsdp_state.params:
            assert param.sharded.dtype == torch.bfloat16
            assert torch.equal(param.sharded, part_of(param, rounded[param.name]))
        with FSDP.state_dict_type(low, StateDictType.FULL_STATE_DICT):
            assert all(v.dtype == torch.bfloat16 and torch.equal(v, rounded[k]) for k, v in low.state_dict().items())
    next_token_loss(model, tokens_for(0, 0)).backward()
