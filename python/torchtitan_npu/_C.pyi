"""Types of the native core, ``csrc/bindings/``. tests/unit/test_package.py compares names and arguments."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import ReferenceType

import torch
from torch.distributed import ProcessGroup, Store

class Error(RuntimeError):
    """A failure inside the native core."""

class PeerError(RuntimeError):
    """Another rank died, failed, did not join in time, or does something else than this one; the message names it."""

# ---- plan.cpp: which parameter lies where ----------------------------------------------------------------------------

class DType:
    """Element type. ``bytes``: a type that is moved but never cast or summed."""

    float32: ClassVar[DType]
    float16: ClassVar[DType]
    bfloat16: ClassVar[DType]
    float64: ClassVar[DType]
    bytes: ClassVar[DType]
    __members__: ClassVar[dict[str, DType]]
    def __init__(self, value: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...
    def __int__(self) -> int: ...
    def __index__(self) -> int: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

class ParamSpec:
    """One parameter, as the planner takes it."""

    def __init__(
        self,
        *,
        name: str,
        rows: int = 1,
        row_numel: int = 1,
        param_dtype: DType = ...,
        master_dtype: DType = ...,
        requires_grad: bool = True,
        granularity: int = 1,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> int:
        """shape[0]; 1 for a scalar."""
    @property
    def row_numel(self) -> int:
        """Product of shape[1:], in bytes for ``DType.bytes``."""
    @property
    def param_dtype(self) -> DType:
        """As gathered."""
    @property
    def master_dtype(self) -> DType:
        """As sharded."""
    @property
    def requires_grad(self) -> bool: ...
    @property
    def granularity(self) -> int:
        """Rows that must stay together."""

class UnitSpec:
    """Parameters, as indices into the list given to ``ShardPlan``, that are gathered and freed together."""

    def __init__(self, *, name: str, params: Sequence[int]) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def params(self) -> list[int]: ...

class Bucket:
    """One collective: ``world_size`` equal shards, rank-major."""

    @property
    def unit(self) -> int: ...
    @property
    def param_dtype(self) -> DType: ...
    @property
    def master_dtype(self) -> DType: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
    @property
    def payload_numel(self) -> int:
        """Elements of its parameters; the rest of the shards is padding."""
    @property
    def params(self) -> list[int]: ...

class Placement:
    """Where a parameter lies, in elements from its bucket's start."""

    @property
    def bucket(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def atom_numel(self) -> int:
        """Shard boundaries inside the parameter fall on multiples of this, counted from its start."""

class Piece:
    """The part of one parameter in one rank's shard."""

    @property
    def start(self) -> int:
        """First element of the flattened parameter."""
    @property
    def numel(self) -> int:
        """May be 0."""
    @property
    def shard_offset(self) -> int:
        """Elements from the shard's start."""

class ShardPlan:
    """Which parameter lies where in which bucket. The lists are made anew at each access."""

    def __init__(
        self,
        *,
        params: Sequence[ParamSpec],
        units: Sequence[UnitSpec],
        world_size: int,
        cap_bytes: int | None = None,
    ) -> None:
        """``cap_bytes``: largest bucket in bytes of ``param_dtype``; None: one bucket per unit and kind.

        Raises ValueError that names the parameter or option at fault.
        """
    @property
    def params(self) -> list[ParamSpec]: ...
    @property
    def units(self) -> list[UnitSpec]: ...
    @property
    def buckets(self) -> list[Bucket]: ...
    @property
    def unit_buckets(self) -> list[list[int]]:
        """Per unit, its buckets."""
    @property
    def world_size(self) -> int: ...
    def placement(self, param: int) -> Placement: ...
    def piece(self, param: int, rank: int) -> Piece: ...
    def pieces(self, rank: int) -> list[Piece]:
        """The rank's piece of every parameter, in parameter order."""
    def row_aligned(self, param: int) -> bool:
        """Whether every piece of the parameter is whole rows."""
    def bucket_numel(self, bucket: int) -> int:
        """Elements of all shards, padding included."""
    def padding_fraction(self) -> float: ...
    def hash(self) -> int:
        """Equal for equal plans, on every machine."""

# ---- host.cpp: the host device, communicators ------------------------------------------------------------------------

class Device:
    """Casts and sums in a device's memory; pointers are addresses, counts are elements."""

    def cast(self, dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int) -> None:
        """``dst[i] = src[i]``, rounded to nearest even."""
    def add(self, dst: int, dst_dtype: DType, src: int, src_dtype: DType, numel: int) -> None:
        """``dst[i] += src[i]``, added in float32 where ``dst`` is a 16-bit type."""
    def sum(
        self,
        dst: int,
        sources: Sequence[int],
        numel: int,
        *,
        wire: DType,
        result: DType,
        round_to: DType,
        divisor: float = 1.0,
        accumulate: bool = False,
    ) -> None:
        """``dst = round((sources[0] + sources[1] + …) / divisor)``, in that order; a source of 0 counts as zeros."""
    def sum_squares(self, src: int, dtype: DType, numel: int) -> float:
        """Formed in float64."""
    def zero(self, dst: int, bytes: int) -> None: ...

class HostDevice(Device):
    """Host memory, with kernels of our own."""

    def __init__(self, isa: str = ...) -> None:
        """With the best kernels of this processor, or those of ``isa``; ValueError if it does not have them."""
    @property
    def isa(self) -> str: ...
    @staticmethod
    def available_isas() -> list[str]:
        """From the plainest to the best."""

NO_GRADIENT: int
"""The ``offset`` of a contribution without any gradient."""

class Communicator:
    """Collectives among ranks; ``csrc/runtime/communicator.h`` says what each call means. Waits raise PeerError."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def needs_fixed_order(self) -> bool: ...
    def allocate(
        self,
        *,
        gather_bytes: int,
        reduce_bytes: int,
        places: int,
        bucket_params: Sequence[int],
        unit_names: Sequence[str],
        gather_reserved_bytes: int = 0,
        reduce_reserved_bytes: int = 0,
    ) -> None: ...
    def place_is_free(self, place: int) -> bool: ...
    def wait_place_free(self, place: int) -> None: ...
    def launch_gather(self, place: int, unit: int, sequence: int, buckets: Sequence[tuple[int, int]]) -> None:
        """``buckets``: (offset, shard_bytes) pairs."""
    def wait_gather(self, place: int, unit: int, sequence: int) -> None: ...
    def release(self, place: int) -> None: ...
    def launch_reduce(
        self, bucket: int, round: int, offset: int, shard_numel: int, wire: DType, reported: Sequence[int]
    ) -> None: ...
    def close_round(self, round: int) -> None: ...
    def reduce_is_ready(self, bucket: int, round: int) -> bool: ...
    def wait_reduce_ready(self, bucket: int, round: int) -> None: ...
    def wait_reduce_ready_or_stuck(self, bucket: int, round: int) -> bool: ...
    def reported_anywhere(self, bucket: int, round: int) -> list[int]: ...
    def my_segment_everywhere(self, bucket: int, round: int) -> list[int]:
        """Addresses in rank order; 0 where a rank has no gradient."""
    def finish_reduce(self, bucket: int, round: int) -> None: ...
    def contribution_is_free(self, bucket: int, round: int) -> bool: ...
    def wait_contribution_free(self, bucket: int, round: int) -> None: ...
    def fail(self, why: str) -> None: ...
    def set_progress(self, progress: Callable[[], None]) -> None: ...

class HostMemory:
    """Bytes shared by the ranks; use as ``memoryview(memory)``."""

    @property
    def address(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class ShmCommunicator(Communicator):
    """Collectives in shared memory among ``size`` processes of one machine.

    ``socket_name`` is a random name that the ranks have agreed in; ``allocate`` connects them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        socket_name: str = "",
        *,
        timeout_seconds: float = 1800.0,
        connect_timeout_seconds: float = 120.0,
        global_ranks: Sequence[int] = ...,
    ) -> None: ...
    @property
    def gather_memory(self) -> HostMemory: ...
    @property
    def reduce_memory(self) -> HostMemory:
        """This rank's."""

