"""State dicts: dtypes, memory, strictness, optimizer state of every kind."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import DEVICE, on_ranks
from safetensors.torch import load_file
from test_fsdp_checkpoint import Model
from test_fsdp_state_dict import full_state_dict
from torch import nn
from twin import SmallModel, Twin, part_of

from torchtitan_npu.fsdp import (
    FSDP,
    Piece,
    StateDictType,
    load_optimizer_state_dict,
    optimizer_state_dict,
    save_full,
)

MIB = 2**20


def peak_bytes() -> int:
    """The largest resident memory since the last ``forget_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")


def forget_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


@pytest.mark.skipif(DEVICE != "cpu", reason="measures the memory of the host, where the model itself is not")
@on_ranks(1, 3)
def test_full_takes_one_copy_on_rank_0() -> None:
    """16 matrices of 4 MiB: 64 MiB more on rank 0, half of one matrix more allowed for what comes and goes, twice; and
    next to nothing elsewhere. A list of all pieces, or of both a device's and a host's copies, would be 128.
    """
    model: Any = FSDP(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))))
    before = forget_peak()
    full = full_state_dict(model)
    grown = (peak_bytes() - before) / MIB
    assert grown <= (64 + 4 if dist.get_rank() == 0 else 6), f"{grown:.1f} MiB"
    assert sum(value.nbytes for value in full.values()) == (64 * MIB if dist.get_rank() == 0 else 0)


@on_ranks(1, 2, 3)
def test_values_take_the_masters_dtype_and_no_memory_of_the_input() -> None:
    """bf16 into fp32 and fp32 into bf16; by copying and with assign=True. What is done to the input later is not seen."""
    for ours, given in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        for assign in (False, True):
            torch.manual_seed(0)
            model: Any = FSDP(SmallModel().to(ours))
            torch.manual_seed(1)
            other = SmallModel().to(given)
            want = {name: value.to(ours).clone() for name, value in other.state_dict().items()}
            state = other.state_dict()
            model.load_state_dict(state, assign=assign)
            with torch.no_grad():
                for value in state.values():
                    value.fill_(7)
            for param in model._fsdp_state.params:
                assert param.sharded.dtype == ours
                assert torch.equal(param.sharded.detach(), part_of(param, want[param.name])), (param.name, assign)
            # Full, and back into the model: no memory of the model's either.
            full = full_state_dict(model)
            for value in full.values():
                assert value.dtype == ours
                value.fill_(3)
            assert all(
                torch.equal(param.sharded.detach(), part_of(param, want[param.name]))
                for param in model._fsdp_state.params
            )


@on_ranks(2)
def test_strict_is_as_in_torch() -> None:
    """Missing and unexpected keys together: an error that names both, or with strict=False a list, and the rest is
    loaded.
    """
    twin = Twin(Model)
    torch.manual_seed(9)
    other = Model()
    state = other.state_dict()
    del state["layers.1.up.weight"]
    state["layers.1.up.no_such"] = torch.zeros(1)
    expected = twin.plain.load_state_dict(state, strict=False)
    found = twin.model.load_state_dict(state, strict=False)
    assert found == expected and found.missing_keys == ["layers.1.up.weight"]
    twin.check_weights()  # up.weight as it was, everything else the other's
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*layers.1.up.weight.*Unexpected key.*layers.1.up.no_such"):
        twin.model.load_state_dict(state)


@on_ranks(1, 2, 3)
def test_save_full_as_safetensors(tmp_path: Path) -> None:
    """The library reads it; tied weights stand under both names, so that it loads strictly everywhere."""
    twin = Twin(Model)
    twin.train(1)
    file = tmp_path / "model.safetensors"
    save_full(twin.model, file)
    assert os.listdir(tmp_path) == ["model.safetensors"]
    saved = load_file(file)
    plain = twin.plain.state_dict()
    assert saved.keys() == plain.keys()
    assert all(torch.equal(saved[name], value) and saved[name].dtype == value.dtype for name, value in plain.items())
    twin.model.load_state_dict(saved)
    twin.check_weights()


class WithExtraState(SmallModel):
    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


@on_ranks(2)
def test_save_full_as_safetensors_has_tensors_only(tmp_path: Path) -> None:
    model = FSDP(WithExtraState())
    with pytest.raises(RuntimeError, match=r"'_extra_state' is no tensor .* use a file that torch.load reads"):
        save_full(model, tmp_path / "model.safetensors")
    dist.barrier()
    assert os.listdir(tmp_path) == []
    save_full(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["_extra_state"] == {"calls": 3}


# ---- optimizer state -------------------------------------------------------------------------------------------------


def stepped(steps: int = 2, **options: Any) -> tuple[Twin, torch.optim.AdamW, torch.optim.AdamW]:
    """The twin after some steps of AdamW with two groups, and both optimizers."""
    twin = Twin(Model, batches=lambda step, rank: batch_of(step), **options)
    optimizers = []
    for model in (twin.model, twin.plain):
        parameters = list(model.parameters())
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 3e-3, "weight_decay": 0.0}]
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2))
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        twin.backward(step)
        for optimizer in optimizers:
            optimizer.step()
    return twin, optimizers[0], optimizers[1]


def batch_of(step: int) -> torch.Tensor:
    """The same on all ranks: the result does not depend on their number."""
    return torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(step)).to(DEVICE)


