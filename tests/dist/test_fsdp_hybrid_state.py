"""State dicts and checkpoints of replicas: as those of the sharded model, whichever replica gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_fsdp_checkpoint as checkpoints
import torch
import torch.distributed as dist
from pool import on_ranks
from twin import SmallModel, Twin, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, StateDictType, save_full

MESH = [[0, 1], [2, 3]]


@on_ranks(4)
def test_a_full_state_dict_is_on_the_first_rank_alone(tmp_path: Path) -> None:
    twin = Twin(SmallModel, device_mesh=MESH)
    twin.train(1)
    with FSDP.state_dict_type(twin.model, StateDictType.FULL_STATE_DICT):
        full = twin.model.state_dict()
    plain = twin.plain.state_dict()
    assert list(full) == (list(plain) if twin.rank == 0 else [])
    assert all(torch.equal(value, plain[name].cpu()) for name, value in full.items())

    path = tmp_path / "whole.pt"
    save_full(twin.model, path)
    assert all(torch.equal(value, plain[name].cpu()) for name, value in torch.load(path, weights_only=True).items())
    # Whole tensors go into every replica.
    torch.manual_seed(9)
    other: Any = FSDP(SmallModel(), device_mesh=MESH)
    other.load_state_dict(torch.load(path, weights_only=True))
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.model.parameters(), strict=True))


@on_ranks(4)
def test_a_local_state_dict_fits_the_same_shard_of_any_replica() -> None:
    twin = Twin(SmallModel, device_mesh=MESH)
    twin.train(1)
    with FSDP.state_dict_type(twin.model, StateDictType.LOCAL_STATE_DICT):
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, twin.model.state_dict())
        torch.manual_seed(9)
        other: Any = FSDP(SmallModel(), device_mesh=MESH)
        with FSDP.state_dict_type(other, StateDictType.LOCAL_STATE_DICT):
            other.load_state_dict(everyone[(twin.rank + 2) % 4])
            with pytest.raises(ValueError, match="is shard . of 2 of a tensor of shape"):
                other.load_state_dict(everyone[twin.rank ^ 1])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), twin.model.parameters(), strict=True))
    next_token_loss(other, tokens_for(0, twin.rank)).backward()


def test_checkpoints_of_replicas_and_of_any_number_of_ranks(rank_pool: Any, tmp_path: Path) -> None:
    """Saved by 2 x 2 ranks, loaded by 1, 2, 3, by 2 x 2 and 2 x 1; saved by 2, loaded by 2 x 2."""
    path = str(tmp_path / "hybrid")
    values = rank_pool.run(4, checkpoints.save, path=path, cap=None, device_mesh=MESH)[0]
    for loaded_by in (1, 2, 3):
        rank_pool.run(loaded_by, checkpoints.load, path=path, cap=None, values=values)
    rank_pool.run(4, checkpoints.load, path=path, cap=0.0005, values=values, device_mesh=MESH)
    rank_pool.run(2, checkpoints.load, path=path, cap=None, values=values, device_mesh=[[0], [1]])
    rank_pool.run(1, checkpoints.load_whole, path=path, values=values)

    sharded = str(tmp_path / "sharded")
    values = rank_pool.run(2, checkpoints.save, path=sharded, cap=None)[0]
    rank_pool.run(4, checkpoints.load, path=sharded, cap=None, values=values, device_mesh=MESH)

    def stored(path: str) -> int:
        return sum(file.stat().st_size for file in Path(path).glob("*.distcp"))

    # Replicas do not write the same again: as many bytes as from two ranks, but for the padding of more files.
    assert stored(sharded) <= stored(path) < 1.05 * stored(sharded)