def shm_identity() -> str:
    """Equal in two processes that can share memory: same boot, user, process and network namespace."""

# ---- c10d.cpp --------------------------------------------------------------------------------------------------------

class C10dCommunicator(Communicator):
    """Collectives through two torch process groups of the same ranks: gathers and reductions."""

    def __init__(
        self,
        gathers: ProcessGroup,
        reductions: ProcessGroup,
        *,
        device: torch.device,
        timeout_seconds: float,
        global_ranks: Sequence[int] = ...,
        gather_transport: DataTransport | None = None,
        reduction_transport: DataTransport | None = None,
    ) -> None:
        """``device``: where parameters and gradients live. Transports: how data travel, if not through the groups."""

class HybridCommunicator(Communicator):
    """Collectives of a sharded model with replicas.

    ``inner``: inside this rank's replica; ``between``: the group of the ranks that hold the same shard,
    ``global_ranks`` by name; ``board``: a store of this model's own; ``compute``: the engine's device; ``transport``:
    how sums travel, if not through ``between``.
    """

    def __init__(
        self,
        inner: Communicator,
        between: ProcessGroup,
        global_ranks: Sequence[int],
        board: Store,
        *,
        device: torch.device,
        compute: Device,
        timeout_seconds: float,
        transport: DataTransport | None = None,
    ) -> None: ...
    @property
    def replicas(self) -> int: ...

