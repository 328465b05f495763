"""Parameters that are DTensors: a tensor-parallel model, sharded over the data-parallel dimension of a mesh.

Compared with one plain process. Tensor parallelism changes the order of sums, so values agree within 1e-5 of the
largest of a tensor, not bit for bit.
"""

from __future__ import annotations

import gc
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from pool import on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from torchtitan_npu.fsdp import (
    FSDP,
    MixedPrecisionPolicy,
    StateDictType,
    load_optimizer_state_dict,
    materialize,
    optimizer_state_dict,
    save_full,
)

DIM, HEADS, FFN, VOCAB, LENGTH = 16, 4, 28, 24, 8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # Under tensor parallelism each rank has some of the heads.
        q, k, v = (w(x).view(batch, length, -1, DIM // HEADS).transpose(1, 2) for w in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, FFN, bias=False), nn.Linear(DIM, FFN)
        self.down = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(DIM), nn.LayerNorm(DIM)
        self.attention, self.feedforward = Attention(), Feedforward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feedforward(self.norm_2(x))


class Model(nn.Module):
    """Embedding and head stay plain: every tensor-parallel rank has them whole."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x)


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """``sequence``: activations between the layers are cut along the sequence, and norms are DTensors."""
    between = Shard(1) if sequence else Replicate()
    for layer in model.layers:  # type: ignore[union-attr]
        gather = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate(), use_local_output=True)
        plan: dict[str, Any] = {
            "attention": gather,
            "feedforward": gather,
            **{f"attention.qkv.{i}": ColwiseParallel() for i in range(3)},
            "attention.out": RowwiseParallel(output_layouts=between),
            "feedforward.gate": ColwiseParallel(),
            "feedforward.up": ColwiseParallel(),
            "feedforward.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
        parallelize_module(layer, mesh, plan)
    if sequence:
        parallelize_module(
            model,
            mesh,
            {
                "layers.0": PrepareModuleInput(
                    input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
                ),
                "head": PrepareModuleInput(
                    input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
                ),
            },
        )


def tokens_for(step: int, group: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(100 * step + group))


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Pair:
    """A model on dp x tp ranks, and a plain one; both begin with the same values."""

    def __init__(self, tp: int = 2, sequence: bool = False, recompute: bool = False, **options: Any) -> None:
        size = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
        self.groups = size // tp
        self.group = self.mesh.get_local_rank("dp")
        torch.manual_seed(0)
        self.plain = Model()
        torch.manual_seed(0)
        model = Model(recompute)
        parallelize(model, self.mesh["tp"], sequence)
        self.model: Any = FSDP(model, device_mesh=self.mesh["dp"], **options)
        self.params = self.model._fsdp_state.params

    def backward(self, step: int) -> None:
        loss = loss_of(self.model, tokens_for(step, self.group))
        loss.backward()
        for group in range(self.groups):
            plain = loss_of(self.plain, tokens_for(step, group))
            (plain / self.groups).backward()
            if group == self.group:
                torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)

    def part(self, param: Any, whole: torch.Tensor) -> torch.Tensor:
        local = whole.detach() if param.layout is None else param.layout.local_part(whole.detach())
        return local.reshape(-1)[param.piece.start : param.piece.start + param.sharded.numel()].view_as(param.sharded)

    def check(self, relative: float = 1e-5) -> None:
        plain = dict(self.plain.named_parameters())
        for param in self.params:
            for got, whole in ((param.sharded.detach(), plain[param.name]), (param.sharded.grad, plain[param.name].grad)):
                assert not isinstance(got, DTensor)
                want = self.part(param, whole)
                bound = relative * whole.abs().max().item()
                difference = (got - want).abs().max().item() if got.numel() else 0.0
                assert difference <= bound, f"'{param.name}' is off by {difference}, allowed {bound}"

    def train(self, steps: int) -> torch.optim.Optimizer:
        # SGD: Adam turns the last bits of a gradient near zero into whole steps.
        ours = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        theirs = torch.optim.SGD(self.plain.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            ours.zero_grad()
            theirs.zero_grad()
            self.backward(step)
            self.check()
            ours.step()
            theirs.step()
        self.check()
        return ours


@pytest.mark.parametrize("sequence", [False, True], ids=["plain_norms", "sequence_parallel"])
@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(4)
def test_training_steps(communicator: str, sequence: bool) -> None:
    pair = Pair(sequence=sequence, communicator=communicator)
    pair.train(3)
    layouts = {p.name: p.layout for p in pair.params}
    assert (layouts["layers.0.norm_1.weight"] is not None) == sequence and layouts["embed.weight"] is None
    held = pair.model.layers[0].attention.out.weight
    assert not isinstance(held, DTensor) and isinstance(held, nn.Parameter), "outside of forward: my piece"


@pytest.mark.parametrize("options", [{"bucket_cap_mb": 0.0005}, {"reshard_after_forward": False}, {"recompute": True}])
@on_ranks(4)
def test_training_steps_with(options: dict[str, Any]) -> None:
    Pair(sequence=True, **options).train(2)


@on_ranks(2)
def test_one_data_parallel_rank() -> None:
    Pair(sequence=True).train(2)


@on_ranks(3)
def test_uneven_shards() -> None:
    """28 columns over 3 ranks: 10, 10, 8. Heads cannot be cut unevenly, so only the feed-forward is parallel."""
    mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Feedforward()
    torch.manual_seed(0)
    model = Feedforward()
    columns = ColwiseParallel(use_local_output=False)  # a local tensor would not tell that shards are uneven
    parallelize_module(model, mesh["tp"], {"gate": columns, "up": columns, "down": RowwiseParallel()})
    wrapped: Any = FSDP(model, device_mesh=mesh["dp"])
    x = torch.randn(5, DIM, generator=torch.Generator().manual_seed(1))
    wrapped(x).square().sum().backward()
    plain(x).square().sum().backward()
    for param in wrapped._fsdp_state.params:
        whole = dict(plain.named_parameters())[param.name].grad
        want = param.layout.local_part(whole).reshape(-1)
        torch.testing.assert_close(param.sharded.grad.flatten(), want.flatten(), rtol=1e-4, atol=1e-5)
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT):
        full = wrapped.state_dict()
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in full.items())


@on_ranks(4)
def test_hybrid_sharding_of_a_tensor_parallel_model() -> None:
    """2 replicas x 1 shard x 2 tensor-parallel ranks, the first two as a 2-D mesh."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp"))
    pair = Pair.__new__(Pair)
    pair.mesh, pair.groups, pair.group = mesh, 2, mesh.get_local_rank("replicate")
    torch.manual_seed(0)
    pair.plain = Model()
    torch.manual_seed(0)
    model = Model()
    parallelize(model, mesh["tp"], True)
    pair.model = FSDP(model, device_mesh=mesh["replicate", "shard"])
    pair.params = pair.model._fsdp_state.params
    pair.train(2)


