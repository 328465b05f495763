"""Copies of a wrapped model and averages of its parameters, compared with plain torch's."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import on_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from twin import DIM, SmallModel, Twin, floats_for, next_token_loss, part_of, tokens_for

from torchtitan_npu.fsdp import (
    FSDP,
    MixedPrecisionPolicy,
    MovingAverage,
    StateDictType,
    full_params,
    register_forward_method,
)
from torchtitan_npu.fsdp.state import state_of


class Model(SmallModel):
    """With a tied weight, an integer parameter, a buffer, an attribute and a method."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].up.weight = self.layers[0].up.weight
        self.table = nn.Parameter(torch.arange(DIM), requires_grad=False)
        self.register_buffer("offset", torch.linspace(0, 1, DIM))
        self.options = {"seen": []}
        self.head.weight.note = "kept"  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.offset + self.table / DIM
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def energy(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens).pow(2).mean()


def twin_of_copy(twin: Twin, model: Any) -> Twin:
    """``model``, a copy of ``twin.model``, beside a copy of the plain model."""
    other = copy.copy(twin)
    other.model, other.state, other.plain = model, state_of(model), copy.deepcopy(twin.plain)
    return other


@pytest.mark.parametrize(("communicator", "cap"), [("auto", None), ("c10d", 0.0005)])
@on_ranks(1, 2, 3)
def test_a_copy_trains_by_itself(communicator: str, cap: float | None) -> None:
    """Same values at first, then each goes its way; the copy outlives the original."""
    twin = Twin(Model, communicator=communicator, bucket_cap_mb=cap)
    twin.train(2)
    for model in (twin.model, twin.plain):
        model.zero_grad()
        model.layers[1].requires_grad_(False)
    other = twin_of_copy(twin, copy.deepcopy(twin.model))
    assert isinstance(other.model, Model) and isinstance(other.model, FSDP) and other.model is not twin.model
    assert [n for n, _ in other.model.named_parameters()] == [n for n, _ in twin.model.named_parameters()]
    assert other.model.layers[2].up.weight is other.model.layers[0].up.weight
    assert other.model.head.weight.note == "kept" and other.model.options is not twin.model.options
    assert all(p.grad is None for p in other.model.parameters()), "as in torch"
    mine = {p.untyped_storage().data_ptr() for p in (*twin.model.parameters(), *twin.model.buffers())}
    assert mine.isdisjoint(p.untyped_storage().data_ptr() for p in (*other.model.parameters(), *other.model.buffers()))
    other.check_weights()
    other.train(2)
    twin.check_weights()
    twin.train(1)
    # In turns, one's forward inside the other's step.
    losses = [next_token_loss(t.model, tokens_for(0, twin.rank)) for t in (twin, other)]
    for t, loss in zip((twin, other), losses, strict=True):
        t.model.zero_grad()
        loss.backward()
        t.plain_backward([0])
        t.check_gradients()
    dist.barrier()
    state, twin.model, twin.state = state_of(twin.model), None, None  # type: ignore[assignment]
    del state, losses, loss, t
    gc.collect()
    other.train(1)


@on_ranks(2)
def test_hooks_and_methods_of_a_copy_are_its_own() -> None:
    twin = Twin(Model)
    calls: list[nn.Module] = []
    twin.model.layers[0].register_forward_hook(lambda m, a, o: calls.append(m))
    register_forward_method(twin.model, "energy")
    other = twin_of_copy(twin, copy.deepcopy(twin.model))
    gathers = twin.counters.gathers
    other.model(tokens_for(0, 0))
    assert torch.equal(other.model.energy(tokens_for(0, 0)), twin.plain.energy(tokens_for(0, 0)))
    assert calls == [other.model.layers[0]] and twin.counters.gathers == gathers
    with FSDP.state_dict_type(other.model, StateDictType.LOCAL_STATE_DICT):
        assert type(other.model.state_dict()["head.weight"]) is torch.Tensor
        assert type(twin.model.state_dict()["head.weight"]) is not torch.Tensor
    with torch.no_grad():
        other.model.head.weight.zero_()
    other.model.load_state_dict(twin.model.state_dict())
    other.check_weights()
    again = twin_of_copy(other, copy.deepcopy(other.model))  # a copy of the copy, inside a container
    again.model = copy.deepcopy([again.model])[0]
    again.state = state_of(again.model)
    again.train(1)
    twin.check_weights()
    other.check_weights()


