"""Checkpoints of other world sizes and of PyTorch's own FSDP2: what training does next."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from pool import on_ranks
from test_fsdp_checkpoint import Model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from twin import VOCAB, SmallModel

from torchtitan_npu.fsdp import FSDP, StateDictType, load_optimizer_state_dict, optimizer_state_dict

WITHOUT_US = """
import sys
sys.modules["torchtitan_npu"] = None  # an import fails
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
path, whole, moment, converted = sys.argv[1:]
embedding, squares = torch.empty(37, 20), torch.empty(37, 20)
dcp.load({"model": {"embed.weight": embedding}, "optimizer": {"state": {"embed.weight": {"exp_avg_sq": squares}}}},
         checkpoint_id=path, no_dist=True)
torch.save(embedding, whole)
torch.save(squares, moment)
dcp_to_torch_save(path, converted)
"""

BATCH = 12
"""Sequences of a step, of all ranks together: divides by 1, 2, 3 and 4."""


def two_groups(model: Any) -> torch.optim.AdamW:
    """Matrices decay, other parameters do not, and learn at another rate."""
    parameters = list(model.named_parameters())
    matrices = [p for name, p in parameters if name.endswith("weight") and "norm" not in name]
    others = [p for name, p in parameters if not (name.endswith("weight") and "norm" not in name)]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}], lr=1e-2
    )


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of this rank's part of the same batches, whatever the number of ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        tokens = torch.randint(0, VOCAB, (BATCH, 5), generator=torch.Generator().manual_seed(step))
        mine = tokens[rank * BATCH // size : (rank + 1) * BATCH // size]
        optimizer.zero_grad()
        # Not the token itself, which a tied embedding gives without learning.
        loss = F.cross_entropy(model(mine).flatten(0, 1), (7 * mine + 3).flatten() % VOCAB)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole(model: Any) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {name: value.numpy() for name, value in model.state_dict().items()}


def state_of_run(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}


def save_and_go_on(path: str) -> tuple[list[float], dict[str, Any]]:
    """Two steps, a checkpoint, ten more steps: their losses, and the whole model after them."""
    torch.manual_seed(0)
    model = FSDP(Model(), bucket_cap_mb=0.001)
    optimizer = two_groups(model)
    train(model, optimizer, range(2))
    dcp.save(state_of_run(model, optimizer), checkpoint_id=path)
    losses = train(model, optimizer, range(2, 12))
    return losses, whole(model)


def load_and_go_on(path: str) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(1)
    model: Any = FSDP(Model(), bucket_cap_mb=0.001)
    optimizer = two_groups(model)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    optimizer.step()  # makes the state that is loaded into
    state = state_of_run(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
    losses = train(model, optimizer, range(2, 12))
    return losses, whole(model)


@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_the_next_ten_steps(rank_pool: Any, tmp_path: Path, saved_by: int) -> None:
    """37 rows in the tied embedding, two parameter groups. Where the number of ranks is the same, bit for bit."""
    path = str(tmp_path / "checkpoint")
    values = rank_pool.run(saved_by, save_and_go_on, path=path)
    losses, want = values[0]
    for loaded_by in (1, 2, 3, 4):
        found = rank_pool.run(loaded_by, load_and_go_on, path=path)
        if loaded_by == saved_by:
            assert [losses for losses, _ in found] == [losses for losses, _ in values]
            assert all((found[0][1][name] == value).all() for name, value in want.items())
            continue
        # Gradients are sums over the batch in another order, some 1e-7 of their size off; both differences stayed
        # below 3e-7 when this was written.
        mean = [sum(of_ranks) / loaded_by for of_ranks in zip(*(losses for losses, _ in found), strict=True)]
        expected = [sum(of_ranks) / saved_by for of_ranks in zip(*(losses for losses, _ in values), strict=True)]
        assert mean == pytest.approx(expected, rel=1e-5), (saved_by, loaded_by)
        for name, value in want.items():
            torch.testing.assert_close(
                torch.from_numpy(found[0][1][name]), torch.from_numpy(value), rtol=0, atol=1e-5, msg=name
            )
    assert losses[-1] < losses[0] - 0.1, "it trains"


def save_and_tell(path: str) -> tuple[dict[str, Any], Any]:
    """A checkpoint after two steps; the whole model, and this rank's rows of the embedding's second moment."""
    torch.manual_seed(0)
    model = FSDP(Model())
    optimizer = two_groups(model)
    train(model, optimizer, range(2))
    dcp.save(state_of_run(model, optimizer), checkpoint_id=path)
    moment = optimizer_state_dict(model, optimizer)["state"]["embed.weight"]["exp_avg_sq"]
    return whole(model), moment.plain().numpy()


def test_torch_alone_reads_it(rank_pool: Any, tmp_path: Path) -> None:
    """In a process that cannot import this package: a part of it, and all of it by torch's own converter."""
    path, files = tmp_path / "checkpoint", [tmp_path / name for name in ("whole.pt", "moment.pt", "converted.pt")]
    values = rank_pool.run(3, save_and_tell, path=str(path))
    want, moment = values[0][0], torch.cat([torch.from_numpy(piece) for _, piece in values])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_US, path, *files], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    embedding, squares, converted = (torch.load(file, weights_only=True) for file in files)
    assert torch.equal(embedding, torch.from_numpy(want["embed.weight"]))
    assert torch.equal(squares, moment) and squares.any()
    assert converted["model"].keys() == want.keys()
    assert all(torch.equal(value, torch.from_numpy(want[name])) for name, value in converted["model"].items())
    assert torch.equal(converted["optimizer"]["state"]["embed.weight"]["exp_avg_sq"], moment)


