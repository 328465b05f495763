"""Parameters that are DTensors: part of a whole tensor here, the rest on other tensor-parallel ranks.

FSDP shards the local tensor, which all ranks of a data-parallel group have alike. While a unit is gathered, its modules
hold a DTensor around the gathered local tensor, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True)
class Layout:
    """Where a local tensor lies in its whole."""

    mesh: DeviceMesh
    """The tensor-parallel ranks."""
    placements: tuple[Placement, ...]
    """Shard or Replicate, one for each dimension of the mesh."""
    whole_shape: torch.Size
    whole_stride: tuple[int, ...]
    offsets: tuple[int, ...]
    """First element of the local tensor in the whole, by dimension."""
    local_shape: torch.Size

    @property
    def copies(self) -> int:
        """Ranks of the mesh that hold the same elements, this one among them."""
        count = 1
        for dimension, placement in enumerate(self.placements):
            if placement.is_replicate():
                count *= self.mesh.size(dimension)
        return count

    def local_part(self, whole: torch.Tensor) -> torch.Tensor:
        """My rectangle of a whole tensor: a view."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.local_shape, strict=True)):
            whole = whole.narrow(dimension, offset, size)
        return whole

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor. Collective over the mesh."""
        with torch.no_grad():
            return self.whole_of(local).full_tensor()

    def expose(self, leaf: torch.Tensor) -> DTensor:
        """A DTensor around ``leaf``, without a copy, whose gradient arrives at ``leaf`` as a plain tensor.

        Part of one graph: made anew for each pass.
        """
        with torch.enable_grad():  # units are exposed inside backward, too, where it is off
            return self.whole_of(_PlainGradient.apply(leaf))

    def whole_of(self, local: torch.Tensor) -> DTensor:
        """A DTensor around ``local``, without a copy."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.whole_shape, stride=self.whole_stride
        )


class _PlainGradient(torch.autograd.Function):
    """Identity, whose gradient has arrived: DTensor gives the result of a collective that is still under way."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient


def layout_of(name: str, parameter: torch.Tensor) -> Layout | None:
    """The layout of a DTensor, None for any other tensor. ValueError for layouts that are not rectangles."""
    if not isinstance(parameter, DTensor):
        return None
    placements = tuple(parameter.placements)
    # Strided shards and partial sums are other classes.
    unfit = [p for p in placements if type(p) not in (Shard, Replicate)]
    if unfit:
        raise ValueError(f"not supported: parameter '{name}' is a DTensor with placement {unfit[0]}")
    local = local_of(parameter)
    shape, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise ValueError(
            f"not supported: the local tensor of parameter '{name}' has shape {tuple(local.shape)}, but {placements} "
            f"of {tuple(parameter.shape)} over {parameter.device_mesh} give {tuple(shape)}"
        )
    # A rank without elements has no place of its own.
    offsets = tuple(min(o, size) for o, size in zip(offsets, parameter.shape, strict=True))
    return Layout(
        parameter.device_mesh, placements, parameter.shape, tuple(parameter.stride()), offsets, torch.Size(shape)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a DTensor on this rank; any other tensor itself. Without a graph."""
    return tensor._local_tensor.detach() if isinstance(tensor, DTensor) else tensor.detach()


def common_mesh(layouts: Sequence[tuple[str, Layout | None]], fsdp_ranks: Sequence[int]) -> DeviceMesh | None:
    """The one mesh of all DTensors among parameters (by name), None without any.

    ValueError if there are several, or if it has more than this rank of ``fsdp_ranks``.
    """
    found: tuple[str, DeviceMesh] | None = None
    for name, layout in layouts:
        if layout is None:
            continue
        ranks = layout.mesh.mesh.flatten().tolist()
        if len(set(ranks) & set(fsdp_ranks)) > 1:
            raise ValueError(
                f"parameter '{name}' is a DTensor over ranks {ranks}, several of which share the model by FSDP "
                f"(device_mesh {list(fsdp_ranks)}): give FSDP another dimension of the mesh, as in "
                f"device_mesh=mesh['dp'] with parallelize_module(model, mesh['tp'], …)"
            )
        if found is not None and found[1] != layout.mesh:
            raise ValueError(
                f"not supported: parameters '{found[0]}' and '{name}' are DTensors over different meshes, {found[1]} "
                f"and {layout.mesh}"
            )
        found = found or (name, layout.mesh)
    return None if found is None else found[1]


def is_first_of(mesh: DeviceMesh | None) -> bool:
    """Whether this rank speaks for all tensor-parallel ranks."""
    return mesh is None or not any(mesh.get_coordinate() or [])


def broadcast_over(mesh: DeviceMesh | None, values: list[Any]) -> None:
    """Replaces ``values`` by those of the first rank of ``mesh``. Collective over it."""
    for group in groups_of(mesh):
        dist.broadcast_object_list(values, group=group, group_src=0)


def groups_of(mesh: DeviceMesh | None) -> tuple[dist.ProcessGroup, ...]:
    """One group for each dimension of ``mesh``; a collective over one after the other reaches all its ranks."""
    return () if mesh is None else tuple(mesh.get_group(dimension) for dimension in range(mesh.ndim))
