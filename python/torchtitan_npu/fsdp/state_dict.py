"""State dicts of a wrapped model: sharded pieces, whole tensors, or this rank's plain tensors."""

from __future__ import annotations

import enum
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchtitan_npu.fsdp.layout import broadcast_over
from torchtitan_npu.fsdp.piece import Piece
from torchtitan_npu.fsdp.state import FSDPState, InstalledHook, ShardedParam, state_of
from torchtitan_npu.safetensors_file import TensorEntry, write_safetensors

_METADATA_KEY = "torchtitan_npu_shard"


class StateDictType(enum.Enum):
    """What ``model.state_dict()`` holds."""

    FULL_STATE_DICT = enum.auto()
    """Whole tensors on the first rank, an empty dict elsewhere. Collective: all ranks must call it."""
    SHARDED_STATE_DICT = enum.auto()
    """This rank's pieces as ``Piece``, which ``torch.distributed.checkpoint`` saves and loads. No communication.
    The default.
    """
    LOCAL_STATE_DICT = enum.auto()
    """This rank's pieces as plain tensors. Fits only the same model, options and number of ranks."""


@contextmanager
def state_dict_type(model: nn.Module, kind: StateDictType) -> Iterator[None]:
    """Inside, ``model.state_dict()`` has the given kind."""
    if not isinstance(kind, StateDictType):
        raise ValueError(f"state_dict_type needs a StateDictType, got {kind!r}")
    state_of(model)
    before = wanted_type(model)
    model.__dict__["_fsdp_state_dict_type"] = kind
    try:
        yield
    finally:
        model.__dict__["_fsdp_state_dict_type"] = before


def wanted_type(model: nn.Module) -> StateDictType:
    """The kind in force."""
    return model.__dict__.get("_fsdp_state_dict_type", StateDictType.SHARDED_STATE_DICT)


def install_state_dict_hooks(model: nn.Module, state: FSDPState) -> None:
    """Lets ``state_dict`` and ``load_state_dict`` of every module translate between pieces and what they are given."""
    params = {name: index for index, param in enumerate(state.params) for name in param.names}
    for path, module in model.named_modules():
        if not module._parameters and not any(m is module for m, _ in state.original_buffer_dtypes):
            continue
        held = [key for key, parameter in module._parameters.items() if parameter is not None]
        own = {key: params[f"{path}.{key}" if path else key] for key in held}
        saved = module._register_state_dict_hook(_save_hook(state, own))
        loaded = module._register_load_state_dict_pre_hook(_load_hook(state, own), with_module=True)
        state.hooks += [
            InstalledHook(module, "_state_dict_hooks", saved.id, partial(_save_hook, own=own)),
            InstalledHook(module, "_load_state_dict_pre_hooks", loaded.id, partial(_load_hook, own=own)),
        ]


