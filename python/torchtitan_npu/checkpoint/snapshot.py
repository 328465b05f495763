"""A copy of a rank's tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.fsdp.piece import Piece

_ALIGNMENT = 64


class Snapshot:
    """Host memory for one copy of the tensors, allocated and touched once; pinned where they are on an accelerator."""

    def __init__(self, tensors: dict[str, Any], device: torch.device) -> None:
        self._device = device
        plain = {name: _plain(tensor) for name, tensor in tensors.items()}
        offsets: dict[str, int] = {}
        # A tied weight has several names and one memory.
        seen: dict[tuple[int, int], str] = {}
        self._same = {name: seen.setdefault((t.data_ptr(), t.nbytes), name) for name, t in plain.items() if t.nbytes}
        self.bytes = 0
        for name, tensor in plain.items():
            first = self._same.get(name, name)
            if first == name:
                offsets[name] = self.bytes
                self.bytes += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            else:
                offsets[name] = offsets[first]
        # Zeros written, so that the first copy does not pay for the pages.
        self._memory = torch.empty(self.bytes, dtype=torch.uint8, pin_memory=device.type != "cpu").fill_(0)
        self._copies = {
            name: self._memory[offset : offset + plain[name].nbytes].view(plain[name].dtype).view(plain[name].shape)
            for name, offset in offsets.items()
        }

    def take(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copy ``tensors`` (the same names, shapes and dtypes as at the beginning); when this returns they may change.

        The result is valid until the next ``take``.
        """
        assert tensors.keys() == self._copies.keys()
        for name, tensor in tensors.items():
            if self._same.get(name, name) == name:
                self._copies[name].copy_(_plain(tensor).detach(), non_blocking=True)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return {name: _like(tensors[name], copy) for name, copy in self._copies.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain() if isinstance(tensor, Piece) else tensor


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    """``copy`` as the part of the whole tensor that ``tensor`` is."""
    if not isinstance(tensor, Piece):
        return copy
    return Piece(
        copy,
        fqn=tensor.fqn,
        shape=tensor.whole_shape,
        start=tensor.start,
        rank=tensor.rank,
        world_size=tensor.world_size,
        offsets=tensor.offsets,
        box_shape=tensor.box_shape,
    )
