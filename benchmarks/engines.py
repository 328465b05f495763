"""The engines that fsdp_step.py compares, and the process that trains with one of them.

fp32: everything in float32. bf16: `single`, `independent` and `ddp` keep float32 parameters under
torch.autocast(bfloat16), as one uses them; `fsdp1`, `fsdp2` and `ours` compute with bfloat16 parameters, sum gradients
in float32, and step float32 shards.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Reply, init_gloo, serve
from model import Block, Llama, Shape, loss_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

# Engine: number of processes (None: --ranks), and whether they form a process group.
ENGINES: dict[str, tuple[int | None, bool]] = {
    "single": (1, False),
    "independent": (None, False),
    "ddp": (None, True),
    "fsdp1": (None, True),
    "fsdp2": (None, True),
    "ours": (None, True),
}
DTYPES = ("fp32", "bf16")


def wrap(engine: str, model: nn.Module, dtype: str, bucket_cap_mb: float | None, device: str = "cpu") -> nn.Module:
    """The model under ``engine``, one unit per block where the engine has units, torch's defaults otherwise."""
    low = torch.bfloat16 if dtype == "bf16" else None
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)  # they are constants
    if engine == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=torch.float32) if low else None,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    if engine == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for module in [m for m in model.modules() if isinstance(m, Block)]:
            fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if engine == "ours":
        import torchtitan_npu

        ours = torchtitan_npu.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        fsdp: Any = torchtitan_npu.FSDP  # returns the model, not an FSDP
        wrapped: nn.Module = fsdp(model, mixed_precision=ours, bucket_cap_mb=bucket_cap_mb)
        return wrapped
    return model


class PayloadCounter(TorchDispatchMode):
    """Counts, by collective, the bytes one rank must send: (N-1) shards per all-gather, (N-1)/N of the buffer per
    reduce-scatter, twice that per all-reduce. What an implementation sends beyond that is not in it."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.__name__.split(".")[0].strip("_")
            # Gathers are counted by their input (the shard), which follows the output; the others by the whole buffer.
            share = (self.ranks - 1) / self.ranks
            if "allgather" in name:
                self.sent[name] += round((self.ranks - 1) * tensor_bytes(args[1]))
            elif "reduce_scatter" in name:
                self.sent[name] += round(share * tensor_bytes(args[1]))
            elif "allreduce" in name:
                self.sent[name] += round(2 * share * tensor_bytes(args[0]))
            elif "barrier" not in name:
                raise NotImplementedError(f"collective {func}: its payload is not known")
        return func(*args, **(kwargs or {}))


def tensor_bytes(value: Any) -> int:
    """Bytes of a tensor or of nested lists of them."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    return sum(tensor_bytes(item) for item in value)


def reset_peak() -> None:
    """Lets the kernel's peak resident size start anew from the present one."""
    with contextlib.suppress(PermissionError):  # then it is the peak since the process started
        Path("/proc/self/clear_refs").write_text("5")


def peak_resident() -> int:
    """Bytes (VmHWM)."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM:")) << 10


def bytes_written_for_peers(model: Llama, dtype: str, ranks: int) -> int:
    """What `ours` writes into shared memory for its peers per step (computed): its shard of every block for the forward
    and again for the backward pass, of the rest once; and the peers' segments of every gradient, in the wire dtype."""
    everything = sum(p.numel() for p in model.parameters())
    blocks = sum(p.numel() for layer in model.layers for p in layer.parameters())
    wire = 2 if dtype == "bf16" else 4
    return round(wire * ((everything + blocks) / ranks + everything * (ranks - 1) / ranks))


class Worker:
    """One rank: builds the model under its engine, then trains when told to."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.engine: str = spec["engine"]
        self.dtype: str = spec["dtype"]
        self.rank: int = spec["rank"]
        self.ranks: int = spec["ranks"]
        shape = Shape(**spec["shape"])
        if ENGINES[self.engine][1]:
            init_gloo(spec)
        torch.manual_seed(0)
        plain = Llama(shape)
        self.computed_bytes = bytes_written_for_peers(plain, self.dtype, self.ranks) if self.engine == "ours" else 0
        self.model = wrap(self.engine, plain, self.dtype, spec["bucket_cap_mb"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        generator = torch.Generator().manual_seed(1 + self.rank)
        self.tokens_BT = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)
        autocast = self.dtype == "bf16" and self.engine in ("single", "independent", "ddp")
        self.forward_context: Callable[[], contextlib.AbstractContextManager[Any]] = (
            functools.partial(torch.autocast, "cpu", torch.bfloat16) if autocast else contextlib.nullcontext
        )
        self.loss = float("nan")

    def step(self) -> list[float]:
        """One training step. Returns seconds of forward (with loss), backward, optimizer (with zero_grad)."""
        start = time.perf_counter()
        with self.forward_context():
            loss = loss_of(self.model(self.tokens_BT[:, :-1]), self.tokens_BT[:, 1:])
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        end = time.perf_counter()
        self.loss = loss.item()
        return [forward - start, backward - forward, end - backward]

    def steps(self, count: int, warmup: int) -> Reply:
        """``warmup`` untimed steps, then ``count`` timed ones."""
        for _ in range(warmup):
            self.step()
        return {"seconds": [self.step() for _ in range(count)], "loss": self.loss}

    def count_bytes(self) -> Reply:
        """One step in which collectives are counted."""
        with PayloadCounter(self.ranks) as counter:
            self.step()
        return {"collectives": dict(counter.sent), "computed": self.computed_bytes}

    def peak(self, count: int) -> Reply:
        """``count`` steps, and the kernel's peak resident size during them (reset before)."""
        reset_peak()
        for _ in range(count):
            self.step()
        return {"peak_rss_bytes": peak_resident(), "loss": self.loss}


def work(spec: dict[str, Any]) -> None:
    """A worker process: from here on it does what its parent asks."""
    worker = Worker(spec)

    def ready() -> Reply:
        return {}

    serve({"ready": ready, "steps": worker.steps, "count_bytes": worker.count_bytes, "peak": worker.peak})
    if dist.is_initialized():
        dist.destroy_process_group()
