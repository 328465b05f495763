"""The Python side of one wrapped model: its parameters, its hooks, and its engine."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_npu import _C
from torchtitan_npu.fsdp.communicator import make_communicator
from torchtitan_npu.fsdp.initialize import MetaInitializer, ParamInitFn, agree_on_seed, make_ranks_agree
from torchtitan_npu.fsdp.layout import Layout, broadcast_over, common_mesh, is_first_of, local_of
from torchtitan_npu.fsdp.mesh import Mesh
from torchtitan_npu.fsdp.plan import FSDPPlan
from torchtitan_npu.fsdp.policy import MixedPrecisionPolicy
from torchtitan_npu.fsdp.tensors import cast_floating, tensors_in

logger = logging.getLogger(__name__)


@dataclass
class ShardedParam:
    """One parameter after wrapping."""

    names: tuple[str, ...]
    shape: torch.Size
    """Of the whole parameter; of a DTensor's local tensor."""
    unit: int
    piece: _C.Piece
    """My part: first element and number of elements of the flattened parameter."""
    row_aligned: bool
    """Whether all pieces are whole rows, so that they have shape (rows, *shape[1:]); otherwise they are 1-D."""
    sharded: nn.Parameter
    """My piece, in the master dtype: what the optimizer sees."""
    gathered: nn.Parameter
    """The whole parameter, in param_dtype: what the module computes with."""
    layout: Layout | None = None
    """Of a DTensor."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def whole_shape(self) -> torch.Size:
        """Over all tensor-parallel ranks."""
        return self.shape if self.layout is None else self.layout.whole_shape

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where ``shape`` begins in ``whole_shape``."""
        return (0,) * len(self.shape) if self.layout is None else self.layout.offsets

    def in_module(self) -> torch.Tensor:
        """What the module holds while it computes."""
        return self.gathered if self.layout is None else self.layout.expose(self.gathered)


