"""Which ranks share a model: the ``device_mesh`` argument."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankGroup:
    """The ranks that shard one model. ``group`` is None for a single process without ``torch.distributed``."""

    ranks: tuple[int, ...]
    """Global ranks, in shard order."""
    index: int
    """Position of this rank in ``ranks``."""
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


def resolve_mesh(device_mesh: Any) -> RankGroup:
    """The group behind ``device_mesh``.

    Accepts None (all ranks), an int n (ranks 0 … n-1), a list or 1-D integer tensor of global ranks, or a 1-D
    ``DeviceMesh``; 2-D ones only if one of the two dimensions has size 1. Raises ValueError for anything else, with the
    numbers.
    """
    if not dist.is_initialized():
        return _without_process_group(device_mesh)
    world = dist.get_world_size()
    if device_mesh is None:
        ranks = list(range(world))
    elif isinstance(device_mesh, dist.device_mesh.DeviceMesh):
        if device_mesh.ndim == 1:
            group = device_mesh.get_group()
            ranks = dist.get_process_group_ranks(group)
            return RankGroup(tuple(ranks), ranks.index(dist.get_rank()), group)
        ranks = _flatten(device_mesh.mesh)
    else:
        ranks = _flatten(device_mesh)
    if len(ranks) > world:
        raise ValueError(f"device_mesh has {len(ranks)} ranks but WORLD_SIZE is {world} ({_launched_with()})")
    outside = [r for r in ranks if not 0 <= r < world]
    if outside:
        raise ValueError(f"device_mesh names rank {outside[0]}, but ranks are 0..{world - 1} ({_launched_with()})")
    repeated = sorted({r for r in ranks if ranks.count(r) > 1})
    if repeated:
        raise ValueError(f"device_mesh names rank {repeated[0]} more than once: {ranks}")
    me = dist.get_rank()
    if me not in ranks:
        raise ValueError(f"device_mesh {ranks} does not contain this rank, {me}; only its ranks may wrap the model")
    if ranks == list(range(world)):
        return RankGroup(tuple(ranks), me, dist.group.WORLD)
    group = dist.new_group(ranks, use_local_synchronization=True)
    return RankGroup(tuple(ranks), ranks.index(me), group)


def _without_process_group(device_mesh: Any) -> RankGroup:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ValueError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: call "
            f"torch.distributed.init_process_group() "
            "before FSDP(...)"
        )
    if device_mesh is not None and _flatten(device_mesh) != [0]:
        raise ValueError(
            f"device_mesh has {len(_flatten(device_mesh))} ranks but this is a single process: start it with "
            f"torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    return RankGroup((0,), 0, None)


def _flatten(device_mesh: Any) -> list[int]:
    if isinstance(device_mesh, bool):
        raise ValueError(f"device_mesh must be ranks, got {device_mesh!r}")
    if isinstance(device_mesh, int):
        return list(range(device_mesh))
    if isinstance(device_mesh, Sequence) and not isinstance(device_mesh, str):
        try:
            device_mesh = torch.tensor(list(device_mesh))
        except (TypeError, ValueError) as error:
            raise ValueError(f"device_mesh must hold global ranks (integers), got {device_mesh!r}") from error
    if isinstance(device_mesh, torch.Tensor):
        mesh = device_mesh
        if mesh.numel() == 0 or mesh.dtype.is_floating_point or mesh.dtype == torch.bool:
            raise ValueError(f"device_mesh must hold global ranks (integers), got {device_mesh!r}")
        if mesh.ndim == 2 and 1 not in mesh.shape:
            raise ValueError(
                f"not supported yet: a 2-D device_mesh of shape {tuple(mesh.shape)} (replicate x shard); pass the "
                f"ranks as one "
                "dimension"
            )
        if mesh.ndim not in (1, 2):
            raise ValueError(f"device_mesh must have one or two dimensions, got shape {tuple(mesh.shape)}")
        return [int(r) for r in mesh.flatten().tolist()]
    raise ValueError(
        "device_mesh must be None, a number of ranks, a list or 1-D tensor of global ranks, or a DeviceMesh; got "
        f"{type(device_mesh).__name__}"
    )


def _launched_with() -> str:
    per_node = os.environ.get("LOCAL_WORLD_SIZE")
    return f"launched with --nproc_per_node={per_node}" if per_node else "launched without torchrun"
