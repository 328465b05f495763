"""Whole parameters in the modules, between steps: for reading, exporting, and changing by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_npu.fsdp.layout import local_of
from torchtitan_npu.fsdp.state import FSDPState, ShardedParam, owner_of, state_of


@contextmanager
def full_params(
    model: nn.Module, *, module: nn.Module | None = None, recurse: bool = True, writeback: bool = False
) -> Iterator[None]:
    """Inside, the modules hold whole parameters: the master values, in the master dtype, in memory of their own.

    Collective: all ranks of the model must enter; RuntimeError within ``TORCHTITAN_NPU_STATE_DICT_TIMEOUT`` (30 s)
    where some do not. The memory is that of the whole model in the master dtype, on every rank, unless ``module``
    narrows it; ``walk_full_params`` needs that of one unit at a time. The gathered memory of training is not used: it
    has ``param_dtype``, and ranks of one machine share it, so that one rank's change would reach all of them.

    Arguments:
        module: the part of ``model`` whose parameters become whole; default: all of it.
        recurse: with the parameters of its submodules, or only those that it holds directly.
        writeback: on leaving, each rank takes its part of what the parameters then hold: make the same change on all
            ranks. Without it, and after an exception inside, changes are dropped.

    Parameters that were DTensors are DTensors again, around their whole local tensors.

    ``model.state_dict()`` inside has the whole tensors, and a whole state dict loads. Gradients and the optimizer's
    state stay sharded: ``.grad`` of a whole parameter is None. Forward is refused inside; entering is refused inside
    forward and backward.
    """
    state = state_of(model)
    wanted = _indices_below(state, model if module is None else module, recurse)
    state.check_between_steps("full_params(model)")
    state.all_here("full_params(model)")
    units = sorted({state.params[i].unit for i in wanted})
    try:
        for unit in units:
            _make_whole(state, unit, wanted)
        yield
        if writeback:
            for unit in units:
                _write_back(state, unit)
    finally:
        for unit in units:
            _make_sharded(state, unit)


def walk_full_params(model: nn.Module, *, writeback: bool = False) -> Iterator[tuple[str, dict[str, nn.Parameter]]]:
    """``(unit's name, {name: whole parameter})`` for one unit after the other, as in ``full_params``; the modules of
    that unit hold them until the next one is asked for.

    Collective, and every rank must walk to the end; memory: one unit in the master dtype. A reference that is kept
    keeps the memory. ``writeback``: as in ``full_params``, unit by unit.
    """
    state = state_of(model)
    state.check_between_steps("walk_full_params(model)")
    state.all_here("walk_full_params(model)")
    everything = set(range(len(state.params)))
    for unit, info in enumerate(state.plan.units):
        try:
            _make_whole(state, unit, everything)
            yield info.name, {p.name: state.whole[p.name] for p in state.params if p.unit == unit}
            if writeback:
                _write_back(state, unit)
        finally:
            _make_sharded(state, unit)


def _indices_below(state: FSDPState, module: nn.Module, recurse: bool) -> set[int]:
    if owner_of(module)[0] is not state:
        raise ValueError(f"{type(module).__name__} is part of another FSDP model than the one given")
    holders = {id(m._parameters) for m in (module.modules() if recurse else (module,))}
    return {index for slots in state._slots for holder, _, index in slots if id(holder) in holders}


def _make_whole(state: FSDPState, unit: int, wanted: set[int]) -> None:
    """Puts whole parameters into the slots of the unit. One buffer for each bucket, filled in place."""
    plan = state.plan.native
    made: dict[int, nn.Parameter] = {}
    for bucket_index in plan.unit_buckets[unit]:
        bucket = plan.buckets[bucket_index]
        if wanted.isdisjoint(bucket.params):
            continue
        master = state.engine.master(bucket_index)
        buffer = torch.empty(state.ranks.size * bucket.shard_numel, dtype=master.dtype)
        shards = buffer.view(state.ranks.size, bucket.shard_numel)
        shards[state.ranks.index].copy_(master)
        if state.ranks.group is not None and bucket.shard_numel > 0:
            # Broadcasts fill the buffer in place; gloo's all-gather would make a second one.
            sent = [
                dist.broadcast(shard, src=rank, group=state.ranks.group, async_op=True)
                for rank, shard in zip(state.ranks.ranks, shards, strict=True)
            ]
            for work in sent:
                work.wait()
        for index in bucket.params:
            if index not in wanted:
                continue
            param, placement = state.params[index], plan.placement(index)
            values = buffer[placement.offset : placement.offset + placement.numel]
            values = values.view(param.sharded.dtype).view(param.shape)
            if param.layout is not None:
                values = param.layout.whole_of(values)
            whole = nn.Parameter(values, requires_grad=param.sharded.requires_grad)
            whole.__dict__.update(param.sharded.__dict__)
            made[index] = whole
    for holder, key, index in state._slots[unit]:
        if index in made:
            holder[key] = made[index]
    state.whole.update({state.params[index].name: whole for index, whole in made.items()})


def _write_back(state: FSDPState, unit: int) -> None:
    for holder, key, index in state._slots[unit]:
        param, found = state.params[index], holder.get(key)
        if param.name not in state.whole:
            continue
        if found is None or found.shape != param.whole_shape:
            raise RuntimeError(
                f"parameter '{param.name}' {'is gone' if found is None else f'has shape {tuple(found.shape)}'} at the "
                f"end of full_params(writeback=True), but its shape is {tuple(param.whole_shape)}: change values only"
            )
        with torch.no_grad():
            values = _local_part(param, found)
            start, numel = param.start, param.sharded.numel()
            param.sharded.copy_(values.reshape(-1)[start : start + numel].view(param.sharded.shape))


def _local_part(param: ShardedParam, found: torch.Tensor) -> torch.Tensor:
    """Of a DTensor parameter: its local tensor, in whichever form the whole was put there."""
    if param.layout is None:
        return found.detach()
    if not isinstance(found, DTensor):
        return param.layout.local_part(found.detach())
    if found.device_mesh != param.layout.mesh or tuple(found.placements) != param.layout.placements:
        raise RuntimeError(
            f"parameter '{param.name}' is a DTensor with placements {tuple(found.placements)} over {found.device_mesh} "
            f"at the end of full_params(writeback=True), but it was one with {param.layout.placements} over "
            f"{param.layout.mesh}: change values only"
        )
    return local_of(found)


def _make_sharded(state: FSDPState, unit: int) -> None:
    for holder, key, index in state._slots[unit]:
        if state.params[index].name in state.whole:
            holder[key] = state.params[index].sharded
    for param in state.params:
        if param.unit == unit:
            state.whole.pop(param.name, None)
