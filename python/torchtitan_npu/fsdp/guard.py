"""What happens to a module that is called while its parameters are sharded."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torchtitan_npu.fsdp.state import FSDPState


class GuardedForward:
    """Stands for ``module.forward`` while the module holds pieces: computing with them would give numbers of the wrong
    shape, or none at all, or the wrong rows of an embedding. Raises RuntimeError that names module and unit.

    It is looked up by ``nn.Module.__call__`` before hooks gather, so it runs the real forward when it is called with
    other parameters than the pieces. Not there in forward and backward, which it costs nothing.
    """

    def __init__(self, state: FSDPState, module: nn.Module, path: str, key: str, index: int) -> None:
        """``key``, ``index``: one parameter that the module holds directly, and its number in ``state.params``."""
        functools.update_wrapper(self, module.forward)  # its signature
        self._state, self._module, self._path, self._key, self._index = state, module, path, key, index

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, param = self._module, self._state.params[self._index]
        if module._parameters.get(self._key) is param.sharded:
            raise RuntimeError(
                f"'{self._path}' ({type(module).__name__}) was called while its unit "
                f"'{self._state.plan.units[param.unit].name}' is sharded: it holds this rank's pieces only. Call the "
                "unit or the model around it; or let the method that calls it gather the unit, with "
                "register_forward_method(module, name); or call it inside full_params(model)"
            )
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GuardedForward:
        # Of a copy of a part of the model: still pieces of this one's. A copy of the whole model gets its own.
        module = memo.get(id(self._module), self._module)
        return GuardedForward(memo.get(id(self._state), self._state), module, self._path, self._key, self._index)


Guards = list[list[tuple[dict[str, Any], GuardedForward]]]
"""Per unit: the attributes of a module, and what stands there as "forward" while the unit is sharded, unless somebody
else has put a forward there.
"""


def guards_of(state: FSDPState, model: nn.Module) -> Guards:
    """For every module that holds parameters directly."""
    numbers = {name: index for index, param in enumerate(state.params) for name in param.names}
    guards: Guards = [[] for _ in state.plan.units]
    for path, module in model.named_modules():
        # One guard for a module whose parameters lie in several units (tied ones): that of the first.
        for key, parameter in module._parameters.items():
            if parameter is not None:
                index = numbers[f"{path}.{key}" if path else key]
                guard = GuardedForward(state, module, path, key, index)
                guards[state.params[index].unit].append((module.__dict__, guard))
                break
    return guards
