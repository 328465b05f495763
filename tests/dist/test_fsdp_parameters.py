"""Parameters of every kind: tied, frozen, mixed dtypes, scalars, empty, integer, unused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from twin import DIM, VOCAB, Block, SmallModel, Twin, floats_for, next_token_loss, squared_loss, tokens_for

COMMUNICATORS = pytest.mark.parametrize("communicator", ["auto", "c10d"])


class TiedInRoot(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight


class TiedBlocks(SmallModel):
    """The first and last block share a layer: it goes to their common ancestor, the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight


class FirstBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens)


class LastBlock(nn.Module):
    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class TiedAcrossUnits(nn.Module):
    """Embedding and head are units themselves and share their weight."""

    def __init__(self) -> None:
        super().__init__()
        first = FirstBlock()
        self.layers = nn.ModuleList([first, Block(), LastBlock(first.embed)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("make", [TiedInRoot, TiedBlocks, TiedAcrossUnits])
@on_ranks(1, 2, 3)
def test_tied_parameters(make: type[nn.Module]) -> None:
    twin = Twin(make)
    shared = [p for p in twin.state.params if len(p.names) == 2]
    assert len(shared) == 1 and shared[0].unit == 0
    twin.train(3)


class LoraLinear(nn.Module):
    """Frozen weight and two small trained matrices in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM)
        self.base.requires_grad_(False)
        self.a = nn.Linear(DIM, 3, bias=False)
        self.b = nn.Linear(3, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.base(x)) + self.b(self.a(x))


class Lora(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoraLinear() for _ in range(3))
        self.embed.requires_grad_(False)


class FrozenBlock(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)


class FrozenBelow(SmallModel):
    """Nothing below the last block needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(False)
        self.layers[0].requires_grad_(False)
        self.layers[1].requires_grad_(False)


@pytest.mark.parametrize("cap", [None, 0.0005])
@pytest.mark.parametrize("make", [Lora, FrozenBlock, FrozenBelow])
@on_ranks(2, 3)
def test_frozen_parameters(make: type[nn.Module], cap: float | None) -> None:
    twin = Twin(make, bucket_cap_mb=cap)
    twin.train(3)
    assert all((p.sharded.grad is None) == (not p.sharded.requires_grad) for p in twin.state.params)
    assert twin.counters.overflow_places == 0


class MixedDtypes(nn.Module):
    """float32, float64, bfloat16 and float16 in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.in_float32 = nn.Linear(DIM, 7)
        self.in_float64 = nn.Linear(7, 11, dtype=torch.float64)
        self.in_bfloat16 = nn.Linear(11, 13, dtype=torch.bfloat16)
        self.in_float16 = nn.Linear(13, 3, dtype=torch.float16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.in_float64(self.in_float32(x).double())
        return self.in_float16(self.in_bfloat16(x.bfloat16()).half())


class BlocksOfMixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MixedDtypes(), MixedDtypes()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


@COMMUNICATORS
@on_ranks(1, 2, 3)
def test_mixed_dtypes_in_a_unit(communicator: str) -> None:
    """float32 and float64 are exact.

    16-bit gradients are added in float32 and rounded once, to 2^-8 or 2^-11 of each element; the plain model adds in
    16 bits, which may round N times more.
    """
    twin = Twin(BlocksOfMixedDtypes, squared_loss, floats_for, communicator=communicator)
    for step in range(2):
        twin.model.zero_grad()
        twin.backward(step)
        twin.check_gradients(relative=twin.size * 2**-8 if twin.size > 1 else 0)
        for param in twin.state.params:
            assert param.sharded.grad is not None and param.sharded.grad.dtype == param.sharded.dtype
    exact = {n: p.grad for n, p in twin.plain.named_parameters() if p.dtype in (torch.float32, torch.float64)}
    for param in twin.state.params:
        if param.name in exact:
            whole = exact[param.name].flatten()[param.piece.start : param.piece.start + param.sharded.numel()]
            assert torch.equal(param.sharded.grad.flatten(), whole), param.name


class Odd(nn.Module):
    """A scalar, empty parameters and integer ones beside an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0))
        self.no_rows = nn.Parameter(torch.empty(0, 5))
        self.no_columns = nn.Parameter(torch.empty(5, 0))
        self.one = nn.Parameter(torch.ones(1))
        self.shift = nn.Parameter(torch.arange(DIM), requires_grad=False)
        self.flags = nn.Parameter(torch.arange(3, dtype=torch.int32), requires_grad=False)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used = self.none.sum() + self.no_rows.sum() + self.no_columns.sum()
        return self.linear(x) * self.scale + self.shift + self.one + used + self.flags.sum()


class OddModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.layers = nn.ModuleList([Odd(), Odd()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 0.1
        return x * self.gain


@pytest.mark.parametrize("cap", [None, 0.0005])
@on_ranks(1, 2, 3, 4)
def test_scalars_empty_and_integer_parameters(cap: float | None) -> None:
    twin = Twin(OddModel, squared_loss, floats_for, bucket_cap_mb=cap)
    by_name = {p.name: p for p in twin.state.params}
    assert by_name["gain"].sharded.shape in (torch.Size([]), torch.Size([0]))
    assert by_name["layers.0.shift"].sharded.dtype == torch.int64
    twin.train(3)


class OnlyEmpty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 3))
        self.other = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x) + self.weight.sum()


@on_ranks(4)
def test_fewer_rows_than_ranks() -> None:
    """Three parameters of one row and an empty one on four ranks: some ranks hold nothing."""
    twin = Twin(OnlyEmpty, squared_loss, lambda step, rank: floats_for(step, rank, 3, 2))
    twin.train(3)
    assert sum(p.sharded.numel() for p in twin.state.params) <= 3


class SomeUnused(SmallModel):
    """The second block is skipped for batches whose first token is ``skip``; one layer of the root is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(DIM, 3)

    def forward(self, tokens: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.layers[0](self.embed(tokens))
        if not skip:
            x = self.layers[1](x)
        return self.head(self.layers[2](x))


@pytest.mark.parametrize("cap", [None, 0.0005])
@COMMUNICATORS
@on_ranks(1, 3)
def test_unused_parameters_have_no_gradient(communicator: str, cap: float | None) -> None:
    """As in torch: a parameter that no rank used keeps ``grad`` None, so that AdamW leaves it alone."""

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens, skip=True).flatten(0, 1), tokens.flatten())

    twin = Twin(SomeUnused, loss, bucket_cap_mb=cap, communicator=communicator)
    twin.train(3)
    unused = {p.name for p in twin.state.params if p.sharded.grad is None}
    assert unused == {n for n, _ in twin.plain.named_parameters() if n.startswith(("layers.1.", "never."))}


class Mixture(nn.Module):
    """Each token goes to one of two experts of the block: some ranks may use one of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList([torch.randn(DIM, DIM), torch.randn(DIM, DIM), torch.randn(DIM, DIM)])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + x @ self.experts[expert]


class MixtureModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, expert)
        return x


@pytest.mark.parametrize("cap", [None, 0.0005])
@COMMUNICATORS
@on_ranks(2, 3)
def test_parameters_that_some_ranks_use(communicator: str, cap: float | None) -> None:
    """Rank r uses expert r % 2. A rank that did not use one counts as zeros in the average; nobody uses the third."""

    def batch(step: int, rank: int) -> tuple[torch.Tensor, int]:
        return floats_for(step, rank), (rank + step) % 2

    def loss(model: nn.Module, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
        return model(*batch).pow(2).mean()

    twin = Twin(MixtureModel, loss, batch, bucket_cap_mb=cap, communicator=communicator)
    twin.train(3)
    assert {p.name for p in twin.state.params if p.sharded.grad is None} == {f"layers.{i}.experts.2" for i in range(2)}


class Experts(nn.Module):
    """Two paths; which of them run depends on the input."""

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.first = nn.Linear(dim, dim)
        self.second = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor, first: bool, second: bool) -> torch.Tensor:
        x = self.norm(x)
        return x + (self.first(x) if first else 0) + (self.second(x) if second else 0)


