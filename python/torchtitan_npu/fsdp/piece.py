"""One rank's part of a tensor, as ``torch.distributed.checkpoint`` understands it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Piece(torch.Tensor):
    """A consecutive run of elements of a larger tensor (whole rows, as a rule), with the knowledge where it belongs.

    Under tensor parallelism, of a rectangle of the larger tensor: the local tensor of this rank.

    Computes like a plain tensor. ``torch.distributed.checkpoint`` saves and loads it as chunks of the whole tensor, at
    most ``2 * ndim - 1`` rectangles; ``torch.save`` writes a plain tensor.
    """

    fqn: str
    """Of the whole tensor."""
    whole_shape: torch.Size
    start: int
    """Its first element in the flattened whole, or rectangle."""
    offsets: tuple[int, ...]
    """Where the rectangle begins in the whole, by dimension."""
    box_shape: torch.Size
    """Of the rectangle; ``whole_shape`` without tensor parallelism."""
    rank: int
    world_size: int

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        data: torch.Tensor,
        *,
        fqn: str,
        shape: torch.Size,
        start: int,
        rank: int,
        world_size: int,
        offsets: tuple[int, ...] | None = None,
        box_shape: torch.Size | None = None,
    ) -> Piece:
        self = data.detach().as_subclass(cls)
        self.fqn, self.whole_shape, self.start = fqn, shape, start
        self.rank, self.world_size = rank, world_size
        self.offsets = (0,) * len(shape) if offsets is None else offsets
        self.box_shape = shape if box_shape is None else box_shape
        return self

    def plain(self) -> torch.Tensor:
        """The same memory as an ordinary tensor."""
        return self.as_subclass(torch.Tensor)

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor, as ``torch.distributed.checkpoint`` asks (and as a DTensor answers); ``shape`` is
        the piece's own.
        """
        return self.whole_shape if dim is None else self.whole_shape[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"Piece({self.plain()!r}, elements {self.start}..{self.start + self.numel()} of '{self.fqn}' "
            f"{tuple(self.whole_shape)}, "
            f"{self._box()}shard {self.rank} of {self.world_size})"
        )

    def _box(self) -> str:
        if self.box_shape == self.whole_shape:
            return ""
        return f"of its part {tuple(self.box_shape)} at {self.offsets}, "

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Piece:
        return self.around(self.plain().clone())

    def around(self, memory: torch.Tensor) -> Piece:
        """The same piece of the whole tensor, in other memory."""
        return Piece(
            memory,
            fqn=self.fqn,
            shape=self.whole_shape,
            start=self.start,
            rank=self.rank,
            world_size=self.world_size,
            offsets=self.offsets,
            box_shape=self.box_shape,
        )

    # ---- the protocol of torch.distributed.checkpoint (torch/distributed/_checkpointable.py) -------------------------

    def _chunks(self) -> list[ChunkStorageMetadata]:
        if self.whole_shape.numel() == 0 and self.rank == 0:  # an empty tensor is in the checkpoint, too: once
            return [ChunkStorageMetadata(offsets=torch.Size([0] * len(self.whole_shape)), sizes=self.whole_shape)]
        return [
            ChunkStorageMetadata(
                offsets=torch.Size(a + b for a, b in zip(self.offsets, offsets, strict=True)), sizes=torch.Size(sizes)
            )
            for offsets, sizes in rectangles(tuple(self.box_shape), self.start, self.numel())
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.plain())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.whole_shape),
            )
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self._chunks()

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        flat = self.plain().view(-1)
        position = 0
        for chunk in self._chunks():
            numel = chunk.sizes.numel()
            if chunk.offsets == index.offset:
                return flat[position : position + numel].view(chunk.sizes)
            position += numel
        raise ValueError(f"shard {self.rank} of '{self.fqn}' has no chunk at {index.offset}")


def rectangles(shape: tuple[int, ...], start: int, numel: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cuts the run ``[start, start + numel)`` of a flattened tensor into rectangles (offsets, sizes), in order.

    Each rectangle is itself a consecutive run. An empty run has none; a scalar has one, ``((), ())``.
    """
    if numel == 0:
        return []
    if not shape:
        return [((), ())]
    row = 1
    for size in shape[1:]:
        row *= size
    first, last = start // row, (start + numel - 1) // row
    zeros, rest = (0,) * (len(shape) - 1), shape[1:]

    def part(index: int, begin: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        return [((index, *offsets), (1, *sizes)) for offsets, sizes in rectangles(rest, begin, count)]

    if start % row == 0 and numel % row == 0:
        return [((first, *zeros), (numel // row, *rest))]
    if first == last:
        return part(first, start % row, numel)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    end = start + numel
    whole_begin = first
    if start % row:
        found += part(first, start % row, (first + 1) * row - start)
        whole_begin = first + 1
    whole_end = end // row
    if whole_end > whole_begin:
        found.append(((whole_begin, *zeros), (whole_end - whole_begin, *rest)))
    if end % row:
        found += part(last, 0, end % row)
    return found
