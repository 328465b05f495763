"""Which tokens of a batch belong together: documents that share rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The documents of one micro-batch, for attention that stays inside them.

    Letters: B batch, T position, N documents.

    Attributes:
        ids_BT: integers; two places of a row belong to one document where they are equal and all between them are. On
            the device of the model.
        ends_N: int64 on the CPU: where each document ends, counted in tokens of all rows laid end to end. A row's end
            is a document's end, so the last one is ``B * T``. Kernels need them before they are launched; on the device
            they would have to be waited for.
    """

    ids_BT: Tensor
    ends_N: Tensor

    @classmethod
    def from_ids(cls, ids_BT: Tensor, device: torch.device | None = None) -> Documents:
        """The documents of ``ids_BT``, an integer tensor ``[B, T]`` on the CPU, for a model on ``device``.

        Raises:
            ValueError: ``ids_BT`` is not ``[B, T]`` of integers on the CPU.
        """
        if ids_BT.ndim != 2 or ids_BT.is_floating_point() or ids_BT.device.type != "cpu":
            raise ValueError(
                f"Documents: ids must be integers [B, T] on the CPU, got {ids_BT.dtype} {tuple(ids_BT.shape)} on "
                f"{ids_BT.device}"
            )
        last_BT = torch.ones_like(ids_BT, dtype=torch.bool)
        last_BT[:, :-1] = ids_BT[:, 1:] != ids_BT[:, :-1]
        # Numbered anew, so that an id that comes again later in a row is another document here too.
        numbers_BT = last_BT.cumsum(1) - last_BT.long()
        if device is not None and device.type not in ("cpu", "meta"):
            numbers_BT = numbers_BT.pin_memory()  # or the host would wait for the device before it copies
        return cls(numbers_BT.to(device, non_blocking=True), last_BT.flatten().nonzero().flatten() + 1)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """bool ``[B, 1, T, T]``: True where position t (rows) may not see position s: later, or another document.

        One tensor for all layers.
        """
        other_BTT = self.ids_BT[:, :, None] != self.ids_BT[:, None, :]
        T = self.ids_BT.shape[1]
        later_TT = torch.ones(T, T, dtype=torch.bool, device=self.ids_BT.device).triu(1)
        return (other_BTT | later_TT)[:, None]
