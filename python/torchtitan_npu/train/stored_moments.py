"""AdamW whose moments are kept in bfloat16, in host memory, or both; the arithmetic stays fp32 on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")
CHUNK_ELEMENTS = {"cpu": 1 << 18}
OTHER_CHUNK_ELEMENTS = 1 << 22
"""Elements updated at a time, 20 bytes each beside the state, whatever a parameter's size: what a core's cache holds,
and on a card enough for its kernels to take longer than their launch."""


class StoredMomentsAdamW(torch.optim.AdamW):
    """torch's AdamW (same update, same names in the state) with the moments stored elsewhere or smaller.

    A step brings the moments of a run of elements to fp32 on the parameter's device, lets torch's kernel update them,
    and stores them again. To bfloat16 they are rounded up or down at random, with the probabilities that keep the mean
    (stochastic rounding): rounding to nearest would never move a second moment whose change per step, 1 - beta2 of
    it, is below bfloat16's half step of 1/512. The random numbers depend on ``seed`` and the step only, so a resumed
    run draws the same ones.

    Args:
        params: as for ``torch.optim.AdamW``; fp32 parameters.
        dtype: of the stored moments, ``torch.float32`` or ``torch.bfloat16``.
        on_host: keep the moments in page-locked host memory instead of on the parameter's device.
        seed: of the rounding.
        fused, lr, betas: as for ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        dtype: torch.dtype,
        on_host: bool,
        seed: int,
        lr: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments are stored as float32 or bfloat16, not {dtype}")
        super().__init__(params, lr=lr, betas=betas, fused=fused, foreach=False if fused else None)
        # The fused kernel could unscale gradients by itself, but here it is called several times a step.
        self._step_supports_amp_scaling = False
        self.moments_dtype, self.on_host, self.seed = dtype, on_host, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """The state of ``parameter`` before the first step."""
        step = torch.zeros((), dtype=torch.float32, device=parameter.device if self.defaults["fused"] else "cpu")
        return {"step": step} | {name: self._stored(torch.zeros_like(parameter)) for name in MOMENTS}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, which makes all state of the parameter's dtype and device: stored again as it should be."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: self._stored(state[name]) for name in MOMENTS})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        index, number = 0, -1
        for group in self.param_groups:
            for parameter in group["params"]:
                index += 1
                if parameter.grad is None:
                    continue
                state = self.state.get(parameter) or self.new_state(parameter)
                self.state[parameter] = state
                if number < 0 and self.moments_dtype != torch.float32:
                    number = int(state["step"])  # once: on a card it waits for the device
                self._update(group, parameter, state, self._generator(parameter.device, number, index))
                state["step"] += 1
        if self.on_host:
            # The stores are asynchronous; a checkpoint reads the moments on the host.
            torch.accelerator.synchronize()
        return loss

    def _update(
        self, group: dict[str, Any], parameter: Tensor, state: dict[str, Tensor], generator: torch.Generator | None
    ) -> None:
        beta1, beta2 = group["betas"]
        for value, gradient, *stored in _chunks(parameter, parameter.grad, *(state[name] for name in MOMENTS)):
            moments = [moment.to(value.device, torch.float32, non_blocking=True) for moment in stored]
            adamw(
                [value],
                [gradient],
                [moments[0]],
                [moments[1]],
                [],
                [state["step"].clone()],
                fused=group["fused"],
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            if generator is not None:
                # 31 bits serve both: one is in both halves.
                noise = torch.empty(value.shape, dtype=torch.int32, device=value.device).random_(generator=generator)
                moments = [round_to_bfloat16(moments[0], noise & 0xFFFF), round_to_bfloat16(moments[1], noise >> 15)]
            for moment, place in zip(moments, stored, strict=True):
                if moment is not place:
                    place.copy_(moment, non_blocking=True)

    def _generator(self, device: torch.device, step: int, index: int) -> torch.Generator | None:
        if self.moments_dtype == torch.float32:
            return None
        generator = self._generators.setdefault(device, torch.Generator(device))
        return generator.manual_seed(((self.seed * 1_000_003 + step) * 1_000_003 + index) & (2**63 - 1))

    def _stored(self, moment: Tensor) -> Tensor:
        if not self.on_host:
            return moment.to(dtype=self.moments_dtype)
        return moment.to("cpu", self.moments_dtype).pin_memory()


def round_to_bfloat16(value: Tensor, noise: Tensor) -> Tensor:
    """``value`` (fp32, finite, contiguous; overwritten) as bfloat16: up or down at random, such that the mean is kept.

    Args:
        value: any shape.
        noise: int32 of that shape, uniform in [0, 65536): added to the lower half of the bits. bfloat16 is the upper
            half, to which it carries over with the probability that is wanted.
    """
    value.view(torch.int32).add_(noise)
    return value.view(torch.bfloat16).view(*value.shape, 2)[..., 1]  # little-endian, as are all hosts and cards here


def _chunks(*tensors: Tensor | None) -> Iterator[tuple[Tensor, ...]]:
    """Aligned runs of elements of tensors of one shape; whole tensors where one is not contiguous."""
    given = [tensor for tensor in tensors if tensor is not None]
    if not all(tensor.is_contiguous() for tensor in given):
        yield tuple(given)
        return
    flat = [tensor.view(-1) for tensor in given]
    size = CHUNK_ELEMENTS.get(flat[0].device.type, OTHER_CHUNK_ELEMENTS)
    for start in range(0, flat[0].numel(), size):
        yield tuple(tensor[start : start + size] for tensor in flat)
