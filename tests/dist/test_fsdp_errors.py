"""Wrong use: one clear error each, and the next step is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from twin import DIM, SmallModel, Twin, floats_for, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, PeerError, fully_shard


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (torch.arange(8), r"device_mesh has 8 ranks but WORLD_SIZE is 2 \(launched with --nproc_per_node=2\)"),
        (8, r"device_mesh has 8 ranks but WORLD_SIZE is 2"),
        ([0, 0], "device_mesh names rank 0 more than once"),
        ([0, 7], r"device_mesh names rank 7, but ranks are 0..1"),
        ([-1, 0], r"device_mesh names rank -1"),
        (torch.tensor([0.0, 1.0]), r"device_mesh must hold global ranks \(integers\)"),
        ([0, "x"], r"device_mesh must hold global ranks"),
        ("all", "device_mesh must be None, a number of ranks, a list"),
        (True, "device_mesh must be ranks, got True"),
        ([[[0, 1]]], "one or two dimensions"),
    ],
)
@on_ranks(2)
def test_bad_meshes(mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDP(SmallModel(), device_mesh=mesh)


@on_ranks(2)
def test_a_mesh_without_this_rank() -> None:
    other = 1 - dist.get_rank()
    with pytest.raises(ValueError, match=rf"device_mesh \[{other}\] does not contain this rank, {dist.get_rank()}"):
        FSDP(SmallModel(), device_mesh=[other])


@on_ranks(2)
def test_a_device_mesh() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    Twin(SmallModel, device_mesh=mesh).train(2)
    Twin(SmallModel, device_mesh=[[0, 1]]).train(1)


@on_ranks(1)
def test_an_optimizer_built_before() -> None:
    model = SmallModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"SGD was built from this model's parameters before FSDP.*Build it afterwards"
    ):
        FSDP(model)
    del optimizer
    FSDP(model)


@on_ranks(1)
def test_wrapping_twice() -> None:
    model = FSDP(SmallModel())
    with pytest.raises(ValueError, match="is, or contains, an FSDP model already"):
        FSDP(model)
    with pytest.raises(ValueError, match="is, or contains, an FSDP model already"):
        FSDP(nn.Sequential(model))


@on_ranks(1)
def test_bad_options() -> None:
    for options, message in [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive or None"),
        ({"bucket_cap_mb": -1.0}, "bucket_cap_mb must be positive or None"),
        ({"mixed_precision": torch.bfloat16}, "mixed_precision must be a MixedPrecisionPolicy or None, got dtype"),
        ({"communicator": "nccl"}, "communicator must be one of auto, shared_memory, c10d, hccl, got 'nccl'"),
        ({"prefetch": -1}, r"prefetch must be a whole number of units, 0 \(gather at use\) or more, got -1"),
        ({"prefetch": True}, "prefetch must be .* got True"),
        ({"auto_wrap_policy": lambda m: isinstance(m, nn.ModuleList)}, "chose 'layers', a container without a forward"),
    ]:
        with pytest.raises(ValueError, match=message):
            FSDP(SmallModel(), **options)
    with pytest.raises(ValueError, match="FSDP wraps an nn.Module, got list"):
        FSDP([SmallModel()])
    with pytest.raises(ValueError, match="Tanh has no parameters to shard"):
        FSDP(nn.Tanh())
    model = SmallModel()
    fully_shard(model.head)
    with pytest.raises(ValueError, match="auto_wrap_policy together with fully_shard marks"):
        FSDP(model, auto_wrap_policy=lambda m: False)


@on_ranks(2, 3)
def test_different_models_on_ranks() -> None:
    """Said on all ranks, before any memory is shared."""
    last = dist.get_world_size() - 1
    with pytest.raises(
        ValueError, match=rf"rank 0 and rank {last} wrap different models or use different FSDP options"
    ):
        FSDP(SmallModel(layers=2 if dist.get_rank() == last else 3))
    for option, mine, others in (("prefetch", 2, 1), ("reshard_after_forward", False, True)):
        with pytest.raises(ValueError, match=rf"rank 0 and rank {last} wrap .* \(.*{option}"):
            FSDP(SmallModel(), **{option: mine if dist.get_rank() == last else others})
    Twin(SmallModel).train(1)


@on_ranks(2)
def test_different_values_on_ranks_become_rank_0s() -> None:
    """Parameters and buffers."""

    class Model(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.randn(5))

    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(dist.get_rank())
    model = FSDP(Model())
    for param in model._fsdp_state.params:
        whole = dict(plain.named_parameters())[param.name].detach().flatten()
        start = param.piece.start
        assert torch.equal(param.sharded.detach().flatten(), whole[start : start + param.sharded.numel()])
    assert torch.equal(model.noise, plain.noise)


@on_ranks(1, 2)
def test_reading_a_parameter_after_the_forward() -> None:
    """Captured in forward: the unit is sharded now. Through the module: this rank's piece."""
    twin = Twin(SmallModel)
    captured: list[nn.Parameter] = []
    handle = twin.model.layers[1].up.register_forward_hook(lambda m, a, o: captured.append(m.weight))
    with torch.no_grad():
        twin.model(tokens_for(0, 0))
    handle.remove()
    assert captured[0].shape == (60, DIM)
    for read in (lambda w: w + 1, lambda w: w.data_ptr(), lambda w: w.tolist(), lambda w: torch.mm(w, w.T)):
        with pytest.raises(RuntimeError, match=r"unit 'layers.1' is sharded: its parameters can be read only while"):
            read(captured[0])
    piece = next(p for p in twin.state.params if p.name == "layers.1.up.weight")
    assert twin.model.layers[1].up.weight is piece.sharded and piece.sharded.numel() == piece.piece.numel
    twin.train(1)


