"""A copy of a rank's tensors in host memory, from which a checkpoint is written while training goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.fsdp.piece import Piece


class Snapshot:
    """Host memory for one copy of the tensors, allocated and touched once; pinned where they are on an accelerator."""

    def __init__(self, tensors: dict[str, Any], device: torch.device) -> None:
        self._device = device
        pinned = device.type != "cpu"
        self._copies: dict[str, Tensor] = {}
        # A tied weight has several names and one memory: it is copied under the first.
        first_names: dict[tuple[int, int], str] = {}
        self.bytes = 0
        for name, tensor in tensors.items():
            plain = _plain(tensor)
            first = first_names.setdefault(_memory(plain, name), name)
            if first == name:
                # A storage each: DCP clones what is a part of one before it writes. Filled, so that the first copy
                # does not pay for the pages.
                self._copies[name] = torch.empty(plain.shape, dtype=plain.dtype, pin_memory=pinned).fill_(0)
                self.bytes += plain.nbytes
            else:
                self._copies[name] = self._copies[first]
        self._owners = set(first_names.values())

    def take(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Copy ``tensors`` (the same names, shapes and dtypes as at the beginning); when this returns they may change.

        The result is valid until the next ``take``.
        """
        assert tensors.keys() == self._copies.keys()
        for name, tensor in tensors.items():
            if name in self._owners:
                self._copies[name].copy_(_plain(tensor).detach(), non_blocking=True)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).synchronize(self._device)
        return {name: _like(tensors[name], copy) for name, copy in self._copies.items()}


def _memory(plain: Tensor, name: str) -> tuple[int, int]:
    # Empty tensors have no memory of their own.
    return (plain.data_ptr(), plain.nbytes) if plain.nbytes else (hash(name), 0)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.plain() if isinstance(tensor, Piece) else tensor


def _like(tensor: Tensor, copy: Tensor) -> Tensor:
    """``copy`` as the part of the whole tensor that ``tensor`` is."""
    return tensor.around(copy) if isinstance(tensor, Piece) else copy