def sharded_by_torch(model: nn.Module) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        torch_fully_shard(layer)  # type: ignore[arg-type]
    return torch_fully_shard(model)


def save_by_torch(path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = sharded_by_torch(SmallModel())
    optimizer = two_groups(model)
    train(model, optimizer, range(2))
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    train(model, optimizer, range(2, 4))
    return {name: value.full_tensor().numpy() for name, value in get_model_state_dict(model).items()}


def load_by_us(path: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model: Any = FSDP(SmallModel())
    optimizer = two_groups(model)
    with torch.no_grad():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    optimizer.step()
    state = state_of_run(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(model, optimizer, range(2, 4))
    return whole(model)


@pytest.mark.parametrize("loaded_by", [2, 3])
def test_a_checkpoint_of_torch_fsdp2_loads(rank_pool: Any, tmp_path: Path, loaded_by: int) -> None:
    """Weights, moments, step and both groups: two more steps end where torch's own do."""
    path = str(tmp_path / "checkpoint")
    want = rank_pool.run(2, save_by_torch, path=path)[0]
    found = rank_pool.run(loaded_by, load_by_us, path=path)[0]
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(torch.from_numpy(found[name]), torch.from_numpy(value), rtol=0, atol=1e-5, msg=name)


@on_ranks(2, 3)
def test_torch_fsdp2_loads_ours(tmp_path: Path) -> None:
    """The other way round: our checkpoint into torch's sharded model and its optimizer."""
    torch.manual_seed(0)
    ours: Any = FSDP(SmallModel())
    optimizer = two_groups(ours)
    train(ours, optimizer, range(2))
    path = str(tmp_path / "checkpoint")
    dcp.save(state_of_run(ours, optimizer), checkpoint_id=path)

    torch.manual_seed(1)
    theirs = sharded_by_torch(SmallModel())
    other = two_groups(theirs)
    state = {"model": get_model_state_dict(theirs), "optimizer": get_optimizer_state_dict(theirs, other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(theirs, state["model"])
    set_optimizer_state_dict(theirs, other, state["optimizer"])
    train(ours, optimizer, range(2, 4))
    train(theirs, other, range(2, 4))
    found = whole(ours)
    for name, value in get_model_state_dict(theirs).items():
        want = value.full_tensor()
        if dist.get_rank() == 0:
            torch.testing.assert_close(torch.from_numpy(found[name]), want, rtol=0, atol=1e-5, msg=name)
