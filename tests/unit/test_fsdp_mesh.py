"""device_mesh in a single process; with several ranks it is tested in tests/dist."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchtitan_npu.fsdp.mesh import resolve_mesh


@pytest.mark.parametrize(
    "mesh", [None, 1, [0], (0,), torch.tensor([0]), torch.arange(1), torch.zeros(1, 1, dtype=torch.int32)]
)
def test_one_process_without_a_process_group(mesh: Any) -> None:
    resolved = resolve_mesh(mesh)
    assert resolved.rows == ((0,),)
    for group in (resolved.shard, resolved.replicate, resolved.everyone):
        assert (group.ranks, group.index, group.size, group.group) == ((0,), 0, 1, None)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (8, "device_mesh has 8 ranks but this is a single process: start it with torchrun"),
        ([1], "this is a single process"),
        (
            0.5,
            "must be None, a number of ranks, a list or tensor of global ranks.*, or a DeviceMesh; got float",
        ),
        (torch.tensor([0.0]), r"must hold global ranks \(integers\)"),
        (torch.tensor([True]), "must hold global ranks"),
        ([], "must hold global ranks"),
        (["a"], "must hold global ranks"),
        (torch.arange(4).view(2, 2), "device_mesh has 4 ranks but this is a single process"),
        ([[0, 1], [2]], "device_mesh has rows of 1 and 2 ranks: all replicas must have as many"),
        (torch.zeros(1, 1, 1, dtype=torch.int64), r"one or two dimensions .*, got shape \(1, 1, 1\)"),
        (False, "device_mesh must be ranks, got False"),
    ],
)
def test_errors(mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_mesh(mesh)


def test_a_launched_process_must_have_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2 but torch.distributed is not initialised: call"):
        resolve_mesh(None)
