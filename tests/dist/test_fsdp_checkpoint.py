"""torch.distributed.checkpoint: saved by N ranks, loaded by M, with or without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import on_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from twin import DIM, VOCAB, SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, load_optimizer_state_dict, optimizer_state_dict


class Model(SmallModel):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.25))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("steps", torch.arange(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.gain + self.empty.sum()


def save(path: str, cap: float | None, **options: Any) -> dict[str, Any]:
    """Trains, saves model and optimizer; the plain model's values."""
    twin = Twin(Model, batches=lambda step, rank: tokens_for(step, 0), bucket_cap_mb=cap, **options)
    optimizer = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    other = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2)
    for step in range(2):
        optimizer.zero_grad()
        twin.backward(step)
        optimizer.step()
        other.step()
    twin.check_weights()
    dcp.save(
        {"model": twin.model.state_dict(), "optimizer": optimizer_state_dict(twin.model, optimizer)}, checkpoint_id=path
    )
    values = {f"model.{name}": value.numpy() for name, value in twin.plain.state_dict().items()}
    for name, p in twin.plain.named_parameters():
        values |= {f"optimizer.{name}.{key}": value.numpy() for key, value in other.state[p].items()}
    return values


def load(path: str, cap: float | None, values: dict[str, Any], **options: Any) -> None:
    """Loads into a model of other first values, compares, and trains on."""
    torch.manual_seed(7)
    model = FSDP(Model(), bucket_cap_mb=cap, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes the state that is loaded into
    state = {"model": model.state_dict(), "optimizer": optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    load_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 1e-2
    for param in model._fsdp_state.params:

        def check(got: torch.Tensor, key: str, param: Any = param) -> None:
            whole = torch.from_numpy(values[key]).reshape(-1)
            want = whole[param.piece.start : param.piece.start + got.numel()]
            assert torch.equal(got.detach().reshape(-1), want), key

        check(param.sharded, f"model.{param.name}")
        for key in ("exp_avg", "exp_avg_sq"):
            check(optimizer.state[param.sharded][key], f"optimizer.{param.name}.{key}")
        assert optimizer.state[param.sharded]["step"].item() == 2
    optimizer.zero_grad()
    next_token_loss(model, tokens_for(2, 0)).backward()
    optimizer.step()


def load_whole(path: str, values: dict[str, Any]) -> None:
    """Plain DCP into a plain model."""
    plain = Model()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=path)
    for name, value in state["model"].items():
        assert (value.numpy() == values[f"model.{name}"]).all(), name


@pytest.mark.parametrize("saved_by", [1, 2, 3])
def test_saved_by_n_ranks_loaded_by_m(rank_pool: Any, tmp_path: Path, saved_by: int) -> None:
    path = str(tmp_path / "checkpoint")
    values = rank_pool.run(saved_by, save, path=path, cap=None if saved_by < 3 else 0.0005)[0]
    for loaded_by in (1, 2, 3):
        rank_pool.run(loaded_by, load, path=path, cap=0.0005 if loaded_by == 2 else None, values=values)
    rank_pool.run(1, load_whole, path=path, values=values)
    # Converted by torch's own tool: an ordinary file of whole tensors.
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name, value in whole["model"].items():
        assert type(value) is torch.Tensor
        assert (value.numpy() == values[f"model.{name}"]).all(), name


@on_ranks(2)
def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    model = FSDP(SmallModel())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    wider = FSDP(SmallModel(dim=24))
    before = {name: p.detach().clone() for name, p in wider.named_parameters()}
    with pytest.raises(
        CheckpointException, match=r"Size mismatch between saved .*\[37, 20\].* and current: .*\[37, 24\]"
    ):
        dcp.load({"model": wider.state_dict()}, checkpoint_id=path)
    assert all(torch.equal(p, before[name]) for name, p in wider.named_parameters())


@pytest.mark.parametrize("communicator", ["auto", "c10d"])
@on_ranks(2, 3)
def test_saves_between_steps_leave_no_collective_behind(communicator: str, tmp_path: Path) -> None:
    """Every second step is saved, and the same number of messages again each time; training goes on as if not."""
    twin = Twin(SmallModel, communicator=communicator)
    ours = torch.optim.AdamW(twin.model.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.plain.parameters(), lr=1e-2)
    collectives: list[int] = []
    for step in range(6):
        ours.zero_grad()
        twin.backward(step)
        ours.step()
        theirs.step()
        twin.check_weights()
        if step % 2:
            before = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
            state = {"model": twin.model.state_dict(), "optimizer": optimizer_state_dict(twin.model, ours)}
            dcp.save(state, checkpoint_id=str(tmp_path / str(step)))
            collectives.append(dist.group.WORLD._get_sequence_number_for_group() - before)  # type: ignore[union-attr]
    assert len(set(collectives)) == 1, collectives
