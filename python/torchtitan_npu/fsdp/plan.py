"""From a module tree to a plan: units, buckets and bytes, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from torchtitan_npu import _C
from torchtitan_npu.fsdp.grouping import Unit, WrapPolicy, assign_parameters, find_units, merge_small, nesting_depth
from torchtitan_npu.fsdp.layout import Layout, layout_of, local_of
from torchtitan_npu.fsdp.policy import MixedPrecisionPolicy, keeps_dtype

_MIB = 1024**2

FLOATING = {
    torch.float32: _C.DType.float32,
    torch.float16: _C.DType.float16,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float64: _C.DType.float64,
}

DEFAULT_PREFETCH = 1
"""Hides a gather behind the unit before; each unit more costs the memory of the largest one."""


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of the model, as planned."""

    names: tuple[str, ...]
    """All names (several for tied parameters); the first is the canonical one."""
    shape: torch.Size
    master_dtype: torch.dtype
    param_dtype: torch.dtype
    requires_grad: bool
    layout: Layout | None = None
    """Of a DTensor; ``shape`` is that of its local tensor."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class UnitInfo:
    """One unit of a plan, for people."""

    name: str
    numel: int
    buckets: int
    gathered_bytes: int
    reshards: bool
    """Whether it is freed between its forward and its backward."""


@dataclass(frozen=True)
class FSDPPlan:
    """Who holds what, and how much memory that takes. Bytes are those of the rank that holds most."""

    units: tuple[UnitInfo, ...]
    params: tuple[ParamInfo, ...]
    world_size: int
    """Ranks that shard the model."""
    replicas: int
    """Sharded copies of it that train together."""
    bucket_cap_mb: float | None
    prefetch: int
    """Units gathered ahead of use, in forward and in backward."""
    num_parameters: int
    """Elements of all parameters, tied ones once; of DTensors those of the local tensor."""
    num_buckets: int
    padding_fraction: float
    parameter_bytes: int
    """Sharded master copy."""
    gradient_bytes: int
    """Sharded gradients, in the master dtype."""
    gather_bytes: int
    """Memory for gathered parameters. Ranks of one machine share it."""
    reduce_bytes: int
    """Memory for gradients on their way, per rank."""
    staging_bytes: int
    """Memory for their sums on the way between replicas, per rank; 0 with one replica."""
    accumulation_bytes: int
    """What ``no_sync`` adds from its first use on: a whole copy of the gradients per rank, 4 bytes an element or more.
    """
    native: _C.ShardPlan
    schedule: _C.Schedule
    module_units: tuple[Unit, ...]

    @property
    def whole_parameters(self) -> int:
        """Elements of all parameters over all ranks: those of DTensors whole."""
        return sum(info.numel if info.layout is None else info.layout.whole_shape.numel() for info in self.params)

    @property
    def arena_bytes(self) -> int:
        """Gather, reduce and staging memory together: the peak extra bytes of training."""
        return self.gather_bytes + self.reduce_bytes + self.staging_bytes

    def describe(self) -> str:
        """One log line."""
        cap = "none" if self.bucket_cap_mb is None else f"{self.bucket_cap_mb:g} MiB"
        ranks = f"{self.world_size} ranks" if self.replicas == 1 else f"{self.replicas} x {self.world_size} ranks"
        staging = "" if self.replicas == 1 else f", between replicas {_mib(self.staging_bytes)}"
        whole = self.whole_parameters
        here = "" if whole == self.num_parameters else f" ({self.num_parameters:,} on this tensor-parallel rank)"
        return (
            f"FSDP: {whole:,} parameters{here} in {len(self.units)} units and {self.num_buckets} buckets "
            f"(cap {cap}), prefetch {self.prefetch}, "
            f"{ranks}, padding {100 * self.padding_fraction:.3f} %; per rank "
            f"{_mib(self.parameter_bytes)} "
            f"parameters, {_mib(self.gradient_bytes)} gradients, at most {_mib(self.arena_bytes)} extra while training "
            f"(gathered {_mib(self.gather_bytes)}, reduce {_mib(self.reduce_bytes)}{staging})"
        )


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"


def plan_model(
    model: nn.Module,
    world_size: int,
    *,
    replicas: int = 1,
    mixed_precision: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | None = None,
    bucket_cap_mb: float | None = None,
    prefetch: int = DEFAULT_PREFETCH,
    auto_wrap_policy: WrapPolicy | None = None,
) -> FSDPPlan:
    """Plans how ``FSDP(model, …)`` would shard each of ``replicas`` copies of ``model`` over ``world_size`` ranks.

    Needs no device; meta tensors will do.

    Raises ValueError for a model that cannot be sharded (no parameters, complex ones, …) or a bad option.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if bucket_cap_mb is not None and (isinstance(bucket_cap_mb, bool) or not bucket_cap_mb > 0):
        raise ValueError(f"bucket_cap_mb must be positive or None (one bucket per unit), got {bucket_cap_mb!r}")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise ValueError(f"prefetch must be a whole number of units, 0 (gather at use) or more, got {prefetch!r}")
    policy = mixed_precision or MixedPrecisionPolicy()
    cap_bytes = None if bucket_cap_mb is None else max(1, int(bucket_cap_mb * _MIB))

    units = find_units(model, auto_wrap_policy)
    names = assign_parameters(model, units)
    by_name = dict(model.named_parameters(remove_duplicate=False))
    kept = {id(p) for m in model.modules() if keeps_dtype(m) for p in m.parameters(recurse=False)}
    infos = {
        name: _describe(
            by_name[name], tuple(all_names), MixedPrecisionPolicy() if id(by_name[name]) in kept else policy
        )
        for name, all_names in names.items()
    }
    if not infos:
        raise ValueError(f"{type(model).__name__} has no parameters to shard")

    def gathered_bytes(unit: Unit) -> int:
        return sum(infos[name].numel * infos[name].param_dtype.itemsize for name in unit.parameters)

    units = merge_small(units, gathered_bytes, cap_bytes)
    params = [infos[name] for unit in units for name in unit.parameters]
    position = {info.name: i for i, info in enumerate(params)}
    native = _C.ShardPlan(
        params=[_spec(info) for info in params],
        units=[_C.UnitSpec(name=unit.name, params=[position[name] for name in unit.parameters]) for unit in units],
        world_size=world_size,
        cap_bytes=cap_bytes,
    )
    reshards = [_reshards(unit, i == 0, reshard_after_forward) for i, unit in enumerate(units)]
    schedule = _C.Schedule(
        reshard_after_forward=reshards,
        nesting=nesting_depth(units, reshards),
        prefetch=prefetch,
        reduce_dtype=None if policy.reduce_dtype is None else FLOATING[policy.reduce_dtype],
        replicas=replicas,
    )
    arena = _C.Arena(native, schedule)
    buckets = native.buckets
    shard_bytes = [b.shard_numel * itemsize(b.master_dtype) for b in buckets]
    return FSDPPlan(
        units=tuple(
            UnitInfo(
                unit.name,
                sum(infos[name].numel for name in unit.parameters),
                sum(1 for b in buckets if b.unit == i),
                gathered_bytes(unit),
                reshards[i],
            )
            for i, unit in enumerate(units)
        ),
        params=tuple(params),
        world_size=world_size,
        replicas=replicas,
        bucket_cap_mb=bucket_cap_mb,
        prefetch=prefetch,
        num_parameters=sum(info.numel for info in params),
        num_buckets=len(buckets),
        padding_fraction=native.padding_fraction(),
        parameter_bytes=sum(shard_bytes),
        gradient_bytes=sum(size for size, b in zip(shard_bytes, buckets, strict=True) if b.requires_grad),
        gather_bytes=arena.gather_bytes,
        reduce_bytes=arena.reduce_bytes,
        staging_bytes=arena.staging_bytes,
        accumulation_bytes=sum(
            native.bucket_numel(i) * max(4, itemsize(arena.wire_dtype(i)))
            for i, b in enumerate(buckets)
            if b.requires_grad and b.param_dtype != _C.DType.bytes
        ),
        native=native,
        schedule=schedule,
        module_units=tuple(units),
    )


