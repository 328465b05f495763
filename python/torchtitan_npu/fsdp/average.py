"""Exponential moving average of the parameters, sharded like them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.state import FSDPState, ShardedParam, state_of
from torchtitan_npu.fsdp.state_dict import local_part, piece_of


class MovingAverage:
    """``average = decay * average + (1 - decay) * value`` of every floating-point parameter of a wrapped model.

    Memory per rank: 1/N of the parameters; no communication. The numbers are those of
    ``torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))``, which works too but brings
    a second model with gather and reduce memory of its own. 16-bit parameters are averaged in float32, where small
    steps are not rounded away. Buffers are not averaged: ``averaged()`` uses the model's.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        """The average starts as the present values. ValueError unless 0 <= decay <= 1."""
        if not 0 <= decay <= 1:
            raise ValueError(f"decay must be between 0 and 1, got {decay}")
        self.decay = decay
        self._model = model
        self._params = [p for p in state_of(model).params if p.sharded.dtype.is_floating_point]
        self._averages = [
            p.sharded.detach().to(torch.promote_types(p.sharded.dtype, torch.float32), copy=True) for p in self._params
        ]
        self._swapped_in = False

    @torch.no_grad()
    def update(self) -> None:
        """After ``optimizer.step()``."""
        self._refuse_swapped("update()")
        values = [p.sharded.detach().to(average.dtype) for p, average in zip(self._params, self._averages, strict=True)]
        torch._foreach_lerp_(self._averages, values, 1 - self.decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model has the averages (rounded to its parameters' dtype): to evaluate and to save it. Afterwards
        it has its own values again, bit for bit; the memory is another 1/N of the parameters.
        """
        state = state_of(self._model)
        state.check_between_steps("MovingAverage.averaged()")
        self._refuse_swapped("averaged()")
        with torch.no_grad():
            values = [p.sharded.detach().clone() for p in self._params]
            for param, average in zip(self._params, self._averages, strict=True):
                param.sharded.copy_(average)
        self._swapped_in = True
        try:
            yield
        finally:
            self._swapped_in = False
            with torch.no_grad():
                for param, value in zip(self._params, values, strict=True):
                    param.sharded.copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """``{name: Piece}``, for ``torch.distributed.checkpoint``. Shares memory with the averages."""
        state = state_of(self._model)
        return {p.name: piece_of(state, p, average) for p, average in zip(self._params, self._averages, strict=True)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies pieces of this rank, or whole tensors. ValueError that names what is missing, unknown or misshapen."""
        state = state_of(self._model)
        names = {p.name for p in self._params}
        if names != state_dict.keys():
            raise ValueError(f"averages of other parameters: {', '.join(sorted(names ^ state_dict.keys())[:5])}")
        with torch.no_grad():
            for param, average in zip(self._params, self._averages, strict=True):
                average.copy_(_part(state, param, state_dict[param.name]))

    def _refuse_swapped(self, what: str) -> None:
        if self._swapped_in:
            raise RuntimeError(
                f"MovingAverage.{what} inside averaged(): the model has the averages there; leave it first"
            )


def _part(state: FSDPState, param: ShardedParam, value: Any) -> torch.Tensor:
    return local_part(state, param, param.name, value, None)
