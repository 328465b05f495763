"""``FSDP(model, …)``: the public entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torchtitan_npu.fsdp.clip import clip_grad_norm
from torchtitan_npu.fsdp.grouping import WrapPolicy
from torchtitan_npu.fsdp.initialize import ParamInitFn
from torchtitan_npu.fsdp.mesh import resolve_mesh
from torchtitan_npu.fsdp.plan import plan_model
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

    Arguments of the call:
        module: the root module, on the CPU or on the meta device. Meta tensors are planned and sharded first and then
            initialised unit by unit, so no rank ever holds the whole model; the values are the same for any number of
            ranks.
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
        auto_wrap_policy: predicate over modules that chooses the units. Default: the children of each outermost
        ``nn.ModuleList``.
        param_init_fn: initialises the parameters and buffers that one module holds directly, for meta models; default:
            the module's ``reset_parameters()``.
        init_seed: seed of that initialisation; default: rank 0's ``torch.initial_seed()``.
        communicator: ``"auto"`` (shared memory where all ranks are on one machine, else c10d), ``"shared_memory"`` or
        ``"c10d"``.
        activation_checkpointing: only False yet.

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

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scales gradients so that their global norm is at most ``max_norm``; returns the norm before, a 0-d
        tensor, on all ranks.
        """
        return clip_grad_norm(_module(self), max_norm, norm_type)

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
        raise RuntimeError(
            "not supported yet: moving or casting a model after FSDP(...) (.to(), .half(), .cuda(), …): its tensors "
            "are views of shared "
            "buffers. Do it before, or use MixedPrecisionPolicy"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("not supported yet: copy.deepcopy of an FSDP model; copy it before FSDP(...)")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError("an FSDP model cannot be pickled: save model.state_dict() or use save_full(model, path)")


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
    auto_wrap_policy: WrapPolicy | None = None,
    param_init_fn: ParamInitFn | None = None,
    init_seed: int | None = None,
    communicator: str = "auto",
    activation_checkpointing: bool = False,
) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"FSDP wraps an nn.Module, got {type(module).__name__}")
    if any(isinstance(m, FSDP) for m in module.modules()):
        raise ValueError(f"{type(module).__name__} is, or contains, an FSDP model already: wrap the root once")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecisionPolicy):
        raise ValueError(
            f"mixed_precision must be a MixedPrecisionPolicy or None, got {type(mixed_precision).__name__}"
        )
    if activation_checkpointing is not False:
        raise ValueError(
            "not supported yet: activation_checkpointing; wrap the blocks with torch.utils.checkpoint yourself"
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
        auto_wrap_policy=auto_wrap_policy,
    )
    state = FSDPState(
        module,
        plan,
        mesh,
        policy,
        communicator=communicator,
        param_init_fn=param_init_fn,
        init_seed=init_seed,
    )
    install_state_dict_hooks(module, state)
    original = type(module)
    module.__class__ = type(f"FSDP{original.__name__}", (FSDP, original), {"__module__": original.__module__})
    module.__dict__["_fsdp_state"] = state
    return module
