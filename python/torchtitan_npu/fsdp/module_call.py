"""Putting something around the call of a module, without a wrapper module and without hooks.

The module's class is extended, so that names and state-dict keys stay the user's own. Compared with hooks: the user's
own hooks on the module run inside (and so see gathered parameters), a compiled module (``module.compile()``) is
compiled without what is around it, and activation checkpointing can be put around the call too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

Call = Callable[..., Any]
Around = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""``around(call, args, kwargs)`` runs ``call(*args, **kwargs)``, whatever comes before and after, and returns the
output."""

_AROUND = "_fsdp_around"


class SurroundedCall:
    """Mixin of modules whose call has something around it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__[_AROUND](super().__call__, args, kwargs)  # type: ignore[misc]


def _extended(original: type[nn.Module]) -> type[nn.Module]:
    """One class per original class, as long as one of its modules lives: what Dynamo compiled for one block serves the
    others.
    """
    for known in original.__subclasses__():
        if known.__bases__ == (SurroundedCall, original):
            return known
    return type(original.__name__, (SurroundedCall, original), {"__module__": original.__module__})


def surround(module: nn.Module, around: Around) -> None:
    """Puts ``around`` around every call of ``module``, outside of what an earlier ``surround`` has put there."""
    inner: Around | None = module.__dict__.get(_AROUND)
    if inner is None:
        module.__dict__[_AROUND] = around
        # Not module.__class__ = …: a module that torch.compile returned would pass that on to the one inside it.
        object.__setattr__(module, "__class__", _extended(type(module)))
    else:
        module.__dict__[_AROUND] = functools.partial(_nested, around, inner)


def module_of(call: Call) -> nn.Module:
    """The module whose call is passed to an ``around``."""
    while isinstance(call, functools.partial):
        call = call.args[1]  # of _run
    module = call.__self__  # type: ignore[attr-defined]
    assert isinstance(module, nn.Module)
    return module


def restore_call(module: nn.Module) -> None:
    """Takes away what ``surround`` has put around the module's call."""
    if module.__dict__.pop(_AROUND, None) is not None:
        object.__setattr__(module, "__class__", type(module).__mro__[2])


def _nested(outer: Around, inner: Around, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return outer(functools.partial(_run, inner, call), args, kwargs)


def _run(around: Around, call: Call, *args: Any, **kwargs: Any) -> Any:
    return around(call, args, kwargs)
