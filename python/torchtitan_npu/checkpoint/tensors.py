"""The tensors of a run by name, as they stand in a checkpoint.

``model.<parameter>`` and ``optimizer.<parameter>.<state>``: flat names, independent of the strategy and the world size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_MODEL = "model."
_OPTIMIZER = "optimizer."


def initialize_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state that it would get at the optimizer's first step.

    For AdamW, SGD, and optimizers with a method ``new_state(parameter)``.

    Memory then does not grow at step 1, and a checkpoint can be loaded into an optimizer that has not stepped.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state.get(parameter):
                state = _new_state(optimizer, group, parameter)
                if state:
                    optimizer.state[parameter] = state


def _new_state(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    if isinstance(optimizer, torch.optim.SGD):
        # Without dampening, zeros become the first gradient, which is what SGD itself starts from.
        assert group["dampening"] == 0
        return {"momentum_buffer": torch.zeros_like(parameter)} if group["momentum"] else {}
    new_state = getattr(optimizer, "new_state", None)
    if new_state is not None:
        return new_state(parameter)
    assert isinstance(optimizer, torch.optim.AdamW), type(optimizer)
    return {
        # The fused kernel reads it on the parameter's device, the others on the CPU.
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def is_optimizer_state(name: str) -> bool:
    """Whether ``name`` in a checkpoint is a tensor of the optimizer's, not the model's."""
    return name.startswith(_OPTIMIZER)


def collect(model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> dict[str, Any]:
    """All tensors of the run, as aliases: loading into them changes the run.

    Args:
        model: the model that names the parameters (under DDP, the wrapped module).
        optimizer: its state must be initialised.
        sharded: the model was wrapped by FSDP; the tensors are then this rank's pieces.
    """
    if sharded:
        from torchtitan_npu.fsdp import optimizer_state_dict

        states = optimizer_state_dict(model, optimizer)["state"]
    else:
        states = {name: optimizer.state.get(parameter, {}) for name, parameter in model.named_parameters()}
    flat: dict[str, Any] = {_MODEL + name: tensor for name, tensor in model.state_dict().items()}
    for name, state in states.items():
        for key, value in state.items():
            flat[f"{_OPTIMIZER}{name}.{key}"] = value
    return flat


def distribute(tensors: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool) -> None:
    """Take back what ``collect`` gave, after a checkpoint has been loaded into it."""
    model.load_state_dict({name[len(_MODEL) :]: t for name, t in tensors.items() if name.startswith(_MODEL)})
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(_OPTIMIZER):
            parameter, _, key = name[len(_OPTIMIZER) :].rpartition(".")
            states.setdefault(parameter, {})[key] = tensor
    if sharded:
        from torchtitan_npu.fsdp import load_optimizer_state_dict, optimizer_state_dict

        # Groups come from the configuration of this run, not from the checkpoint.
        groups = optimizer_state_dict(model, optimizer)["param_groups"]
        load_optimizer_state_dict(model, optimizer, {"state": states, "param_groups": groups})
    # Unsharded states are the optimizer's own tensors, and were loaded in place.