class FSDPState:
    """Owns the engine and stands between it and the module tree."""

    def __init__(
        self,
        model: nn.Module,
        plan: FSDPPlan,
        mesh: Mesh,
        policy: MixedPrecisionPolicy,
        *,
        communicator: str = "auto",
        param_init_fn: ParamInitFn | None = None,
        init_seed: int | None = None,
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.ranks = mesh.shard
        self.policy = policy
        self.tensor_mesh = common_mesh([(info.name, info.layout) for info in plan.params], mesh.everyone.ranks)
        self.is_first = mesh.everyone.is_first and is_first_of(self.tensor_mesh)
        self.params: list[ShardedParam] = []
        self.original_buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._slots: list[list[tuple[dict[str, Any], str, int]]] = [[] for _ in plan.module_units]
        self._model = weakref.ref(model)
        self._refuse_early_optimizers(model)
        self._check_plans_agree()
        self.engine = _C.Engine(plan.native, plan.schedule, make_communicator(mesh, communicator), weakref.ref(self))
        self._shard(model, param_init_fn, init_seed)
        self._cast_buffers(model)
        self._hook_units()
        if self.is_first:
            logger.info("%s; collectives: %s", plan.describe(), self.engine.communicator_name)

    # ---- building ----------------------------------------------------------------------------------------------------

    def _refuse_early_optimizers(self, model: nn.Module) -> None:
        mine = {id(p) for p in model.parameters()}
        for candidate in gc.get_objects():
            if issubclass(type(candidate), torch.optim.Optimizer):
                held = {id(p) for group in candidate.param_groups for p in group["params"]}
                if held & mine:
                    raise ValueError(
                        f"{type(candidate).__name__} was built from this model's parameters before FSDP(...): it "
                        f"would never see "
                        "the sharded ones. Build it afterwards, from the wrapped model's parameters()"
                    )

    def _check_plans_agree(self) -> None:
        everyone = self.mesh.everyone
        if everyone.group is None:
            return
        mine = self.plan.native.hash()
        hashes: list[int] = [0] * everyone.size
        dist.all_gather_object(hashes, mine, group=everyone.group)
        other = next((i for i, value in enumerate(hashes) if value != hashes[0]), None)
        if other is not None:
            raise ValueError(
                f"rank {everyone.ranks[0]} and rank {everyone.ranks[other]} wrap different models or use "
                f"different FSDP options "
                "(shapes, dtypes, requires_grad, bucket_cap_mb or units differ): build the model alike on all ranks"
            )

    def _shard(self, model: nn.Module, param_init_fn: ParamInitFn | None, init_seed: int | None) -> None:
        holders: dict[str, list[tuple[nn.Module, str]]] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key in module._parameters:
                holders.setdefault(f"{module_name}.{key}" if module_name else key, []).append((module, key))
        is_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        initializer = MetaInitializer(model, self._agree_on_seed(init_seed), param_init_fn) if is_meta else None
        if initializer is None:
            tensors = {name: local_of(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
            make_ranks_agree(tensors, self.mesh.everyone)

        plan_names = {info.name: info.names for info in self.plan.params}
        index = 0
        for unit_index, unit in enumerate(self.plan.module_units):
            if initializer is not None:
                modules = {m: None for name in unit.parameters for alias in plan_names[name] for m, _ in holders[alias]}
                initializer.materialize(modules)
            for name in unit.parameters:
                info = self.plan.params[index]
                module, key = holders[name][0]
                original = module._parameters[key]
                assert original is not None
                param = self._shard_one(index, unit_index, info.names, original)
                self.params.append(param)
                for alias in info.names:
                    for holder, holder_key in holders[alias]:
                        holder._parameters[holder_key] = param.sharded
                        self._slots[unit_index].append((holder._parameters, holder_key, index))
                index += 1
        if initializer is not None:
            initializer.materialize(model.modules())

    def _agree_on_seed(self, init_seed: int | None) -> int:
        seed = [agree_on_seed(init_seed, self.mesh.everyone)]
        broadcast_over(self.tensor_mesh, seed)
        return seed[0]

    def _shard_one(self, index: int, unit: int, names: tuple[str, ...], original: nn.Parameter) -> ShardedParam:
        piece = self.plan.native.piece(index, self.ranks.index)
        row_aligned = self.plan.native.row_aligned(index)
        layout = self.plan.params[index].layout
        data = local_of(original)
        if layout is not None and not isinstance(original, DTensor):
            data = layout.local_part(data)  # of a meta model: values are made whole
        shape = data.shape
        dtype = data.dtype
        item = 1 if dtype.is_floating_point else dtype.itemsize
        master = self.engine.master(self.plan.native.placement(index).bucket)
        mine = master.narrow(0, piece.shard_offset, piece.numel)
        with torch.no_grad():
            if not dtype.is_floating_point:
                if piece.shard_offset % item or piece.start % item:
                    raise ValueError(f"not supported: integer parameter '{names[0]}' does not align with its bucket")
                mine = mine.view(dtype)
            start, numel = piece.start // item, piece.numel // item
            mine.copy_(data.reshape(-1)[start : start + numel])
            if row_aligned and shape:
                row_numel = shape[1:].numel()
                mine = mine.view(numel // row_numel if row_numel else shape[0], *shape[1:])
            elif row_aligned and numel == 1:
                mine = mine.view(())
            sharded = nn.Parameter(mine, requires_grad=original.requires_grad)
            view = self.engine.gathered_view(index, list(shape), self.plan.params[index].param_dtype)
            gathered = nn.Parameter(view, requires_grad=original.requires_grad)
        sharded.__dict__.update(original.__dict__)
        gathered.__dict__.update(original.__dict__)
        self.engine.bind(index, gathered, sharded)
        return ShardedParam(names, shape, unit, piece, row_aligned, sharded, gathered, layout)

    def _cast_buffers(self, model: nn.Module) -> None:
        dtype = self.policy.buffer_dtype
        if dtype is None:
            return
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype:
                    self.original_buffer_dtypes[module, key] = buffer.dtype
                    module._buffers[key] = buffer.to(dtype)

    def _hook_units(self) -> None:
        for index, unit in enumerate(self.plan.module_units):
            if index == 0:
                continue  # the root's call is wrapped by FSDP.__call__
            for module in unit.modules:
                module.register_forward_pre_hook(self._unit_pre_hook(index), prepend=True, with_kwargs=True)
                # Also after an exception, when the unit was called by itself and nothing else would clean up.
                module.register_forward_hook(self._unit_post_hook(index, module is unit.modules[-1]), always_call=True)

    # ---- running -----------------------------------------------------------------------------------------------------

    def _unit_pre_hook(self, unit: int) -> Callable[..., Any]:
        engine, cast = self.engine, self._input_dtype()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            engine.before_forward(unit)
            if cast is None:
                return None
            return cast_floating(args, cast), cast_floating(kwargs, cast)

        return before

    def _unit_post_hook(self, unit: int, last_module: bool) -> Callable[..., None]:
        engine = self.engine

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            engine.after_forward(unit, _hook_outputs(engine, unit, output), last_module)

        return after

    def _input_dtype(self) -> torch.dtype | None:
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None

    def recover(self) -> None:
        """Cleans up after a backward that an exception cut short: autograd does not tell."""
        if self.engine.in_backward and torch._C._current_graph_task_id() == -1:
            self.engine.abort()

    def run_root(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root module's ``__call__``."""
        engine = self.engine
        self.recover()
        recomputed = engine.in_backward  # the whole model, under activation checkpointing
        cast = self._input_dtype()
        if cast is not None:
            args, kwargs = cast_floating(args, cast), cast_floating(kwargs, cast)
        try:
            if not recomputed:
                engine.begin_forward()
            engine.before_forward(0)
            output = call(*args, **kwargs)
            if self.policy.output_dtype is not None:
                output = cast_floating(output, self.policy.output_dtype)
            follows = _hook_outputs(engine, 0, output)
            engine.after_forward(0, follows)
            if not recomputed:
                engine.end_forward(follows)
        except BaseException:
            if not recomputed:  # checkpointing ends a recomputation early by an exception, and the backward goes on
                self._abort_quietly()
            raise
        return output

    def _abort_quietly(self) -> None:
        try:
            self.engine.abort()
        except RuntimeError as error:  # a dead peer, as a rule; the exception on its way says more
            logger.debug("while cleaning up after an exception: %s", error)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.engine.set_reduce(False)
        try:
            yield
        finally:
            self.engine.set_reduce(True)

    # ---- called by the engine ----------------------------------------------------------------------------------------

    def _expose(self, unit: int, gathered: bool) -> None:
        """Lets the modules of ``unit`` (-1: of all units) hold the gathered or the sharded parameters."""
        params = self.params
        for slots in self._slots if unit < 0 else (self._slots[unit],):
            if gathered:
                for holder, key, index in slots:
                    holder[key] = params[index].in_module()
            else:
                for holder, key, index in slots:
                    holder[key] = params[index].sharded

    def _log(self, message: str) -> None:
        logger.warning("rank %d: %s", self.ranks.ranks[self.ranks.index], message)


def _hook_outputs(engine: _C.Engine, unit: int, output: Any) -> bool:
    """Tells the engine when backward reaches ``output``; returns whether a backward can follow."""
    if not torch.is_grad_enabled():
        return False
    with_grad = [t for t in tensors_in(output) if t.requires_grad]
    if with_grad:
        engine.hook_outputs(unit, with_grad)
    return bool(with_grad)


def state_of(model: nn.Module) -> FSDPState:
    """The state of a wrapped model; ValueError for any other."""
    state = model.__dict__.get("_fsdp_state")
    if not isinstance(state, FSDPState):
        raise ValueError(f"{type(model).__name__} is not wrapped: call model = FSDP(model, ...) first")
    return state