@on_ranks(4)
def test_mixed_precision() -> None:
    """Modules see DTensors in param_dtype; gradients and pieces stay fp32."""
    seen = []
    pair = Pair(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    pair.model.layers[0].feedforward.down.register_forward_pre_hook(lambda m, a: seen.append(m.weight))
    loss_of(pair.model, tokens_for(0, pair.group)).backward()
    assert isinstance(seen[0], DTensor) and seen[0].dtype == torch.bfloat16
    assert seen[0].shape == (DIM, FFN) and seen[0].placements == (Shard(1),)
    assert {p.grad.dtype for p in pair.model.parameters()} == {torch.float32}


@on_ranks(4)
def test_gathered_parameters_are_not_copied() -> None:
    """The DTensor's memory is the gather memory: the same address in every step."""
    addresses = []
    pair = Pair(reshard_after_forward=False)
    down = pair.model.layers[0].feedforward.down
    gathered = next(p.gathered for p in pair.params if p.name == "layers.0.feedforward.down.weight")
    down.register_forward_pre_hook(
        lambda m, a: addresses.append((m.weight.to_local().data_ptr(), gathered.data_ptr()))
    )
    for step in range(3):
        loss_of(pair.model, tokens_for(step, pair.group)).backward()
    assert len({address for both in addresses for address in both}) == 1


@on_ranks(4)
def test_a_dropped_model_is_freed() -> None:
    """DTensors that stood in modules keep no graph alive."""
    pair = Pair(sequence=True, recompute=True)
    pair.backward(0)
    alive = [weakref.ref(pair.model), weakref.ref(pair.model._fsdp_state.engine)]
    dist.barrier()
    del pair
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@on_ranks(4)
def test_an_exception_in_backward_leaves_a_working_model() -> None:
    pair = Pair(sequence=True)

    def stumble(gradient: torch.Tensor) -> None:
        raise KeyError("on every rank")

    handle = pair.model.layers[0].register_forward_hook(lambda m, a, o: o.register_hook(stumble) and None)
    with pytest.raises(KeyError, match="on every rank"):
        loss_of(pair.model, tokens_for(0, pair.group)).backward()
    handle.remove()
    pair.train(1)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("sequence", [False, True], ids=["plain_norms", "sequence_parallel"])
@on_ranks(4)
def test_clipping_counts_every_element_once(sequence: bool, norm_type: float) -> None:
    pair = Pair(sequence=sequence)
    pair.backward(0)
    ours = pair.model.clip_grad_norm_(0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.01, norm_type)
    assert theirs > 0.01, "the test would not clip otherwise"
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    pair.check(relative=5e-5)


@on_ranks(4)
def test_full_state_dict(tmp_path: Path) -> None:
    """Whole tensors over both dimensions, on rank 0 alone; and back."""
    pair = Pair(sequence=True)
    with FSDP.state_dict_type(pair.model, StateDictType.FULL_STATE_DICT):
        full = pair.model.state_dict()
    plain = pair.plain.state_dict()
    assert list(full) == (list(plain) if dist.get_rank() == 0 else [])
    for name, value in full.items():
        assert type(value) is torch.Tensor and torch.equal(value, plain[name]), name
    save_full(pair.model, tmp_path / "whole.pt")
    other = Pair(sequence=True)
    with torch.no_grad():
        for p in other.model.parameters():
            p.zero_()
    other.model.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(other.model.parameters(), pair.model.parameters(), strict=True))


