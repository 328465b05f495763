"""The Python side of one wrapped model: its parameters, its hooks, and its engine."""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan_npu import _C
from torchtitan_npu.fsdp.activation_checkpointing import ActivationCheckpointing, Recomputed, chosen_modules
from torchtitan_npu.fsdp.collective import all_ranks_here
from torchtitan_npu.fsdp.communicator import make_communicator
from torchtitan_npu.fsdp.gradient import GradientPiece, GradientsOfModel
from torchtitan_npu.fsdp.grouping import owners
from torchtitan_npu.fsdp.guard import GuardedForward, Guards, guards_of
from torchtitan_npu.fsdp.initialize import MetaInitializer, ParamInitFn, agree_on_seed, make_ranks_agree
from torchtitan_npu.fsdp.layout import Layout, broadcast_over, common_mesh, groups_of, is_first_of, local_of
from torchtitan_npu.fsdp.mesh import Mesh, as_group
from torchtitan_npu.fsdp.module_call import Around, Call, module_of, restore_call, surround
from torchtitan_npu.fsdp.plan import FSDPPlan
from torchtitan_npu.fsdp.policy import MixedPrecisionPolicy, keeps_dtype
from torchtitan_npu.fsdp.tensors import cast_floating, tensors_in

logger = logging.getLogger(__name__)


_owner: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[FSDPState], int]] = weakref.WeakKeyDictionary()
"""Of every module of a wrapped model: its state, and the innermost unit around it."""


@dataclass(frozen=True)
class InstalledHook:
    """A hook of ours in a module, for copies of the model, which need one of their own in its place."""

    module: nn.Module
    table: str
    """The module's attribute that holds it."""
    key: int
    make: Callable[[FSDPState], Callable[..., Any]]


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

    @property
    def start(self) -> int:
        """My first element, in elements of the flattened parameter (``piece`` counts integers in bytes)."""
        return self.piece.start // (1 if self.sharded.dtype.is_floating_point else self.sharded.dtype.itemsize)

    def in_module(self) -> torch.Tensor:
        """What the module holds while it computes."""
        return self.gathered if self.layout is None else self.layout.expose(self.gathered)

    def is_exposed(self, held: torch.Tensor | None) -> bool:
        """Whether ``held`` is what ``in_module`` has given."""
        if self.layout is None:
            return held is self.gathered
        return isinstance(held, DTensor) and not isinstance(held, nn.Parameter)


