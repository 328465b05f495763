"""``FSDP(model, …)``: the public entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.activation_checkpointing import ActivationCheckpointing
from torchtitan_npu.fsdp.clip import clip_grad_norm
from torchtitan_npu.fsdp.copying import copy_model
from torchtitan_npu.fsdp.grouping import WrapPolicy
from torchtitan_npu.fsdp.initialize import ParamInitFn
from torchtitan_npu.fsdp.mesh import resolve_mesh
from torchtitan_npu.fsdp.plan import DEFAULT_PREFETCH, plan_model
from torchtitan_npu.fsdp.policy import MixedPrecisionPolicy
from torchtitan_npu.fsdp.state import FSDPState, state_of
from torchtitan_npu.fsdp.state_dict import (
    StateDictType,
    full_state_dict,
    install_state_dict_hooks,
    state_dict_type,
    wanted_type,
)


class _WrapOnCall(type):
    """Lets ``FSDP(model, …)`` return the model itself, its class extended by FSDP."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is FSDP:
            return _wrap(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class FSDP(metaclass=_WrapOnCall):
    """Shards a model over ranks: ``model = FSDP(model, bucket_cap_mb=25, …)``.

    Returns the same module, which is used like the original; ``isinstance(model, FSDP)`` holds. Its ``parameters()``
    are this rank's pieces, shape ``(rows, *shape[1:])`` in the original dtype, possibly with 0 rows; after
    ``backward()`` their ``.grad`` is the average over ranks. Names and state-dict keys are the model's own.

    Between steps, parameters are the user's: writes, ``p.data = values``, ``load_state_dict`` (``assign=True`` copies,
    too) and ``requires_grad_()``, alike on all ranks, count from the next forward on; what was frozen at the wrap stays
    frozen. Hooks registered on a parameter, before or after the wrap, get its piece of the averaged gradient. Writing
    between a forward and its backward, replacing a parameter, or casting part of the model raises RuntimeError at the
    next use, which never computes with other values than the user sees. ``copy.deepcopy(model)`` is collective and
    gives a second model with memory of its own. Methods other than forward: ``register_forward_method``; whole
    parameters: ``full_params``.

    Arguments of the call:
        module: the root module. Tensors on the meta device are planned and sharded first and then initialised unit by
            unit on the CPU, so no rank ever holds the whole model; the values are the same for any number of ranks.
        mixed_precision: ``MixedPrecisionPolicy`` or None.
        device_mesh: the ranks that share the model: None (all), an int, a list or 1-D tensor of global ranks, a 1-D
            ``DeviceMesh``. Two dimensions (replicate x shard) are hybrid sharding: each row of ranks holds a sharded
            copy of the model; gradients are averaged over all ranks, and all copies stay equal bit for bit. Parameters
            that are DTensors already (``parallelize_module`` over another dimension of the mesh) are sharded as their
            local tensors; modules see DTensors while they compute.
        reshard_after_forward: free gathered parameters after each forward (True, the default for units) or keep them
            until after backward (False). The root unit is always kept.
        bucket_cap_mb: largest collective in MiB of ``param_dtype`` bytes; a parameter larger than it is a bucket by
            itself; neighbouring small units are merged up to it. None: one bucket per unit. Changes speed and memory,
            never numbers.
        prefetch: units gathered ahead of their use, in forward and in backward: 0 gathers at use; each one more takes
            the memory of the largest unit and hides slower communication. Changes speed and memory, never numbers.
        auto_wrap_policy: predicate over modules that chooses the units. Default: the children of each outermost
        ``nn.ModuleList``.
        param_init_fn: initialises the parameters and buffers that one module holds directly, for meta models; default:
            the module's ``reset_parameters()``.
        init_seed: seed of that initialisation; default: rank 0's ``torch.initial_seed()``.
        device: where the model trains. Default: where its parameters are (the CPU if they are on the meta device).
        communicator: ``"auto"`` (shared memory where all ranks are on one machine, else c10d), ``"shared_memory"`` or
        ``"c10d"``.
        activation_checkpointing: True: recompute each unit in backward instead of keeping its activations;
            ``"selective"``: keep the results of attention and of every second matrix product, recompute the rest; a
            predicate over modules: recompute those it chooses. The same numbers, less memory, more compute.

    Raises ValueError for bad arguments, ``PeerError`` when other ranks do not join.
    """

    @staticmethod
    def state_dict_type(model: nn.Module, kind: StateDictType) -> Any:
        """Context in which ``model.state_dict()`` has the given kind; see ``StateDictType``."""
        return state_dict_type(model, kind)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state = self.__dict__.get("_fsdp_state")
        call = super().__call__  # type: ignore[misc]
        return call(*args, **kwargs) if state is None else state.run_root(call, args, kwargs)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales gradients so that their global norm is at most ``max_norm``; returns the norm before, a 0-d
        tensor, on all ranks. ``torch.nn.utils.clip_grad_norm_(model.parameters(), …)`` does the same, more slowly.
        """
        return clip_grad_norm(_module(self), max_norm, norm_type, error_if_nonfinite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside keep gradients unreduced on each rank (one whole copy of them); the next one
        outside adds them in.
        """
        with state_of(_module(self)).no_sync():
            yield

    def communication_seconds(self) -> float:
        """Time that this rank has spent blocked on other ranks in gathers and reductions since the model was
        wrapped.
        """
        return float(state_of(_module(self)).engine.counters.wait_seconds)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As ``nn.Module.state_dict``; inside ``FSDP.state_dict_type`` of the kind asked for, else sharded (no
        communication).
        """
        sharded = super().state_dict(*args, **kwargs)  # type: ignore[misc]
        if wanted_type(_module(self)) is StateDictType.FULL_STATE_DICT:
            return full_state_dict(_module(self), sharded)
        return sharded

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        # parameters(), zero_grad() and the like: after an exception in backward, modules still hold the gathered ones.
        state = self.__dict__.get("_fsdp_state")
        if state is not None:
            state.recover()
        return super()._named_members(*args, **kwargs)  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        # .to(), .half(), .cuda(), …: where they change no parameter, they do to buffers what they do in torch.
        module = _module(self)
        for param in state_of(module).params:
            with torch.no_grad():
                changed = fn(param.sharded)
            if changed is not param.sharded:
                raise RuntimeError(
                    f"not supported: .to(), .half(), .cuda() and the like after FSDP(...), where they change a "
                    f"parameter ('{param.name}' from {param.sharded.dtype} on {param.sharded.device} to "
                    f"{changed.dtype} on {changed.device}): its memory is the engine's. Cast or move the model before "
                    "FSDP(...), or compute in another dtype with MixedPrecisionPolicy(param_dtype=...)"
                )
        for part in module.modules() if recurse else (module,):
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[key] = fn(buffer)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_model(_module(self), super().__reduce_ex__(4)[2], memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("an FSDP model cannot be pickled: save model.state_dict() or use save_full(model, path)")


def _device_of(module: nn.Module, wanted: torch.device | str | None) -> torch.device:
    """The one device that the wrapped model lives on, with its index."""
    if wanted is None:
        found = {p.device for p in module.parameters() if not p.is_meta} or {torch.device("cpu")}
        if len(found) > 1:
            raise ValueError(
                f"parameters are on several devices ({', '.join(sorted(map(str, found)))}): move the model to one, or "
                "say which with device="
            )
        device = found.pop()
    else:
        device = torch.device(wanted)
    if device.type == "meta":
        raise ValueError("device='meta': a model cannot train there; name the device that it shall train on")
    if device.type != "cpu" and device.index is None:
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != device.type:
            raise ValueError(f"device='{device}': torch finds no such accelerator here")
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return device


def _module(model: Any) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model


def _wrap(
    module: nn.Module,
    *,
    mixed_precision: MixedPrecisionPolicy | None = None,
    device_mesh: Any = None,
    reshard_after_forward: bool | None = None,
    bucket_cap_mb: float | None = None,
    prefetch: int = DEFAULT_PREFETCH,
    auto_wrap_policy: WrapPolicy | None = None,
    param_init_fn: ParamInitFn | None = None,
    init_seed: int | None = None,
    device: torch.device | str | None = None,
    communicator: str = "auto",
    activation_checkpointing: ActivationCheckpointing = False,
) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if any(isinstance(m, FSDP) for m in module.modules()):
        raise ValueError(f"{type(module).__name__} is, or contains, an FSDP model already: wrap the root once")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
        raise ValueError(
            f"mixed_precision must be a MixedPrecisionPolicy or None, got {type(mixed_precision).__name__}"
        )
    policy = mixed_precision or MixedPrecisionPolicy()
    mesh = resolve_mesh(device_mesh)
    plan = plan_model(
        module,
        mesh.shard.size,
        replicas=mesh.replicate.size,
        mixed_precision=policy,
        reshard_after_forward=reshard_after_forward,
        bucket_cap_mb=bucket_cap_mb,
        prefetch=prefetch,
        auto_wrap_policy=auto_wrap_policy,
    )
    with torch.inference_mode(False):  # a model that is built in inference mode can be trained later
        state = FSDPState(
            module,
            plan,
            mesh,
            policy,
            communicator=communicator,
            device=_device_of(module, device),
            param_init_fn=param_init_fn,
            init_seed=init_seed,
            activation_checkpointing=activation_checkpointing,
        )
    install_state_dict_hooks(module, state)
    original = type(module)
    module.__class__ = type(f"FSDP{original.__name__}", (FSDP, original), {"__module__": original.__module__})
    module.__dict__["_fsdp_state"] = state
    return module