@on_ranks(2)
def test_copying_at_the_wrong_moment() -> None:
    twin = Twin(SmallModel)
    handle = twin.model.layers[0].register_forward_pre_hook(lambda m, a: copy.deepcopy(twin.model) and None)
    with pytest.raises(RuntimeError, match=r"copy.deepcopy\(model\) inside forward: call it before"):
        twin.model(tokens_for(0, 0))
    handle.remove()
    with full_params(twin.model), pytest.raises(RuntimeError, match=r"copy.deepcopy\(model\) inside full_params"):
        copy.deepcopy(twin.model)
    twin.train(1)


# ---- averages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [None, 0.9])
@on_ranks(1, 2, 3)
def test_averaged_model(decay: float | None) -> None:
    """torch's own, over the pieces: the plain average of all updates, and the moving one."""
    twin = Twin(Model)
    function = None if decay is None else get_ema_multi_avg_fn(decay)
    ours, theirs = (AveragedModel(m, multi_avg_fn=function) for m in (twin.model, twin.plain))
    for _ in range(3):
        twin.train(1)
        ours.update_parameters(twin.model)
        theirs.update_parameters(twin.plain)
    averaged = copy.copy(twin)
    averaged.model, averaged.state, averaged.plain = ours.module, state_of(ours.module), theirs.module
    averaged.check_weights()
    with torch.no_grad():
        assert torch.equal(ours(tokens_for(0, twin.rank)), theirs(tokens_for(0, twin.rank)))
    assert set(ours.state_dict()) == set(theirs.state_dict())
    twin.check_weights()


@on_ranks(1, 2, 3)
def test_moving_average(tmp_path: Path) -> None:
    """Equal to torch's over the plain model; swapped in for evaluation and out again; through a checkpoint."""
    twin = Twin(Model)
    average = MovingAverage(twin.model, decay=0.9)
    theirs = AveragedModel(twin.plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs.update_parameters(twin.plain)  # the first one copies
    for _ in range(3):
        twin.train(1)
        average.update()
        theirs.update_parameters(twin.plain)
    theirs.module.table.copy_(twin.plain.table)  # torch averages integers and truncates; ours are the model's
    with average.averaged():
        averaged = copy.copy(twin)
        averaged.plain = theirs.module
        averaged.check_weights()
        with torch.no_grad():
            assert torch.equal(twin.model(tokens_for(0, twin.rank)), theirs(tokens_for(0, twin.rank)))
        for act in (average.update, lambda: average.averaged().__enter__()):
            with pytest.raises(RuntimeError, match=r"inside averaged\(\)"):
                act()
    twin.check_weights()
    twin.train(1)

    path = [str(tmp_path)]
    dist.broadcast_object_list(path)
    dcp.save({"average": average.state_dict()}, checkpoint_id=path[0])
    other = MovingAverage(FSDP(Model()), decay=0.9)
    loaded = {"average": other.state_dict()}
    dcp.load(loaded, checkpoint_id=path[0])
    fresh = MovingAverage(FSDP(Model()), decay=0.9)
    fresh.load_state_dict(loaded["average"])
    whole = MovingAverage(FSDP(Model()), decay=0.9)
    whole.load_state_dict({n: p for n, p in theirs.module.named_parameters() if p.is_floating_point()})
    for name, piece in average.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].plain(), piece.plain()), name
        assert torch.equal(whole.state_dict()[name].plain(), piece.plain()), name
    with pytest.raises(ValueError, match="averages of other parameters: embed.weight"):
        fresh.load_state_dict({n: p for n, p in loaded["average"].items() if n != "embed.weight"})


@on_ranks(2)
def test_moving_average_of_16_bit_parameters_is_float32() -> None:
    """1000 steps towards 1.25 by a thousandth each: bfloat16 would stay at 1, as 2^-9 is more than a step."""
    twin = Twin(lambda: nn.Linear(4, 5).bfloat16(), mixed_precision=MixedPrecisionPolicy(torch.bfloat16))
    with torch.no_grad():
        for p in twin.model.parameters():
            p.fill_(1.0)
    average = MovingAverage(twin.model, decay=0.999)
    with torch.no_grad():
        for p in twin.model.parameters():
            p.fill_(1.25)
    for _ in range(1000):
        average.update()
    want = 1.25 - 0.25 * 0.999**1000
    for piece in average.state_dict().values():
        assert piece.dtype == torch.float32 and ((piece.plain() - want).abs() < 1e-4).all()
    with average.averaged():
        assert all((p == torch.tensor(want).bfloat16()).all() for p in twin.model.parameters())
    assert all((p == 1.25).all() for p in twin.model.parameters())
    with pytest.raises(ValueError, match="decay must be between 0 and 1, got 1.5"):
        MovingAverage(twin.model, decay=1.5)