@on_ranks(4)
def test_pieces_of_another_tensor_parallel_rank_are_refused() -> None:
    pair = Pair()
    everyone: list[Any] = [None] * 4
    with FSDP.state_dict_type(pair.model, StateDictType.LOCAL_STATE_DICT):
        dist.all_gather_object(everyone, pair.model.state_dict())
        pair.model.load_state_dict(everyone[dist.get_rank()])
        with pytest.raises(ValueError, match="is shard . of 2 of a tensor of shape"):
            pair.model.load_state_dict(everyone[dist.get_rank() ^ 1])


@on_ranks(4)
def test_meta_models_have_the_values_of_one_process() -> None:
    torch.manual_seed(dist.get_rank())  # the seed is agreed on, over both dimensions
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model, plain = Feedforward(), Feedforward()
    parallelize_module(
        model, mesh["tp"], {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    wrapped: Any = FSDP(model, device_mesh=mesh["dp"])
    materialize(plain, 0)
    whole = dict(plain.named_parameters())
    for param in wrapped._fsdp_state.params:
        local = param.layout.local_part(whole[param.name].detach()).reshape(-1)
        want = local[param.piece.start : param.piece.start + param.sharded.numel()]
        assert torch.equal(param.sharded.detach().flatten(), want), param.name


def save(path: str, tp: int) -> dict[str, Any]:
    pair = Pair(tp, sequence=True)
    optimizer = pair.train(1)
    dcp.save(
        {"model": pair.model.state_dict(), "optimizer": optimizer_state_dict(pair.model, optimizer)}, checkpoint_id=path
    )
    with FSDP.state_dict_type(pair.model, StateDictType.FULL_STATE_DICT):
        return {name: value.numpy() for name, value in pair.model.state_dict().items()}


def load(path: str, tp: int, values: dict[str, Any]) -> None:
    pair = Pair(tp, sequence=True)
    optimizer = torch.optim.SGD(pair.model.parameters(), lr=1.0, momentum=0.9)
    for p in pair.model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    state = {"model": pair.model.state_dict(), "optimizer": optimizer_state_dict(pair.model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    pair.model.load_state_dict(state["model"])
    load_optimizer_state_dict(pair.model, optimizer, state["optimizer"])
    for param in pair.params:
        assert torch.equal(param.sharded, pair.part(param, torch.from_numpy(values[param.name]))), param.name
        momentum = optimizer.state[param.sharded]["momentum_buffer"]
        assert momentum.shape == param.sharded.shape and (momentum.numel() == 0 or momentum.abs().max() > 0)
    loss_of(pair.model, tokens_for(1, pair.group)).backward()


def load_plain(path: str, values: dict[str, Any]) -> None:
    state = {"model": Model().state_dict()}
    dcp.load(state, checkpoint_id=path)
    assert all((value.numpy() == values[name]).all() for name, value in state["model"].items())


def test_checkpoints_load_at_any_degree(rank_pool: Any, tmp_path: Path) -> None:
    """Saved at dp x tp = 2 x 2; loaded at 2 x 2, 1 x 4, 4 x 1, 1 x 2, and by a plain model. Saved at 4 x 1, loaded at
    2 x 2."""
    path = str(tmp_path / "two_by_two")
    values = rank_pool.run(4, save, path=path, tp=2)[0]
    for size, tp in ((4, 2), (4, 4), (4, 1), (2, 2)):
        rank_pool.run(size, load, path=path, tp=tp, values=values)
    rank_pool.run(1, load_plain, path=path, values=values)
    path = str(tmp_path / "four_by_one")
    values = rank_pool.run(4, save, path=path, tp=1)[0]
    rank_pool.run(4, load, path=path, tp=2, values=values)


@on_ranks(4)
def test_what_is_not_supported() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    alone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("everyone", "alone"))["alone"]
    model.bias = nn.Parameter(distribute_tensor(torch.ones(4), alone, [Shard(0)]))
    with pytest.raises(ValueError, match="'weight' and 'bias' are DTensors over different meshes"):
        FSDP(model, device_mesh=mesh["dp"])
    model.bias = nn.Parameter(distribute_tensor(torch.ones(4), mesh["dp"], [Shard(0)]))
    with pytest.raises(ValueError, match=r"parameter 'bias' is a DTensor over ranks \[., .\], several of which share the model by FSDP"):
        del model.weight
        FSDP(model, device_mesh=mesh["dp"])
    with pytest.raises(ValueError, match="parameter 'bias' is a DTensor with placement"):
        partial = DTensor.from_local(torch.ones(4), mesh["tp"], [torch.distributed.tensor.Partial()])
        model.bias = nn.Parameter(partial)
        FSDP(model, device_mesh=mesh["dp"])