def _reshards(unit: Unit, is_root: bool, model_wide: bool | None) -> bool:
    if unit.reshard_after_forward is not None:
        return unit.reshard_after_forward
    if is_root:  # its parameters are used first and last, so freeing them between buys nothing
        return False
    return True if model_wide is None else model_wide


def _describe(parameter: nn.Parameter, names: tuple[str, ...], policy: MixedPrecisionPolicy) -> ParamInfo:
    layout = layout_of(names[0], parameter)
    data = local_of(parameter)
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ValueError(f"parameter '{names[0]}' is lazy: run one forward to give it a shape before FSDP(...)")
    if data.layout != torch.strided or data.is_complex():
        raise ValueError(f"not supported: parameter '{names[0]}' has layout {data.layout} and dtype {data.dtype}")
    if data.dtype not in FLOATING and data.is_floating_point():
        raise ValueError(f"not supported: parameter '{names[0]}' has dtype {data.dtype}")
    param_dtype = policy.param_dtype if policy.param_dtype is not None and data.dtype in FLOATING else data.dtype
    return ParamInfo(names, data.shape, data.dtype, param_dtype, parameter.requires_grad, layout)


def _spec(info: ParamInfo) -> _C.ParamSpec:
    rows = info.shape[0] if info.shape else 1
    row_numel = info.shape[1:].numel() if info.shape else 1
    if info.master_dtype not in FLOATING:
        return _C.ParamSpec(
            name=info.name,
            rows=rows,
            row_numel=row_numel * info.master_dtype.itemsize,
            param_dtype=_C.DType.bytes,
            master_dtype=_C.DType.bytes,
            requires_grad=False,
        )
    return _C.ParamSpec(
        name=info.name,
        rows=rows,
        row_numel=row_numel,
        param_dtype=FLOATING[info.param_dtype],
        master_dtype=FLOATING[info.master_dtype],
        requires_grad=info.requires_grad,
    )


def itemsize(dtype: _C.DType) -> int:
    """Bytes of one element."""
    return {_C.DType.float64: 8, _C.DType.float32: 4, _C.DType.bytes: 1}.get(dtype, 2)