def full_optimizer(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return optimizer_state_dict(model, optimizer)


@on_ranks(1, 2, 3, 4)
def test_full_optimizer_state_equals_the_plain_optimizers(tmp_path: Path) -> None:
    """Also of the empty parameter, of the scalar, and where ranks have empty pieces; a file of it loads safely."""
    twin, ours, theirs = stepped()
    full = full_optimizer(twin.model, ours)
    if twin.rank > 0:
        assert full == {}
        return
    plain = dict(twin.plain.named_parameters())
    assert full["state"].keys() == plain.keys()
    for name, values in full["state"].items():
        want = theirs.state[plain[name]]
        assert values.keys() == want.keys()
        for key, value in values.items():
            assert type(value) is torch.Tensor and torch.equal(value, want[key]), (name, key)
    assert [group["lr"] for group in full["param_groups"]] == [1e-2, 3e-3]
    torch.save(full, tmp_path / "optimizer.pt")
    again = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert torch.equal(again["state"]["gain"]["exp_avg"], full["state"]["gain"]["exp_avg"])
    # No memory of the optimizer's.
    full["state"]["gain"]["step"] += 5
    assert optimizer_state_dict(twin.model, ours)["state"]["gain"]["step"].item() == 2


@on_ranks(4)
def test_full_optimizer_state_of_replicas_is_on_the_first_rank_alone() -> None:
    twin, ours, theirs = stepped(device_mesh=[[0, 1], [2, 3]])
    full = full_optimizer(twin.model, ours)
    assert (full == {}) == (twin.rank > 0)
    for name, p in twin.plain.named_parameters() if full else ():
        assert all(torch.equal(value, theirs.state[p][key]) for key, value in full["state"][name].items()), name


def write_full(path: str) -> dict[str, Any]:
    twin, optimizer, _ = stepped()
    full = full_optimizer(twin.model, optimizer)
    whole = full_state_dict(twin.model)
    if twin.rank == 0:
        torch.save({"model": whole, "optimizer": full}, path)
    optimizer.zero_grad()
    twin.backward(2)
    optimizer.step()
    return {name: value.numpy() for name, value in full_state_dict(twin.model).items()}


def go_on_from_full(path: str, want: dict[str, Any]) -> None:
    saved = torch.load(path, weights_only=True)
    torch.manual_seed(3)
    model: Any = FSDP(Model(), bucket_cap_mb=0.0005)
    model.load_state_dict(saved["model"])
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=9.0)
    load_optimizer_state_dict(model, optimizer, saved["optimizer"])
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    for param in model._fsdp_state.params:
        state = optimizer.state[param.sharded]
        assert state["step"].item() == 2 and state["exp_avg"].shape == param.sharded.shape
    for values in saved["optimizer"]["state"].values():  # the optimizer has memory of its own
        for value in values.values():
            value.fill_(5)
    optimizer.zero_grad()
    tokens = batch_of(2)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    for name, value in full_state_dict(model).items():
        # The average of equal gradients of three ranks is a division off.
        torch.testing.assert_close(value, torch.from_numpy(want[name]), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (2, 4), (3, 2), (4, 1)])
def test_full_optimizer_state_loads_on_any_number_of_ranks(
    rank_pool: Any, tmp_path: Path, saved_by: int, loaded_by: int
) -> None:
    """Moments, step, hyper-parameters of two groups, empty pieces: the next step is the same."""
    path = str(tmp_path / "run.pt")
    want = rank_pool.run(saved_by, write_full, path=path)[0]
    rank_pool.run(loaded_by, go_on_from_full, path=path, want=want)


@on_ranks(2, 3)
def test_local_optimizer_state_is_plain_and_loads_again(tmp_path: Path) -> None:
    twin, optimizer, _ = stepped()
    file = tmp_path / f"{twin.rank}.pt"
    with FSDP.state_dict_type(twin.model, StateDictType.LOCAL_STATE_DICT):
        state = optimizer_state_dict(twin.model, optimizer)
        assert not any(isinstance(v, Piece) for values in state["state"].values() for v in values.values())
        torch.save(state, file)
        fresh = torch.optim.AdamW([{"params": g["params"]} for g in optimizer.param_groups], lr=5.0)
        load_optimizer_state_dict(twin.model, fresh, torch.load(file, weights_only=True))
    for parameter, values in optimizer.state.items():
        assert all(torch.equal(value, fresh.state[parameter][key]) for key, value in values.items())
    # Outside of the context a shard without its place is refused, by name.
    with pytest.raises(ValueError, match=r"exp_avg' has shape .*If it is one rank's shard: Save the whole"):
        load_optimizer_state_dict(twin.model, fresh, torch.load(file, weights_only=True))


@on_ranks(2, own_group=True)
def test_full_optimizer_state_needs_all_ranks_and_the_same_state() -> None:
    twin, optimizer, _ = stepped(1)
    if twin.rank == 1:
        weight = next(param for param in twin.state.params if param.name == "embed.weight")
        del optimizer.state[weight.sharded]["exp_avg"]
    with pytest.raises(RuntimeError, match=r"some ranks lack state that others have \(embed.weight.exp_avg\)"):
        full_optimizer(twin.model, optimizer)
    os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"] = "1.5"
    try:
        if twin.rank == 0:
            with pytest.raises(RuntimeError, match=r"(?s)FULL optimizer state dict is collective.*within 1.5 s.*1"):
                full_optimizer(twin.model, optimizer)
        else:
            time.sleep(2.5)
    finally:
        del os.environ["TORCHTITAN_NPU_STATE_DICT_TIMEOUT"]
