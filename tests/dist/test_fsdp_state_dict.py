"""State dicts: sharded, full and local; what does not fit is named."""

from __future__ import annotations

import copy
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from twin import DIM, VOCAB, SmallModel, Twin, part_of

from torchtitan_npu.fsdp import FSDP, Piece, StateDictType, load_optimizer_state_dict, optimizer_state_dict, save_full


class Model(SmallModel):
    """With tied weights, a buffer, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.gain


def full_state_dict(model: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return model.state_dict()


@pytest.mark.parametrize("cap", [None, 0.0005])
@on_ranks(1, 2, 3, 4)
def test_full_equals_the_plain_model(cap: float | None) -> None:
    twin = Twin(Model, bucket_cap_mb=cap)
    twin.train(1)
    full, plain = full_state_dict(twin.model), twin.plain.state_dict()
    if twin.rank > 0:
        assert full == {}
        return
    assert list(full) == list(plain)
    for key, value in plain.items():
        assert type(full[key]) is torch.Tensor
        assert torch.equal(full[key], value) and full[key].dtype == value.dtype, key
    twin.model.steps += 1
    assert torch.equal(full["steps"], torch.arange(3)), "a copy, not the model's own memory"


@on_ranks(1, 2, 3, 4)
def test_the_default_is_sharded_and_needs_no_other_rank() -> None:
    twin = Twin(Model)
    if twin.rank > 0 and twin.size > 1:
        return  # nobody waits for these
    state, plain = twin.model.state_dict(), twin.plain.state_dict()
    assert list(state) == list(plain)
    for param in twin.state.params:
        for name in param.names:
            piece = state[name]
            assert isinstance(piece, Piece) and piece.whole_shape == plain[name].shape
            assert torch.equal(piece.plain(), part_of(param, plain[name]))
    assert type(state["steps"]) is torch.Tensor


@on_ranks(2, 3)
def test_local_holds_plain_tensors_and_loads_again() -> None:
    twin = Twin(Model)
    with FSDP.state_dict_type(twin.model, StateDictType.LOCAL_STATE_DICT):
        state = {key: value.clone() for key, value in twin.model.state_dict().items()}
    assert not any(isinstance(value, Piece) for value in state.values())
    twin.train(1)
    with FSDP.state_dict_type(twin.model, StateDictType.LOCAL_STATE_DICT):
        twin.model.load_state_dict(state)
    torch.manual_seed(0)
    twin.plain = Model()
    twin.check_weights()


@pytest.mark.parametrize("inside", [True, False])
@on_ranks(1, 2, 3)
def test_a_plain_state_dict_loads(inside: bool) -> None:
    """Whole tensors, in the context of any kind or outside; each rank takes its part. The next step uses them."""
    twin = Twin(Model)
    torch.manual_seed(99)
    other = Model()
    for kind in StateDictType if inside else [None]:
        if kind is None:
            result = twin.model.load_state_dict(other.state_dict())
        else:
            with FSDP.state_dict_type(twin.model, kind):
                result = twin.model.load_state_dict(other.state_dict())
        assert not result.missing_keys and not result.unexpected_keys
    twin.plain.load_state_dict(other.state_dict())
    twin.check_weights()
    twin.train(2)


@on_ranks(2)
def test_missing_unexpected_and_misshapen_entries() -> None:
    twin = Twin(Model)
    state = Model().state_dict()
    gain = state.pop("gain")
    with pytest.raises(RuntimeError, match="Missing key.*gain"):
        twin.model.load_state_dict(state)
    state["gain"] = gain
    state["layers.0.up.weight"] = torch.zeros(7, 3)
    with pytest.raises(
        ValueError, match=r"'layers.0.up.weight' has shape \(7, 3\), but the model's parameter has \(60, 20\)"
    ):
        twin.model.load_state_dict(state)


@on_ranks(2)
def test_rank_0s_shard_where_it_does_not_fit(tmp_path: Path) -> None:
    """What R10's ``if rank == 0: torch.save`` writes: rank 0 gets its own back, others hear what it is."""
    twin = Twin(Model)
    file = tmp_path / "rank0.pt"
    if twin.rank == 0:
        torch.save(twin.model.state_dict(), file)
    dist.barrier()
    saved = torch.load(file, weights_only=True)
    if twin.rank == 0:
        twin.model.load_state_dict(saved)
        alone = FSDP(Model(), device_mesh=[0])
        with pytest.raises(ValueError, match=r"is shard 0 of 2 of a tensor of shape .*save_full\(model, path\)"):
            alone.load_state_dict(saved)
    else:
        with pytest.raises(
            ValueError, match=r"is shard 0 of 2 of a tensor of shape .* this is rank 1 of 2 .*save_full\(model, path\)"
        ):
            twin.model.load_state_dict(saved)