# ---- engine.cpp ------------------------------------------------------------------------------------------------------

class Schedule:
    """How units are used over time: the part of the memory plan that shapes do not give."""

    def __init__(
        self,
        *,
        reshard_after_forward: Sequence[bool],
        nesting: int = 1,
        prefetch: int = 1,
        reduce_dtype: DType | None = None,
        replicas: int = 1,
    ) -> None: ...

class Arena:
    """Sizes of gather, reduce and staging memory, in bytes. Needs no device."""

    def __init__(self, plan: ShardPlan, schedule: Schedule) -> None: ...
    @property
    def gather_bytes(self) -> int: ...
    @property
    def gather_reserved_bytes(self) -> int:
        """Address space; at least ``gather_bytes``."""
    @property
    def reduce_bytes(self) -> int:
        """Per rank."""
    @property
    def reduce_reserved_bytes(self) -> int: ...
    @property
    def staging_bytes(self) -> int:
        """Per rank; 0 with one replica."""
    def wire_dtype(self, bucket: int) -> DType: ...

class EngineCounters:
    """What the engine did since it was made."""

    @property
    def gathers(self) -> int: ...
    @property
    def prefetches(self) -> int:
        """Gathers launched ahead of use."""
    @property
    def order_misses(self) -> int:
        """Units used in another order than in the step before."""
    @property
    def overflow_places(self) -> int:
        """Gathers that did not fit the planned places."""
    @property
    def rounds(self) -> int:
        """Backward passes."""
    @property
    def bytes_written(self) -> int:
        """Gathered bytes that this rank wrote for all."""
    @property
    def wait_seconds(self) -> float:
        """Time blocked on other ranks in gathers and reductions."""

class TorchDevice(Device):
    """Any device that torch knows, through torch's operators, streams and events."""

    def __init__(self, device: torch.device) -> None: ...

def make_device(device: torch.device) -> Device:
    """What computes where a model lives: on host memory, an NPU, or another accelerator."""

