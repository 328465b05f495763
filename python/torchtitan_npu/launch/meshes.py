"""Which ranks this one computes each layer with, and which it shares parameters with, as meshes of one dimension."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_npu.config import Degrees
from torchtitan_npu.launch.timeouts import read_timeouts

_Parts = tuple[tuple[int, ...], ...]
_known: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[_Parts, str], DeviceMesh]] = WeakKeyDictionary()
"""By the group of all ranks: models that follow each other in a process share what torch never frees."""


def tensor_parallel_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """The ranks that compute each layer together with this one. Collective over all ranks."""
    return _mesh(torch.arange(degrees.dp * degrees.tp).view(-1, degrees.tp), device_type)


def data_parallel_mesh(degrees: Degrees, device_type: str) -> DeviceMesh:
    """The ranks that compute the same part of each layer as this one. Collective over all ranks."""
    return _mesh(torch.arange(degrees.dp * degrees.tp).view(-1, degrees.tp).t(), device_type)


def _mesh(ranks: torch.Tensor, device_type: str) -> DeviceMesh:
    """The row of ``ranks`` that has this one."""
    world = dist.group.WORLD
    assert world is not None
    key = (tuple(map(tuple, ranks.tolist())), device_type)
    meshes = _known.setdefault(world, {})
    if key not in meshes:
        # A mesh that makes its groups itself gives them torch's own timeout.
        group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=read_timeouts().process_group)
        meshes[key] = DeviceMesh.from_group(group, device_type)
    return meshes[key]
