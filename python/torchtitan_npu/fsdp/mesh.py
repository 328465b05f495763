"""Which ranks share a model: the ``device_mesh`` argument."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import BackendConfig

from torchtitan_npu.launch import read_timeouts


@dataclass(frozen=True)
class RankGroup:
    """Some ranks. ``group`` is None for a single process without ``torch.distributed``."""

    ranks: tuple[int, ...]
    """Global ranks, in the order of the group (torch sorts the ranks of a new one)."""
    index: int
    """Position of this rank in ``ranks``."""
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all of them."""
        return self.index == 0


@dataclass(frozen=True)
class Mesh:
    """The ranks that train one model: ``replicas`` (R) rows, each of which shards it over its (S) ranks."""

    shard: RankGroup
    """This rank's row, in shard order."""
    replicate: RankGroup
    """The ranks that hold the same shard, one of each row. One rank: the model is only sharded."""
    everyone: RankGroup
    """All R * S ranks. With one row, the same group as ``shard``."""
    rows: tuple[tuple[int, ...], ...]
    """The ranks of every row."""

    @property
    def columns(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that hold the same shard, for every shard."""
        return tuple(zip(*self.rows, strict=True))

    def new_group(
        self, parts: Sequence[Sequence[int]], timeout: timedelta, backend: str | None = None
    ) -> dist.ProcessGroup:
        """A process group of the one of ``parts`` that has this rank. Collective: all ranks of the mesh call it with
        the same parts, which have all ranks of the mesh. ``timeout`` and ``backend``: as for
        ``torch.distributed.new_group``.
        """
        complete = self.everyone.size == dist.get_world_size()
        return _new_group(parts, complete=complete, timeout=timeout, backend=backend)


def resolve_mesh(device_mesh: Any) -> Mesh:
    """The groups behind ``device_mesh``. Collective over its ranks.

    Accepts None (all ranks), an int n (ranks 0 … n-1), a list or 1-D integer tensor of global ranks, or a 1-D
    ``DeviceMesh``: these ranks shard the model. A 2-D list, tensor or ``DeviceMesh`` of shape (R, S) is hybrid
    sharding: each row shards the model, the rows are replicas of each other. Raises ValueError for anything else, with
    the numbers.
    """
    if not dist.is_initialized():
        return _without_process_group(device_mesh)
    world = dist.get_world_size()
    is_mesh = isinstance(device_mesh, dist.device_mesh.DeviceMesh)
    rows = [list(range(world))] if device_mesh is None else _rows(device_mesh.mesh if is_mesh else device_mesh)
    ranks = [rank for row in rows for rank in row]
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
    complete = len(ranks) == world
    if is_mesh and device_mesh.ndim == 1:
        everyone = as_group(device_mesh.get_group())
    else:
        everyone = _group_of([ranks], complete=complete)
    everyone = _for_hosts_too(everyone, [ranks], complete=complete)
    if len(rows) == 1:
        return Mesh(everyone, _alone(me), everyone, (everyone.ranks,))
    if is_mesh:
        if any(row != sorted(row) for row in rows):
            raise ValueError(f"device_mesh must list the ranks of each replica in ascending order, got {rows}")
        replicate, shard = (as_group(device_mesh.get_group(dimension)) for dimension in (0, 1))
    else:
        rows = [sorted(row) for row in rows]
        shard = _group_of(rows, complete=complete)
        replicate = _group_of(list(zip(*rows, strict=True)), complete=complete)
    shard = _for_hosts_too(shard, rows, complete=complete)
    replicate = _for_hosts_too(replicate, list(zip(*rows, strict=True)), complete=complete)
    return Mesh(shard, replicate, everyone, tuple(tuple(row) for row in rows))


def _alone(rank: int) -> RankGroup:
    return RankGroup((rank,), 0, None)


def as_group(group: dist.ProcessGroup) -> RankGroup:
    """The ranks of a process group that this rank is in."""
    ranks = dist.get_process_group_ranks(group)
    return RankGroup(tuple(ranks), ranks.index(dist.get_rank()), group)


def _group_of(parts: Sequence[Sequence[int]], *, complete: bool) -> RankGroup:
    world = dist.group.WORLD
    is_world = world is not None and len(parts) == 1 and len(parts[0]) == world.size()
    return as_group(world if world is not None and is_world else _new_group(parts, complete=complete))


def _for_hosts_too(ranks: RankGroup, parts: Sequence[Sequence[int]], *, complete: bool) -> RankGroup:
    """The same ranks in a group that takes CPU tensors, too: what hosts tell each other must not wait for a device.
    Collective like ``_new_group``, if there is one to make.
    """
    if ranks.group is None:
        return ranks
    backends = backends_of(ranks.group)
    if "cpu" in backends:
        return ranks
    both = ",".join(f"{device}:{name}" for device, name in {"cpu": "gloo", **backends}.items())
    return as_group(_new_group(parts, complete=complete, backend=both))


def backends_of(group: dist.ProcessGroup) -> dict[str, str]:
    """Names of the group's backends by device type."""
    return dict(BackendConfig(dist.Backend(dist.get_backend_config(group))).get_device_backend_map())


def _new_group(parts: Sequence[Sequence[int]], *, complete: bool, **options: Any) -> dist.ProcessGroup:
    """``complete``: the parts have all ranks of the world. ``options``: of ``torch.distributed.new_group``; the timeout
    is HCCL_EXEC_TIMEOUT's, since torch's own default is shorter and would hide its message.
    """
    options.setdefault("timeout", read_timeouts().process_group)
    # Local synchronisation names a group after the number of groups this process has; where ranks differ in that (one
    # wrapped a small model alone), they would wait under different names. The whole world needs none.
    if not complete:
        mine = next(part for part in parts if dist.get_rank() in part)
        return dist.new_group(list(mine), use_local_synchronization=True, **options)
    groups = [dist.new_group(list(part), **options) for part in parts]
    return next(group for group, part in zip(groups, parts, strict=True) if dist.get_rank() in part)


def _without_process_group(device_mesh: Any) -> Mesh:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ValueError(
            f"WORLD_SIZE is {world} but torch.distributed is not initialised: call "
            f"torch.distributed.init_process_group() "
            "before FSDP(...)"
        )
    ranks = [0] if device_mesh is None else [rank for row in _rows(device_mesh) for rank in row]
    if ranks != [0]:
        raise ValueError(
            f"device_mesh has {len(ranks)} ranks but this is a single process: start it with "
            f"torchrun and call "
            "torch.distributed.init_process_group() first"
        )
    return Mesh(_alone(0), _alone(0), _alone(0), ((0,),))


def _rows(device_mesh: Any) -> list[list[int]]:
    """Global ranks, by replica; one row where the mesh has one dimension."""
    if isinstance(device_mesh, bool):
        raise ValueError(f"device_mesh must be ranks, got {device_mesh!r}")
    if isinstance(device_mesh, int):
        return [list(range(device_mesh))]
    if isinstance(device_mesh, Sequence) and not isinstance(device_mesh, str):
        device_mesh = _as_tensor(device_mesh)
    if isinstance(device_mesh, torch.Tensor):
        mesh = device_mesh
        if mesh.numel() == 0 or mesh.dtype.is_floating_point or mesh.dtype == torch.bool:
            raise ValueError(f"device_mesh must hold global ranks (integers), got {device_mesh!r}")
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"device_mesh must have one or two dimensions (shard, or replicate x shard), got shape "
                f"{tuple(mesh.shape)}"
            )
        rows: list[list[int]] = mesh.reshape(-1, mesh.shape[-1]).tolist()
        return rows
    raise ValueError(
        "device_mesh must be None, a number of ranks, a list or tensor of global ranks (1-D, or 2-D for replicate x "
        f"shard), or a DeviceMesh; got {type(device_mesh).__name__}"
    )


def _as_tensor(ranks: Sequence[Any]) -> torch.Tensor:
    lengths = {len(row) for row in ranks if isinstance(row, Sequence) and not isinstance(row, str)}
    if len(lengths) > 1:
        raise ValueError(
            f"device_mesh has rows of {' and '.join(str(n) for n in sorted(lengths))} ranks: all replicas must have "
            f"as many, got {list(ranks)}"
        )
    try:
        return torch.tensor(list(ranks), device="cpu")  # also under torch.device("meta")
    except (TypeError, ValueError) as error:
        raise ValueError(f"device_mesh must hold global ranks (integers), got {ranks!r}") from error


def _launched_with() -> str:
    per_node = os.environ.get("LOCAL_WORLD_SIZE")
    return f"launched with --nproc_per_node={per_node}" if per_node else "launched without torchrun"