class NpuQueue:
    """Submission to an NPU's streams in the order of torch_npu's own operators."""

    def __init__(self, device: torch.device, ordering: str = "auto") -> None:
        """``ordering``: ``"queue"`` (torch_npu's task queue), ``"drain"`` (wait until it is empty, then submit), or
        ``"auto"``: the queue, where this torch_npu has the entry.
        """
    @property
    def ordering(self) -> str: ...

class AclDevice(Device):
    """An Ascend NPU, through aclnn operators. RuntimeError where CANN is missing."""

    def __init__(self, device: torch.device, queue: NpuQueue) -> None: ...

class DataTransport:
    """How the data of collectives travel."""

    @property
    def name(self) -> str: ...

class HcclTransport(DataTransport):
    """Through an HCCL communicator of its own."""

    def __init__(self, group: ProcessGroup, key: str, device: torch.device, queue: NpuQueue) -> None:
        """Collective over ``group``; ``key``: in its store, used for nothing else."""

def explain_acl(code: int) -> str:
    """Name, cause and next step of a status of AscendCL or aclnn."""

def explain_hccl(code: int) -> str:
    """Name, cause and next step of a status of HCCL."""

def missing_from_cann() -> str:
    """What the NPU needs of CANN and is not there, with the places searched; empty if nothing."""

def cann_folders() -> list[str]:
    """Where CANN's libraries are looked for, after the loader's own places."""

class Engine:
    """The FSDP engine of one wrapped model."""

    def __init__(
        self,
        plan: ShardPlan,
        schedule: Schedule,
        communicator: Communicator,
        owner: ReferenceType[Any],
        device: torch.device,
        compute: Device,
    ) -> None:
        """``device``: of all tensors; ``compute``: works there; ``owner``: weak reference to an object with
        ``_expose(unit, gathered)``, ``_prepare(unit)``, ``_wrap_gradient(param, tensor)`` and ``_log(message)``.
        """
    def master(self, bucket: int) -> torch.Tensor:
        """This rank's shard of the bucket: 1-D, ``shard_numel`` elements of the master dtype."""
    def gathered_view(self, param: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The gathered parameter; readable only while its unit is gathered."""
    def bind(self, param: int, gathered: torch.Tensor, sharded: torch.Tensor) -> None: ...
    def allocate(self) -> None:
        """Takes the arena's memory. Collective; once, before the first forward."""
    def begin_forward(self) -> None: ...
    def end_forward(self, backward_follows: bool) -> None: ...
    def before_forward(self, unit: int) -> None: ...
    def after_forward(self, unit: int, backward_follows: bool, last_module: bool = True) -> None: ...
    def refresh(self, unit: int) -> None:
        """Takes over what was done to the sharded leaves of the unit (-1: of all) since the last forward:
        ``requires_grad_()``, ``p.data = …``. Raises Error for what cannot be.
        """
    @staticmethod
    def sequence_number() -> int:
        """Of the next operation that autograd records in this thread."""
    def before_recomputation(self, unit: int, began: int, ended: int) -> None:
        """Only inside a backward pass. Gathers the unit, if it is not, for a call whose first and last + 1 sequence
        numbers in forward are given; it is freed when backward has passed them.
        """
    def hook_outputs(self, unit: int, outputs: Sequence[torch.Tensor]) -> None: ...
    def set_reduce(self, reduce: bool) -> None: ...
    def abort(self) -> None: ...
    def is_gathered(self, unit: int) -> bool: ...
    @property
    def in_forward(self) -> bool:
        """Of the root module."""
    @property
    def in_backward(self) -> bool: ...
    @property
    def counters(self) -> EngineCounters: ...
    @property
    def accumulation_bytes(self) -> int:
        """Gradients kept without reduction (``no_sync``); 0 until the first one."""
    @property
    def buffer_bytes(self) -> int:
        """What the communicator holds for messages beyond the arena: c10d's receive buffers; shared memory: 0."""
    @property
    def communicator_name(self) -> str: ...