class Routed(nn.Module):
    """Many more blocks than places in the arena."""

    def __init__(self, dim: int = 6, blocks: int = 9) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(dim) for _ in range(blocks))

    def forward(self, batch: tuple[torch.Tensor, int]) -> torch.Tensor:
        x, route = batch
        for i, layer in enumerate(self.layers):
            x = layer(x, (route + i) % 3 != 0, (route + i) % 4 == 0)
        return x


@pytest.mark.parametrize("cap", [None, 0.0002])
@COMMUNICATORS
@on_ranks(2, 3)
def test_experts_that_some_ranks_use_in_a_deep_model(communicator: str, cap: float | None) -> None:
    # A unit some of whose parameters get no gradient on this rank must be let go as early as on the others.
    def batch(step: int, rank: int) -> tuple[torch.Tensor, int]:
        return floats_for(step, rank, 4, 6), step + rank

    twin = Twin(Routed, squared_loss, batch, communicator=communicator, bucket_cap_mb=cap)
    twin.train(4, torch.optim.SGD)
    assert twin.counters.overflow_places == 0


class FrozenAround(nn.Module):
    """A unit with a trainable unit in the middle, and frozen weights before and after it."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.before = nn.Linear(dim, dim).requires_grad_(False)
        self.inner = nn.Linear(dim, dim)
        self.after = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.inner(self.before(x)).tanh())


class FrozenAroundUnits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(FrozenAround() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@COMMUNICATORS
@on_ranks(1, 2)
def test_frozen_weights_around_a_trainable_unit(communicator: str) -> None:
    def is_unit(module: nn.Module) -> bool:
        return isinstance(module, FrozenAround) or getattr(module, "is_inner", False)

    def make() -> nn.Module:
        model = FrozenAroundUnits()
        for layer in model.layers:
            layer.inner.is_inner = True
        return model

    Twin(make, squared_loss, floats_for, auto_wrap_policy=is_unit, communicator=communicator).train(3)




class Sometimes(nn.Module):
    """Its last parameter is used by some ranks only: those have all gradients of the unit, the others never will."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))
        self.extra = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        x = torch.tanh(x @ self.weight)
        return x + self.extra if use else x


class SometimesModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Sometimes() for _ in range(5))

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, use)
        return x


@COMMUNICATORS
@on_ranks(2, 3)
def test_units_whose_gradients_are_complete_on_some_ranks_only(communicator: str) -> None:
    """When a unit is freed in backward does not depend on which gradients have come: ranks stay in step, and a unit
    that lacks one does not stay gathered.
    """

    def batch(step: int, rank: int) -> tuple[torch.Tensor, bool]:
        return floats_for(step, rank), (rank + step) % 2 == 0

    def loss(model: nn.Module, batch: tuple[torch.Tensor, bool]) -> torch.Tensor:
        return model(*batch).pow(2).mean()

    twin = Twin(SometimesModel, loss, batch, communicator=communicator)
    twin.train(3)
    assert twin.counters.overflow_places == 0


@on_ranks(2)
def test_attributes_of_parameters_survive() -> None:
    class Tagged(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.no_decay = True  # type: ignore[assignment]

    twin = Twin(Tagged)
    tagged = [name for name, p in twin.model.named_parameters() if getattr(p, "no_decay", False)]
    assert tagged == ["head.weight"]


@on_ranks(2)
def test_names_and_order_are_the_models_own() -> None:
    twin = Twin(SmallModel)
    assert [n for n, _ in twin.model.named_parameters()] == [n for n, _ in twin.plain.named_parameters()]
    assert isinstance(twin.model, SmallModel) and repr(twin.model.layers) == repr(twin.plain.layers)
    assert next_token_loss(twin.model, tokens_for(0, 0)).requires_grad


class OneNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain


@COMMUNICATORS
@on_ranks(1, 2, 4)
def test_a_model_of_one_number(communicator: str) -> None:
    """Also where its shard is whole on one rank, and where the model is only replicated."""
    Twin(OneNumber, squared_loss, floats_for, communicator=communicator).train(3)
    if dist.get_world_size() == 2:
        Twin(OneNumber, squared_loss, floats_for, communicator=communicator, device_mesh=[[0], [1]]).train(3)