def _save_hook(state: FSDPState, own: dict[str, int]) -> Callable[..., None]:
    """``own``: the parameters that the module holds directly, by key."""

    def saved(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
        local = wanted_type_is_local(state)
        for key, index in own.items():
            param = state.params[index]
            if prefix + key in state_dict and param.name not in state.whole:
                data = param.sharded.detach()
                state_dict[prefix + key] = data if local else piece_of(state, param, data)
                local_metadata.setdefault(_METADATA_KEY, {})[key] = {
                    "rank": state.ranks.index,
                    "world_size": state.ranks.size,
                    "shape": list(param.whole_shape),
                    "start": param.piece.start,
                    "offsets": list(param.offsets),
                }
        for key in module._buffers:
            original = state.original_buffer_dtypes.get((module, key))
            if original is not None and prefix + key in state_dict:
                state_dict[prefix + key] = state_dict[prefix + key].to(original)

    return saved


def _load_hook(state: FSDPState, own: dict[str, int]) -> Callable[..., None]:
    def loaded(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        shard = local_metadata.get(_METADATA_KEY, {})
        assign = local_metadata.get("assign_to_params_buffers", False)
        for key, index in own.items():
            param, value = state.params[index], state_dict.get(prefix + key)
            if value is None or param.name in state.whole:
                continue
            part = local_part(state, param, prefix + key, value, shard.get(key))
            if assign:
                # The shard's memory is the engine's and the optimizer holds the parameter: values are copied, and what
                # is then assigned is the parameter itself.
                with torch.no_grad():
                    param.sharded.copy_(part)
                part = param.sharded
            state_dict[prefix + key] = part
        for key, buffer in module._buffers.items():
            value = state_dict.get(prefix + key)
            if assign and value is not None and (module, key) in state.original_buffer_dtypes:
                assert buffer is not None
                state_dict[prefix + key] = value.to(buffer.dtype)

    return loaded


def piece_of(state: FSDPState, param: ShardedParam, local: torch.Tensor) -> Piece:
    """``local`` (in the layout of ``param.sharded``) as this rank's piece of the whole tensor."""
    ranks = state.ranks
    return Piece(
        local,
        fqn=param.name,
        shape=param.whole_shape,
        start=param.start,
        rank=ranks.index,
        world_size=ranks.size,
        offsets=param.offsets,
        box_shape=param.shape,
    )


def local_part(
    state: FSDPState, param: ShardedParam, key: str, value: Any, shard: dict[str, Any] | None
) -> torch.Tensor:
    """This rank's part of ``value``: a whole tensor, a piece, or a plain tensor with the metadata of a piece.

    Raises ValueError that names the tensor, the shard and the way out.
    """
    way_out = (
        "Save the whole model with save_full(model, path), or save and load through torch.distributed.checkpoint, "
        "which reshards"
    )
    mine = param.sharded
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"state dict entry '{key}' is a {type(value).__name__}, not a tensor")
    if isinstance(value, Piece):
        shard = {
            "rank": value.rank,
            "world_size": value.world_size,
            "shape": list(value.whole_shape),
            "start": value.start,
            "offsets": list(value.offsets),
        }
        value = value.plain()
    whole = value.shape == param.whole_shape
    if shard is not None and (state.ranks.size > 1 or not whole):
        at = shard.get("offsets", [0] * len(param.shape))
        fits = list(param.whole_shape) == shard["shape"] and list(param.offsets) == at
        fits = fits and shard["start"] in (param.start, param.piece.start)
        if not fits or shard["world_size"] != state.ranks.size or value.shape != mine.shape:
            raise ValueError(
                f"'{key}' is shard {shard['rank']} of {shard['world_size']} of a tensor of shape "
                f"{tuple(shard['shape'])}; this is rank "
                f"{state.ranks.index} of {state.ranks.size} and needs its own shard of {tuple(param.whole_shape)}. "
                f"{way_out}"
            )
        return value
    if whole:
        start = param.start
        value = value.detach() if param.layout is None else param.layout.local_part(value.detach())
        return value.reshape(-1)[start : start + mine.numel()].view(mine.shape)
    if value.shape == mine.shape and wanted_type_is_local(state):
        return value
    raise ValueError(
        f"'{key}' has shape {tuple(value.shape)}, but the model's parameter has {tuple(param.whole_shape)}. If it "
        f"is one rank's shard: {way_out}"
    )


def wanted_type_is_local(state: FSDPState) -> bool:
    model = state._model()
    return model is not None and wanted_type(model) is StateDictType.LOCAL_STATE_DICT


def full_state_dict(model: nn.Module, sharded: dict[str, Any]) -> dict[str, Any]:
    """Gathers a sharded state dict tensor by tensor: whole CPU tensors on the first rank, an empty dict on the others.
    Collective.

    Raises RuntimeError within ``TORCHTITAN_NPU_STATE_DICT_TIMEOUT`` (30 s) if some ranks do not take part.
    """
    state = state_of(model)
    state.all_here("a FULL state dict", ", or use the sharded kind of state dict, which needs no communication")
    names = {name for param in state.params for name in param.names}
    full: dict[str, Any] = {}
    done: dict[str, torch.Tensor] = {}
    for key, value in sharded.items():
        if isinstance(value, Piece):
            if value.fqn not in done:
                gathered = gather_piece(state, value)
                done[value.fqn] = gathered if gathered is not None else torch.empty(0)
            value = done[value.fqn]
        if state.is_first:
            is_buffer = isinstance(value, torch.Tensor) and key not in names
            full[key] = value.detach().clone() if is_buffer else value
    return full


def gather_piece(state: FSDPState, piece: Piece) -> torch.Tensor | None:
    """The whole tensor on the first rank of the first replica, None elsewhere. Collective, point to point: memory for
    one tensor. Under tensor parallelism all tensor-parallel ranks of that rank have it.
    """
    param = next(p for p in state.params if p.name == piece.fqn)
    index = state.params.index(param)
    item = 1 if param.sharded.dtype.is_floating_point else param.sharded.dtype.itemsize
    flat = piece.plain().contiguous().reshape(-1)
    if state.mesh.everyone.ranks[0] not in state.ranks.ranks:
        return None  # another replica sends its pieces
    if state.ranks.index != 0:
        if flat.numel():
            dist.send(flat, dst=state.ranks.ranks[0], group=state.ranks.group)
        return None
    # Of a DTensor: its local tensor.
    whole = torch.empty(param.shape, dtype=piece.dtype, device=piece.device)
    out = whole.view(-1)
    for rank in range(state.ranks.size):
        part = state.plan.native.piece(index, rank)
        start, numel = part.start // item, part.numel // item
        if numel == 0:
            continue
        if rank == 0:
            out[start : start + numel].copy_(flat)
        else:
            dist.recv(out[start : start + numel], src=state.ranks.ranks[rank], group=state.ranks.group)
    return (whole if param.layout is None else param.layout.gather(whole)).cpu()


def save_full(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes the whole model to one file: where ``path`` ends in ``.safetensors`` in that format (tied weights stand
    there under each of their names), else one that ``torch.load(weights_only=True)`` reads. Collective.

    Rank 0 writes a temporary file beside it, flushes it to the disk and renames it: the file is either the old one or
    the new one, never half of it. Raises RuntimeError on all ranks if rank 0 cannot write.
    """
    state = state_of(model)
    with state_dict_type(model, StateDictType.FULL_STATE_DICT):
        full = model.state_dict()
    problem = [""]
    everyone = state.mesh.everyone
    if state.is_first:
        target = Path(path)
        temporary = ""
        try:
            with tempfile.NamedTemporaryFile(
                dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", delete=False
            ) as file:
                temporary = file.name
                if target.suffix != ".safetensors":
                    torch.save(full, file)
                    file.flush()
                    os.fsync(file.fileno())
            if target.suffix == ".safetensors":
                _write_safetensors(Path(temporary), full)
            os.replace(temporary, target)
        except (OSError, RuntimeError, ValueError) as error:
            problem[0] = str(error)
            if temporary:
                Path(temporary).unlink(missing_ok=True)
    if everyone.group is not None:
        dist.broadcast_object_list(problem, src=everyone.ranks[0], group=everyone.group)
    broadcast_over(state.tensor_mesh, problem)
    if problem[0]:
        raise RuntimeError(f"cannot write the model to {os.fspath(path)}: {problem[0]}")


def _write_safetensors(path: Path, full: dict[str, Any]) -> None:
    others = [name for name, value in full.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"'{others[0]}' is no tensor (a module's extra state): use a file that torch.load reads")
    entries = [TensorEntry(name, tuple(value.shape), value.dtype) for name, value in full.items()]
    write_safetensors(path, entries, lambda entry: full[entry.name])