class FSDPState:
    """Owns the engine and stands between it and the module tree."""

    def __init__(
        self,
        model: nn.Module,
        plan: FSDPPlan,
        mesh: Mesh,
        policy: MixedPrecisionPolicy,
        *,
        communicator: str,
        device: torch.device,
        param_init_fn: ParamInitFn | None = None,
        init_seed: int | None = None,
        activation_checkpointing: ActivationCheckpointing = False,
    ) -> None:
        unit_modules = [module for unit in plan.module_units[1:] for module in unit.modules]
        self.recomputed = chosen_modules(model, unit_modules, activation_checkpointing)
        self.selective = activation_checkpointing == "selective"
        self.plan = plan
        self.mesh = mesh
        self.ranks = mesh.shard
        self.policy = policy
        self.tensor_mesh = common_mesh([(info.name, info.layout) for info in plan.params], mesh.everyone.ranks)
        if self.tensor_mesh is not None and device.type not in ("cpu", "npu"):
            name = next(info.name for info in plan.params if info.layout is not None)
            raise ValueError(f"not supported yet: DTensor parameters on {device} (parameter '{name}')")
        self.is_first = mesh.everyone.is_first and is_first_of(self.tensor_mesh)
        self.device = device
        self.communicator = communicator
        self.hooks: list[InstalledHook] = []
        self.params: list[ShardedParam] = []
        self.forward_methods: dict[tuple[nn.Module, str], None] = {}
        """What ``register_forward_method`` was called with."""
        self.original_buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        self._slots: list[list[tuple[dict[str, Any], str, int]]] = [[] for _ in plan.module_units]
        self._guards: Guards = [[] for _ in plan.module_units]
        self._model = weakref.ref(model)
        self.whole: dict[str, nn.Parameter] = {}
        """Whole parameters that stand in the modules inside ``full_params``, by name."""
        self._register_owners(model)
        self.gradients = self._new_gradients()
        self._warns_of_float16 = self.is_first and any(
            info.requires_grad and info.param_dtype == torch.float16 for info in plan.params
        )
        self._first_versions: list[int] | None = None
        self._refuse_early_optimizers(model)
        self._check_plans_agree()
        self.engine = self._new_engine()
        self._shard(model, param_init_fn, init_seed)
        self.engine.allocate()  # after the whole parameters are gone: the peak of wrapping is theirs
        self._unlock_buffers(model)
        self._place_buffers(model)
        self._surround_calls()
        self._guards = guards_of(self, model)
        self._expose(-1, False)
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
        # Not in the hash, which is of shapes: what decides the order of gathers, and where they go.
        mine = (self.plan.native.hash(), self.plan.prefetch, self.plan.gather_bytes, self.plan.reduce_bytes)
        hashes = [mine] * everyone.size
        dist.all_gather_object(hashes, mine, group=everyone.group)
        other = next((i for i, value in enumerate(hashes) if value != hashes[0]), None)
        if other is not None:
            raise ValueError(
                f"rank {everyone.ranks[0]} and rank {everyone.ranks[other]} wrap different models or use "
                "different FSDP options (shapes, dtypes, requires_grad, bucket_cap_mb, prefetch, reshard_after_forward "
                "or units differ): build the model alike on all ranks"
            )

    def _shard(self, model: nn.Module, param_init_fn: ParamInitFn | None, init_seed: int | None) -> None:
        holders: dict[str, list[tuple[nn.Module, str]]] = {}
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key in module._parameters:
                holders.setdefault(f"{module_name}.{key}" if module_name else key, []).append((module, key))
        is_meta = any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        initializer = MetaInitializer(model, self._agree_on_seed(init_seed), param_init_fn) if is_meta else None
        if initializer is None:
            make_ranks_agree(
                {name: local_of(t) for name, t in (*model.named_parameters(), *model.named_buffers())},
                self.mesh.everyone,
            )

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
        layout, data = self.plan.params[index].layout, local_of(original)
        if layout is not None and not isinstance(original, DTensor):
            data = layout.local_part(data)  # of a meta model: values are made whole
        param = self._make_param(index, unit, names, original, data.reshape(-1))
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # they run on the piece's gradient from now on
            if getattr(original, hooks):
                setattr(param.sharded, hooks, getattr(original, hooks))
        return param

    def _make_param(
        self, index: int, unit: int, names: tuple[str, ...], like: nn.Parameter, values: torch.Tensor
    ) -> ShardedParam:
        """``values``: 1-D, the whole parameter's or my piece's. ``like``: has its dtype and attributes."""
        piece = self.plan.native.piece(index, self.ranks.index)
        row_aligned = self.plan.native.row_aligned(index)
        info = self.plan.params[index]
        shape, dtype = info.shape, info.master_dtype
        item = 1 if dtype.is_floating_point else dtype.itemsize
        master = self.engine.master(self.plan.native.placement(index).bucket)
        mine = master.narrow(0, piece.shard_offset, piece.numel)
        with torch.no_grad():
            if not dtype.is_floating_point:
                if piece.shard_offset % item or piece.start % item:
                    raise ValueError(f"not supported: integer parameter '{names[0]}' does not align with its bucket")
                mine = mine.view(dtype)
            start, numel = piece.start // item, piece.numel // item
            mine.copy_(values if values.numel() == numel else values[start : start + numel])
            if row_aligned and shape:
                row_numel = shape[1:].numel()
                mine = mine.view(numel // row_numel if row_numel else shape[0], *shape[1:])
            elif row_aligned and numel == 1:
                mine = mine.view(())
            sharded = nn.Parameter(mine, requires_grad=info.requires_grad)
            view = self.engine.gathered_view(index, list(shape), info.param_dtype)
            gathered = nn.Parameter(view, requires_grad=info.requires_grad)
        sharded.__dict__.update(like.__dict__)
        gathered.__dict__.update(like.__dict__)
        self.engine.bind(index, gathered, sharded)
        return ShardedParam(names, shape, unit, piece, row_aligned, sharded, gathered, info.layout)

    def _unlock_buffers(self, model: nn.Module) -> None:
        """Buffers that were made in inference mode can be written by a training forward, like the parameters."""
        made: dict[int, torch.Tensor] = {}
        for module in model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_inference():
                    module._buffers[key] = made.setdefault(id(buffer), buffer.clone())

    def _place_buffers(self, model: nn.Module) -> None:
        dtype = self.policy.buffer_dtype
        for module in model.modules():
            cast = dtype if not keeps_dtype(module) else None
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if buffer.device.type != self.device.type:
                    module._buffers[key] = buffer = buffer.to(self.device)
                if cast is not None and buffer.is_floating_point() and buffer.dtype != cast:
                    self.original_buffer_dtypes[module, key] = buffer.dtype
                    module._buffers[key] = buffer.to(cast)

    def _surround_calls(self) -> None:
        unit_of = {m: i for i, unit in enumerate(self.plan.module_units) if i > 0 for m in unit.modules}
        for module in self.recomputed:  # inside what gathers, so first
            of = unit_of.get(module)
            begins = None if of is None else functools.partial(self.engine.before_recomputation, of)
            surround(module, Recomputed(self.selective, begins))
        for index, unit in enumerate(self.plan.module_units):
            if index == 0:
                continue  # the root's call is wrapped by FSDP.__call__
            for module in unit.modules:
                surround(module, self._unit_call(index, module is unit.modules[-1]))

    def _new_engine(self) -> _C.Engine:
        compute = _C.make_device(self.device)
        communicator = make_communicator(self.mesh, self.communicator, self.device, compute)
        return _C.Engine(
            self.plan.native, self.plan.schedule, communicator, weakref.ref(self), self.device, compute=compute
        )

    def copy(self) -> FSDPState:
        """The same shards under an engine of their own, for a copy of the model that ``attach`` names. Collective."""
        new = FSDPState.__new__(FSDPState)
        new.plan, new.policy, new.device = self.plan, self.policy, self.device
        new.mesh, new.ranks, new.tensor_mesh, new.is_first = self.mesh, self.ranks, self.tensor_mesh, self.is_first
        new.communicator, new.recomputed, new.selective = self.communicator, self.recomputed, self.selective
        new._warns_of_float16, new._first_versions = self._warns_of_float16, None
        new.gradients = self._new_gradients()
        new.hooks, new.forward_methods, new.whole, new.original_buffer_dtypes = [], {}, {}, {}
        new._slots = [[] for _ in self._slots]
        new.engine = new._new_engine()
        new.params = []
        for index, param in enumerate(self.params):
            values = param.sharded.detach().reshape(-1)
            made = new._make_param(index, param.unit, param.names, param.sharded, values)
            made.sharded.requires_grad_(param.sharded.requires_grad)  # which may have been changed since the wrap
            new.params.append(made)
        new.engine.allocate()
        return new

    def attach(self, model: nn.Module, of: FSDPState, memo: dict[int, Any]) -> None:
        """Makes a state that was copied from ``of`` the one of ``model``, deep-copied with ``memo``."""
        self._model = weakref.ref(model)
        units = [replace(u, modules=[memo[id(m)] for m in u.modules]) for u in of.plan.module_units]
        self.plan = replace(self.plan, module_units=tuple(units))
        self._register_owners(model)
        self._slots = [[(memo[id(holder)], key, i) for holder, key, i in slots] for slots in of._slots]
        self.original_buffer_dtypes = {(memo[id(m)], key): d for (m, key), d in of.original_buffer_dtypes.items()}
        self.recomputed = [memo[id(m)] for m in of.recomputed]
        for module in model.modules():
            restore_call(module)  # of the state that was copied
            if isinstance(module.__dict__.get("forward"), GuardedForward):
                del module.__dict__["forward"]
        self._surround_calls()
        self._guards = guards_of(self, model)
        self._expose(-1, False)
        for hook in of.hooks:
            module = memo[id(hook.module)]
            table, made = getattr(module, hook.table), hook.make(self)
            if hasattr(table[hook.key], "with_module"):  # torch's wrapper of a load_state_dict pre-hook
                table[hook.key].hook = made
            else:
                table[hook.key] = made
            self.hooks.append(replace(hook, module=module))

    def _new_gradients(self) -> GradientsOfModel:
        tensor = groups_of(self.tensor_mesh)
        shard, everyone = (() if r.group is None else (r.group,) for r in (self.ranks, self.mesh.everyone))
        return GradientsOfModel((*shard, *tensor), (*everyone, *tensor))

    def copies_of(self, param: ShardedParam) -> int:
        """Tensor-parallel ranks that hold the same elements of ``param``, this one among them."""
        if self.tensor_mesh is None:
            return 1
        return self.tensor_mesh.size() if param.layout is None else param.layout.copies

    def all_here(self, what: str, way_out: str = "") -> None:
        """Returns when all ranks of all replicas, and the tensor-parallel ones, have called it; RuntimeError that names
        ``what`` and missing ranks otherwise.
        """
        all_ranks_here(self.mesh.everyone, what, way_out)
        for group in groups_of(self.tensor_mesh):
            all_ranks_here(as_group(group), what, way_out)

    def _register_owners(self, model: nn.Module) -> None:
        for module, unit in owners(model, self.plan.module_units).items():
            _owner[module] = (weakref.ref(self), unit)

    # ---- running -----------------------------------------------------------------------------------------------------

    def _unit_call(self, unit: int, last_module: bool) -> Around:
        before, after = self._unit_pre_hook(unit), self._unit_post_hook(unit, last_module)

        def around(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            try:
                args, kwargs = before(call, args, kwargs)
                output = call(*args, **kwargs)
            except BaseException:
                # A unit that was called by itself: nothing else would clean up.
                self._quietly(functools.partial(after, None))
                raise
            after(output)
            return output

        return around

    def _unit_pre_hook(self, unit: int) -> Callable[..., Any]:
        engine, cast = self.engine, self.input_dtype()
        known = frozenset(id(module) for module in self.plan.module_units[unit].modules)

        def before(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            module = module_of(call)
            if id(module) not in known:
                raise RuntimeError(
                    f"this {type(module).__name__} is a copy of a part of an FSDP model and holds this rank's pieces "
                    "only: copy the whole model with copy.deepcopy(model), or the part before FSDP(...)"
                )
            engine.before_forward(unit)
            if cast is None:
                return args, kwargs
            return cast_floating(args, cast), cast_floating(kwargs, cast)

        return before

    def _unit_post_hook(self, unit: int, last_module: bool) -> Callable[..., None]:
        engine = self.engine

        def after(output: Any) -> None:
            engine.after_forward(unit, hook_outputs(engine, unit, output), last_module)

        return after

    def input_dtype(self) -> torch.dtype | None:
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None

    def recover(self) -> None:
        """Cleans up after a backward that an exception cut short: autograd does not tell."""
        if self.engine.in_backward and torch._C._current_graph_task_id() == -1:
            self.engine.abort()

    def check_between_steps(self, what: str) -> None:
        """RuntimeError unless the modules hold the sharded parameters and no pass is in progress."""
        self.recover()
        engine = self.engine
        exposed = any(self.params[i].is_exposed(holder.get(key)) for slots in self._slots for holder, key, i in slots)
        backward = engine.in_backward or torch._C._current_graph_task_id() != -1
        if backward or engine.in_forward or exposed:
            raise RuntimeError(
                f"{what} inside {'backward' if backward else 'forward'}: call it before forward or after backward"
            )
        if self.whole:
            raise RuntimeError(f"{what} inside full_params or walk_full_params of the same model: leave it first")
        self._prepare(-1)

    def run_root(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root module's ``__call__``."""
        engine = self.engine
        self.recover()
        recomputed = engine.in_backward  # the whole model, under activation checkpointing
        if not (recomputed or engine.in_forward):
            self._prepare(-1)
        cast = self.input_dtype()
        if cast is not None:
            args, kwargs = cast_floating(args, cast), cast_floating(kwargs, cast)
        try:
            if not recomputed:
                engine.begin_forward()
            engine.before_forward(0)
            output = call(*args, **kwargs)
            if self.policy.output_dtype is not None:
                output = cast_floating(output, self.policy.output_dtype)
            follows = hook_outputs(engine, 0, output)
            if follows and self._warns_of_float16:
                self._check_float16()
            engine.after_forward(0, follows)
            if not recomputed:
                engine.end_forward(follows)
        except BaseException:
            if not recomputed:  # checkpointing ends a recomputation early by an exception, and the backward goes on
                self._quietly(engine.abort)
            raise
        return output

    def _quietly(self, clean_up: Callable[[], None]) -> None:
        try:
            clean_up()
        except RuntimeError as error:  # a dead peer, as a rule; the exception on its way says more
            logger.debug("while cleaning up after an exception: %s", error)

    def _check_float16(self) -> None:
        """At each forward that a backward follows: weights that have changed without a scaler's look at the gradients
        since the first one were trained without.
        """
        versions = [p.sharded._version for p in self.params if p.sharded.numel()]
        if self._first_versions is None or self.gradients.unscaled:
            self._first_versions = versions
            self._warns_of_float16 = not self.gradients.unscaled
        elif versions != self._first_versions:
            self._warns_of_float16 = False
            self._log(
                "the model computes in float16 and was updated without a gradient scaler: small gradients become zero, "
                "and one overflow makes the weights NaN. Make scaler = torchtitan_npu.fsdp.GradScaler(model) and use "
                "it like torch.amp.GradScaler, or use bfloat16 (said once)"
            )

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
        for guards in self._guards if unit < 0 else (self._guards[unit],):
            if gathered:
                for attributes, guard in guards:
                    if attributes.get("forward") is guard:
                        del attributes["forward"]
            else:
                for attributes, guard in guards:
                    attributes.setdefault("forward", guard)

    def _prepare(self, unit: int) -> None:
        """Before a forward of ``unit`` (-1: of the model): takes over what was done to parameters since the last one.

        Raises RuntimeError for what cannot be: never computes with other values than the user sees.
        """
        if self.whole:
            raise RuntimeError("a forward inside full_params(model): leave it first; its parameters are for reading")
        for slots in self._slots if unit < 0 else (self._slots[unit],):
            for holder, key, index in slots:
                if holder.get(key) is not self.params[index].sharded:
                    self._refuse_slot(holder.get(key), self.params[index])
        self.engine.refresh(unit)

    def _refuse_slot(self, found: Any, param: ShardedParam) -> None:
        raise RuntimeError(
            f"parameter '{param.name}' was {'removed' if found is None else 'replaced by another object'} after "
            "FSDP(...): the model would compute with the old values. Write into it instead (with torch.no_grad(): "
            "parameter.copy_(my part), load_state_dict, or full_params(model, writeback=True)), and change the "
            "module (parametrize, weight_norm, tying) before FSDP(...)"
        )

    def _wrap_gradient(self, param: int, gradient: torch.Tensor) -> torch.Tensor:
        """What ``.grad`` of a piece will be; ``gradient`` is a view of the shard of gradients."""
        return GradientPiece.of(gradient, self.gradients, self.copies_of(self.params[param]))

    def _log(self, message: str) -> None:
        logger.warning("rank %d: %s", self.ranks.ranks[self.ranks.index], message)


def hook_outputs(engine: _C.Engine, unit: int, output: Any) -> bool:
    """Tells the engine when backward reaches ``output``; returns whether a backward can follow."""
    if not torch.is_grad_enabled():
        return False
    with_grad = [t for t in tensors_in(output) if t.requires_grad]
    if with_grad:
        engine.hook_outputs(unit, with_grad)
    return bool(with_grad)


def owner_of(module: nn.Module) -> tuple[FSDPState, int]:
    """The state of the wrapped model that ``module`` is part of, and its unit; ValueError for any other."""
    reference, unit = _owner.get(module, (None, 0))
    state = reference() if reference is not None else None
    if state is None:
        raise ValueError(f"{type(module).__name__} is not part of a wrapped model: call model = FSDP(model, ...) first")
    return state, unit


def state_of(model: nn.Module) -> FSDPState:
    """The state of a wrapped model; ValueError for any other."""
    state = model.__dict__.get("_fsdp_state")
    if not isinstance(state, FSDPState):
        raise ValueError(f"{type(model).__name__} is not wrapped: call model = FSDP(model, ...) first")
    return state