@on_ranks(2, own_group=True)
def test_full_on_one_rank_only_names_the_missing_ones() -> None:
    os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"] = "1.5"
    try:
        twin = Twin(Model)
        if twin.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?s)FULL state dict is collective.*within 1.5 s.*1.*on all ranks"):
                full_state_dict(twin.model)
        else:
            time.sleep(2.5)
    finally:
        del os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"]


@on_ranks(1, 2, 3)
def test_save_full_and_load(tmp_path: Path) -> None:
    twin = Twin(Model)
    twin.train(1)
    file = tmp_path / "model.pt"
    save_full(twin.model, file)
    assert os.listdir(tmp_path) == ["model.pt"]
    saved = torch.load(file, weights_only=True)
    assert all(torch.equal(saved[key], value) for key, value in twin.plain.state_dict().items())
    fresh = Model()
    fresh.load_state_dict(saved)
    torch.manual_seed(5)
    again = Twin(Model)
    again.model.load_state_dict(saved)
    again.plain = fresh
    again.check_weights()


@on_ranks(2)
def test_save_full_fails_on_all_ranks_and_keeps_the_old_file(tmp_path: Path) -> None:
    twin = Twin(Model)
    with pytest.raises(RuntimeError, match="cannot write the model to .*no_such_directory"):
        save_full(twin.model, tmp_path / "no_such_directory" / "model.pt")
    twin.train(1)


@on_ranks(1, 2, 3)
def test_optimizer_state_round_trip() -> None:
    """Two steps, save; one more step; load; the same step again gives the same bits."""
    twin = Twin(Model)
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)

    def step(number: int) -> None:
        optimizer.zero_grad()
        twin.loss(twin.model, twin.batches(number, twin.rank)).backward()
        optimizer.step()

    step(0)
    step(1)
    weights = {p.name: p.sharded.detach().clone() for p in twin.state.params}
    saved = optimizer_state_dict(twin.model, optimizer)
    assert set(saved["state"]) == {p.name for p in twin.state.params}
    assert isinstance(saved["state"]["embed.weight"]["exp_avg"], Piece)
    saved = copy.deepcopy(saved)
    step(2)
    expected = {p.name: p.sharded.detach().clone() for p in twin.state.params}
    with torch.no_grad():
        for p in twin.state.params:
            p.sharded.copy_(weights[p.name])
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=3.0)
    load_optimizer_state_dict(twin.model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    step(2)
    for p in twin.state.params:
        assert torch.equal(p.sharded.detach(), expected[p.name]), p.name


@on_ranks(1)
def test_optimizer_state_of_another_model_is_refused() -> None:
    twin = Twin(Model)
    foreign = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match="not one of this FSDP model's: build it from model.parameters"):
        optimizer_state_dict(twin.model, foreign)
    mine = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    saved = optimizer_state_dict(twin.model, mine)
    saved["state"]["no.such"] = {}
    with pytest.raises(ValueError, match="'no.such', which is no parameter"):
        load_optimizer_state_dict(twin.model, mine, saved)
    saved["param_groups"].append({"params": []})
    with pytest.raises(ValueError, match="has 1 parameter groups, the saved state 2"):
        load_optimizer_state_dict(twin.model, mine, saved)


@on_ranks(2)
def test_bad_kind_and_unwrapped_model() -> None:
    twin = Twin(Model)
    with pytest.raises(ValueError, match="needs a StateDictType, got 'full'"), FSDP.state_dict_type(twin.model, "full"):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(ValueError, match="is not wrapped"),
        FSDP.state_dict_type(twin.plain, StateDictType.FULL_STATE_DICT),
    ):
        pass
    with pytest.raises(KeyError), FSDP.state_dict_type(twin.model, StateDictType.FULL_STATE_DICT):
        raise KeyError
    assert isinstance(twin.model.state_dict()["gain"], Piece), "the kind ends with the context, also by an exception"
