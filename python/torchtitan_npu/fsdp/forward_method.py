"""Methods other than ``forward`` that need gathered parameters."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.state import FSDPState, hook_outputs, owner_of
from torchtitan_npu.fsdp.tensors import cast_floating


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Lets a method be called like the module's forward: ``register_forward_method(model.encoder, "features")``.

    ``module`` is a wrapped model or any module inside one. The method of the root runs like the root's forward, and the
    units that it calls gather themselves. The method of another module gathers the unit that the module lies in while
    it runs, inside and outside of the root's forward, and takes part in backward through the tensors that it returns.
    Inputs are cast as for forward (``MixedPrecisionPolicy.cast_forward_inputs``), outputs of the root's method to
    ``output_dtype``. Registering twice changes nothing. All ranks must call the method in the same order, like forward.

    Raises ValueError for a module that is not in a wrapped model, and for a method that does not exist or returns
    before it has run (a generator, a coroutine): its parameters would be freed before they are read.
    """
    state, unit = owner_of(module)
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module).__name__} has no method '{method_name}'")
    function = inspect.unwrap(getattr(method, "__func__", method))
    if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
        raise ValueError(
            f"{type(module).__name__}.{method_name} is a generator or coroutine: it would run after its parameters are "
            "freed. Register the methods that it calls"
        )
    if (module, method_name) in state.forward_methods:
        return
    state.forward_methods[module, method_name] = None
    wrapped = _root_method(state, method) if module is state._model() else _unit_method(state, unit, module, method)
    module.__dict__[method_name] = functools.wraps(method)(wrapped)


def _root_method(state: FSDPState, method: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return state.run_root(method, args, kwargs)

    return run


def _unit_method(state: FSDPState, unit: int, module: nn.Module, method: Any) -> Any:
    engine = state.engine
    modules = state.plan.module_units[unit].modules
    is_last = module is modules[-1] or not any(module is m for m in modules)
    cast: torch.dtype | None = state.input_dtype()

    def run(*args: Any, **kwargs: Any) -> Any:
        if cast is not None:
            args, kwargs = cast_floating(args, cast), cast_floating(kwargs, cast)
        engine.before_forward(unit)
        follows = False
        try:
            output = method(*args, **kwargs)
            follows = hook_outputs(engine, unit, output)
        finally:
            engine.after_forward(unit, follows, is_last)
        return output

    return run
