"""Loss scaling for float16: gradients below 6e-8 would be zero in it, and what overflows must not reach the weights."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu.fsdp.state import FSDPState


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a model whose gradients are sharded; used in the same way. It counts the steps that
    it skips, and also serves gradients that the user has put in the place of FSDP's.

    An overflow is a fact of one parameter and so of the ranks that hold a piece of it; here all ranks learn of it in
    ``unscale_`` (or in ``step``, which calls it), so that all skip the same steps and all scales stay equal. All ranks
    must call the methods alike; what is exchanged is one small all-reduce per optimizer and step.
    With clipping: ``scaler.unscale_(optimizer)``, then ``model.clip_grad_norm_(…)``, then ``scaler.step(optimizer)``.

    Arguments:
        model: the FSDP model, before or after wrapping. For any other module the gradients must be the same on all
            ranks already (DistributedDataParallel), and nothing is communicated.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch. With ``enabled=False`` all
            methods pass through.

    Gradients of parameters that are float16 themselves are unscaled too (torch refuses them). Unscaled, their smallest
    values are lost after all: give FSDP a float32 model and ``MixedPrecisionPolicy(param_dtype=torch.float16)``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"GradScaler needs the model whose gradients it scales, got {type(model).__name__}")
        if not init_scale > 0:
            raise ValueError(f"init_scale must be > 0, got {init_scale}")
        if not (growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            raise ValueError(
                "growth_factor must be > 1, backoff_factor between 0 and 1 and growth_interval at least 1, got "
                f"{growth_factor}, {backoff_factor} and {growth_interval}"
            )
        device = next((p.device.type for p in model.parameters() if not p.is_meta), "cpu")
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._model = weakref.ref(model)
        self.skipped_steps = 0
        """Updates since the start of training in which an overflow was found and the optimizer was not run."""

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        state = self._state()
        if state is None:
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        state.gradients.scaler_agrees = True
        try:
            found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        finally:
            state.gradients.scaler_agrees = False
        if not state.gradients.deciding_groups:
            return found
        # Whether there was any gradient at all is agreed on too: a rank may hold no piece of this optimizer's.
        agreed = torch.zeros(2, dtype=torch.float32)
        for value in found.values():
            agreed[0] = torch.maximum(agreed[0], value.cpu())
            agreed[1] = 1
        for group in state.gradients.deciding_groups:
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        return {found_inf.device: agreed[0].to(found_inf.device)} if agreed[1] else {}

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """After ``unscale_(optimizer)``: whether some rank found a gradient that is not finite, so that ``step`` will
        skip. The same on all ranks.
        """
        return self.is_enabled() and any(float(f) > 0 for f in self._found_inf_per_device(optimizer).values())

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """As in torch; counts ``skipped_steps``."""
        if self.is_enabled():
            found = [f for s in self._per_optimizer_states.values() for f in s["found_inf_per_device"].values()]
            self.skipped_steps += int(any(float(f) > 0 for f in found))
        super().update(new_scale)

    def state_dict(self) -> dict[str, Any]:
        """torch's, and ``skipped_steps``."""
        state = super().state_dict()
        return state | {"skipped_steps": self.skipped_steps} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also takes torch's own, which counts no skipped steps."""
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self.skipped_steps = int(state_dict.get("skipped_steps", 0))

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError("a GradScaler belongs to its model and cannot be pickled: save scaler.state_dict()")

    def _state(self) -> FSDPState | None:
        model = self._model()
        if model is None:
            raise RuntimeError("the model of this GradScaler is gone: make a new one for the model that is trained")
        state = model.__dict__.get("_fsdp_state")
        return state if isinstance(state, FSDPState) else None
