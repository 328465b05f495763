"""Recomputing activations in backward instead of keeping them.

Non-reentrant checkpointing of torch, put around the call of the chosen modules and *inside* what gathers a unit: a
checkpointed unit is gathered once in forward and once in backward, where the gather serves the recomputation and the
backward; and the recomputation starts from inputs that mixed precision has cast already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan_npu import _C
from torchtitan_npu.fsdp.grouping import find_units
from torchtitan_npu.fsdp.module_call import Call, surround

ActivationCheckpointing = bool | Literal["selective"] | Callable[[nn.Module], bool]
"""What ``FSDP(…, activation_checkpointing=…)`` takes.

False: keep all activations. True: keep the inputs of each unit and recompute the rest. ``"selective"``: as True, but
keep what is dear to recompute, see ``SelectivePolicy``. A predicate over modules: recompute the modules that it
chooses, which may be units, lie inside units or contain some.
"""

MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear"})
"""The last two are made of the others, except on NPUs, where they are operators of their own."""

ATTENTIONS = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "torchtitan_npu::flash_attention",
        "npu::npu_fusion_attention",
        "npu::npu_fusion_attention_v2",
    }
)


class SelectivePolicy:
    """Which operators' results one checkpointed call keeps: every attention's and every second matrix product's.

    The choice is torchtitan's. A matrix product or an attention costs more to recompute per byte that it keeps than any
    other operator; with every second product kept, half of their bytes buy half of their time. Counted per call, in the
    order of execution, so that forward and recomputation choose alike.
    """

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # seen in the forward, in the recomputation

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        name = operator.name().partition(".")[0]
        if name in MATRIX_PRODUCTS:
            self._products[context.is_recompute] += 1
            keep = self._products[context.is_recompute] % 2 == 1
        else:
            keep = name in ATTENTIONS
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(SelectivePolicy())


class Recomputed:
    """``run(call, args, kwargs)``: the call, recomputed in backward.

    ``before_recomputation(began, ended)`` is called before each recomputation, with autograd's sequence numbers before
    and after the call in forward: it must make the module's parameters readable.
    """

    def __init__(self, selective: bool, before_recomputation: Callable[[int, int], None] | None = None) -> None:
        self._options: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
        self._before_recomputation = before_recomputation

    def __call__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        if self._options:
            _refuse_compiled(call)
        if kwargs:  # closed over: checkpoint would take some names for its own options
            call = functools.partial(call, **kwargs)
        if self._before_recomputation is not None:
            call = _Twofold(call, self._before_recomputation)
        return checkpoint(call, *args, use_reentrant=False, **self._options)


def _refuse_compiled(call: Call) -> None:
    module: Any = getattr(call, "__self__", None)
    if getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_torchdynamo_orig_callable"):
        raise RuntimeError(
            f"not supported: activation_checkpointing='selective' with a {type(module).__name__} that is compiled by "
            "itself: generated code writes again into the results that are to be kept. Compile the whole model, or use "
            "activation_checkpointing=True"
        )


class _Twofold:
    """A call that does something first in every run but its first one."""

    def __init__(self, call: Call, before_again: Callable[[int, int], None]) -> None:
        self._call = call
        self._before_again = before_again
        self._began = -1
        self._ended = -1

    def __call__(self, *args: Any) -> Any:
        if self._began >= 0:
            self._before_again(self._began, self._ended)
            return self._call(*args)
        self._began = _C.Engine.sequence_number()
        output = self._call(*args)
        self._ended = _C.Engine.sequence_number()
        return output


def recompute_activations(model: nn.Module, option: ActivationCheckpointing) -> None:
    """Does to a model that FSDP does not wrap what ``FSDP(model, activation_checkpointing=option)`` does: in place,
    without new names.
    """
    units = [module for unit in find_units(model, None)[1:] for module in unit.modules] if option is not False else []
    for module in chosen_modules(model, units, option):
        surround(module, Recomputed(selective=option == "selective"))


def chosen_modules(model: nn.Module, units: Iterable[nn.Module], option: ActivationCheckpointing) -> list[nn.Module]:
    """The modules that ``option`` recomputes; ``units``: all modules of units but the root.

    Raises ValueError for a bad option, and for one that would have no effect.
    """
    if option is False:
        return []
    if option is True or option == "selective":
        modules = list(dict.fromkeys(units))
        if not modules:
            raise ValueError(
                f"activation_checkpointing={option!r} recomputes units, and {type(model).__name__} has none but the "
                "root: mark some with fully_shard, or give a predicate over modules"
            )
        return modules
    if not callable(option):
        raise ValueError(
            f"activation_checkpointing must be False, True, 'selective' or a predicate over modules, got {option!r}"
        )
    modules = []
    for name, module in model.named_modules():
        if not option(module):
            continue
        if module is model:
            raise ValueError(
                "activation_checkpointing chose the root module: its recomputation would gather all units at once; "
                "choose modules inside it"
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ValueError(
                f"activation_checkpointing chose '{name}', a container without a forward; choose its items"
            )
        modules.append(module)
    if not modules:
        raise ValueError("activation_checkpointing chose no module")
    return modules