@on_ranks(2)
def test_what_an_fsdp_model_does_not_do() -> None:
    import copy
    import pickle

    model = FSDP(SmallModel())
    with pytest.raises(RuntimeError, match=r"this Block is a copy of a part of an FSDP model.*copy.deepcopy\(model\)"):
        copy.deepcopy(model.layers[1])(floats_for(0, 0))
    with pytest.raises(RuntimeError, match="cannot be pickled: save model.state_dict"):
        pickle.dumps(model)


# ---- exceptions ------------------------------------------------------------------------------------------------------


class Stumbling(SmallModel):
    """Raises when told: in the root's forward, or inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stumble = ""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if self.stumble == "root" and i == 2:
                raise KeyError("in the root")
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("where", ["root", "unit"])
@on_ranks(1, 3)
def test_an_exception_in_forward(where: str, communicator: str) -> None:
    twin = Twin(Stumbling, communicator=communicator)
    twin.train(2)
    handle = None
    if where == "unit":

        def stumble(module: nn.Module, args: Any) -> None:
            raise KeyError("in a unit")

        handle = twin.model.layers[1].up.register_forward_pre_hook(stumble)
    twin.model.stumble = where
    for _ in range(2):
        with pytest.raises(KeyError, match=f"in (the|a) {where}"):
            twin.model(tokens_for(0, twin.rank))
    twin.model.stumble = ""
    if handle:
        handle.remove()
    assert all(
        p.shape == twin_piece.sharded.shape
        for p, twin_piece in zip(twin.model.parameters(), ordered(twin), strict=True)
    )
    twin.train(2)
    assert twin.counters.overflow_places == 0


def ordered(twin: Twin) -> list[Any]:
    by_name = {p.name: p for p in twin.state.params}
    return [by_name[name] for name, _ in twin.model.named_parameters()]


@on_ranks(1, 2)
def test_an_exception_in_a_unit_called_by_itself() -> None:
    twin = Twin(SmallModel)
    with pytest.raises(RuntimeError, match="shape"):
        twin.model.layers[1](torch.zeros(3, 7))
    twin.train(2)
    assert twin.counters.overflow_places == 0
    assert twin.counters.gathers == 1 + 7 + 6, "the unit was not kept from then on"


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@pytest.mark.parametrize("where", ["layers.2", "layers.0"])
@on_ranks(1, 3)
def test_an_exception_in_backward(where: str, communicator: str) -> None:
    """On all ranks at the same place. The gradients of that step are void; after zero_grad the next step is right."""
    twin = Twin(SmallModel, communicator=communicator)
    twin.train(2)

    def stumble(gradient: torch.Tensor) -> None:
        raise KeyError("in backward")

    handle = twin.model.get_submodule(where).register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
    for _ in range(2):
        loss = next_token_loss(twin.model, tokens_for(0, twin.rank))
        with pytest.raises(KeyError, match="in backward"):
            loss.backward()
    handle.remove()
    twin.train(2)
    assert twin.counters.overflow_places == 0


@on_ranks(2)
def test_evaluation_and_state_dict_after_an_exception_in_backward() -> None:
    twin = Twin(SmallModel)
    handle = twin.model.layers[1].register_forward_hook(lambda m, a, o: o.register_hook(lambda g: 1 / 0) and None)
    loss = next_token_loss(twin.model, tokens_for(0, twin.rank))
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    assert [p.shape for p in twin.model.parameters()] == [p.sharded.shape for p in ordered(twin)], "the pieces again"
    before = twin.model.state_dict()
    assert all(before[p.name].shape == p.sharded.shape for p in twin.state.params)
    with torch.no_grad():
        assert torch.equal(twin.model(tokens_for(1, 0)), twin.plain(tokens_for(1, 0)))
    x = floats_for(0, 0)
    with torch.no_grad():
        assert torch.equal(twin.model.layers[0](x), twin.plain.layers[0](x))


@on_ranks(2)
def test_sparse_gradients_are_refused() -> None:
    class Sparse(SmallModel):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(37, DIM, sparse=True)

    model = FSDP(Sparse())
    with pytest.raises(RuntimeError, match="not supported: sparse gradient of parameter 'embed.weight'.*sparse=False"):
        next_token_loss(model, tokens_for(0, 0)).backward()


# ---- ranks that come apart -------------------------------------------------------------------------------------------


class Ordered(SmallModel):
    def forward(self, tokens: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.embed(tokens)
        for i in order:
            x = self.layers[i](x)
        return self.head(x)


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(2, 3, own_group=True, timeout=20)
def test_ranks_in_different_units(communicator: str) -> None:
    """Rank 0 runs 0, 1, 2, the others 0, 2, 1: everybody stops and both units are named."""
    model = FSDP(Ordered(), communicator=communicator)
    order = [0, 1, 2] if dist.get_rank() == 0 else [0, 2, 1]
    with pytest.raises(PeerError, match="(?s)ranks have come apart.*'layers.[12]'.*'layers.[12]'"):
        model(tokens_for(0, 0), order)
    if communicator == "auto":
        with pytest.raises(PeerError):  # and it stays so
            model(tokens_for(0, 0), [0, 1, 2])
