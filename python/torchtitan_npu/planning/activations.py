"""What a step needs for activations, found by running it on the meta device: shapes and lifetimes, no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan_npu.fsdp import recompute_activations

_TRACED_LAYERS = (2, 3)
"""Enough for the first and the last block to be different ones, and one more, for what each further block adds."""


class LivePeak(TorchDispatchMode):
    """Follows the bytes of the storages that operators make while it is active, by device-independent sizes.

    Attributes:
        live: bytes alive now.
        peak: the most of them at any time.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        """``existing``: tensors whose storages do not count."""
        super().__init__()
        self.live = self.peak = 0
        # A storage's id may be another's after it has died: the reference tells them apart.
        self._known: dict[int, weakref.ref[Any]] = {}
        self._existing = [tensor.untyped_storage() for tensor in existing]
        for storage in self._existing:
            self._known[id(storage)] = weakref.ref(storage)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch would import its compiler here

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def gone(reference: weakref.ref[Any]) -> None:
            self.live -= size
            if self._known.get(key) is reference:
                del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def peak_of_micro_batch(
    build: Callable[[int], nn.Module],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    num_layers: int,
    dtype: torch.dtype,
    activation_checkpointing: bool | Literal["selective"] = False,
) -> int:
    """Most bytes that one forward and backward have at any time beside the parameters, whose gradients go at once.

    At most three layers are run. What one more adds is the same from the second on, since all are alike: to what is
    kept until backward, and to nothing else.

    Args:
        build: from a number of layers to a model on the meta device.
        loss_of: runs it; a scalar.
        num_layers: of the model in question.
        dtype: of the parameters in forward and backward.
    """

    def trace(layers: int) -> int:
        model = build(layers)
        recompute_activations(model, activation_checkpointing)
        return _trace(model, loss_of, dtype)

    if num_layers <= _TRACED_LAYERS[-1]:
        return trace(num_layers)
    fewer, more = map(trace, _TRACED_LAYERS)
    return more + (num_layers - _TRACED_LAYERS[-1]) * (more - fewer)


def _trace(model: nn.Module, loss_of: Callable[[nn.Module], Tensor], dtype: torch.dtype) -> int:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            assert parameter.is_meta
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad))

    def drop(parameter: Tensor) -> None:  # as the engine does, once it has copied it
        parameter.grad = None

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)
    with LivePeak([*model.parameters(), *model.buffers()]) as memory:
        loss_of(model).backward()
    return memory.peak
