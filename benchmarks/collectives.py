"""All-gather and reduce-scatter of our shared-memory backend against Gloo and against one memcpy of the same bytes.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --sizes 25 --dtypes bf16 --csv collectives.csv --png collectives.png
    python benchmarks/collectives.py --quick           # seconds: does everything run and give the right numbers?

Sizes are those of the whole buffer, all ranks' shards. Every result is compared with the expected one before anything
is timed. The variants take turns in random order in the same processes.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import secrets
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    Reply,
    WorkerGroup,
    add_output_options,
    header,
    init_gloo,
    names,
    positive,
    progress,
    ratio_quartiles,
    require_package,
    require_plotting,
    serve,
    table,
    write_csv,
    write_png,
)

DTYPES = ("fp32", "bf16")
MEMCPY = "memcpy, one process"
# Variant: operation, and the one it is compared with.
VARIANTS: dict[str, tuple[str, str | None]] = {
    MEMCPY: ("memcpy", None),
    "memcpy, all ranks at once": ("memcpy", None),
    "all-gather: Gloo": ("all-gather", None),
    "all-gather: ours": ("all-gather", "all-gather: Gloo"),
    "all-gather: ours, cast from fp32": ("all-gather", "all-gather: Gloo"),
    "reduce-scatter: Gloo": ("reduce-scatter", None),
    "reduce-scatter: ours": ("reduce-scatter", "reduce-scatter: Gloo"),
    "reduce-scatter: ours, sum only": ("reduce-scatter", "reduce-scatter: Gloo"),
}
PLACES = 2  # gathers and reductions alternate between two places, as the engine's do


class Worker:
    """One rank: buffers of one size and dtype at a time, and the operations on them."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch

        from torchtitan_npu import _C

        torch.set_num_threads(1)
        self.rank: int = spec["rank"]
        self.ranks: int = spec["ranks"]
        init_gloo(spec)
        self.largest_bytes = max(spec["sizes"]) << 20
        self.types = {"fp32": _C.DType.float32, "bf16": _C.DType.bfloat16}
        self.device = _C.HostDevice()
        self.shm = _C.ShmCommunicator(self.rank, self.ranks, spec["socket"])
        self.shm.allocate(
            gather_bytes=PLACES * self.largest_bytes,
            reduce_bytes=PLACES * self.largest_bytes,
            places=PLACES,
            bucket_params=[1],
            unit_names=["benchmark"],
        )
        self.gather_memory = self.shm.gather_memory
        self.reduce_memory = self.shm.reduce_memory
        self.sequence = 0
        self.round = 0
        self.operations: dict[str, Callable[[], Any]] = {}

    def prepare(self, mib: int, dtype: str) -> Reply:
        """Fills buffers, runs every variant once and checks what it gives. Replies with the variants there are."""
        import torch
        import torch.distributed as dist

        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        self.wire = self.types[dtype]
        self.itemsize = wire.itemsize
        self.shard_numel = (mib << 20) // self.itemsize // self.ranks // 16 * 16  # whole cache lines
        numel = self.shard_numel * self.ranks
        everyones = [torch.randn(numel, generator=torch.Generator().manual_seed(r)).to(wire) for r in range(self.ranks)]
        mine = slice(self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel)
        self.full = everyones[self.rank]
        self.shard = self.full[mine].clone()
        self.shard_fp32 = self.shard.float()
        self.gathered = torch.empty_like(self.full)
        self.reduced = torch.empty_like(self.shard)
        self.reduced_fp32 = torch.empty(self.shard_numel)
        expected_gather = torch.cat([t[r * self.shard_numel :][: self.shard_numel] for r, t in enumerate(everyones)])
        expected_mean = sum(t[mine].double() for t in everyones) / self.ranks
        assert isinstance(expected_mean, torch.Tensor)
        for slot in range(PLACES):
            self.copy_in(slot)

        self.operations = {
            MEMCPY: self.memcpy if self.rank == 0 else lambda: None,
            "memcpy, all ranks at once": self.memcpy,
            "all-gather: Gloo": lambda: dist.all_gather_into_tensor(self.gathered, self.shard),
            "all-gather: ours": lambda: self.gather(self.shard, self.wire),
            "reduce-scatter: Gloo": lambda: dist.reduce_scatter_tensor(self.reduced, self.full),
            "reduce-scatter: ours": lambda: self.reduce(copy=True),
            "reduce-scatter: ours, sum only": lambda: self.reduce(copy=False),
        }
        if dtype != "fp32":
            fp32 = self.types["fp32"]
            self.operations["all-gather: ours, cast from fp32"] = lambda: self.gather(self.shard_fp32, fp32)

        for name, operation in self.operations.items():
            for _ in range(PLACES):
                self.reduced_fp32.zero_()
                self.gathered.zero_()
                dist.barrier()  # nobody clears or writes what a peer still checks
                operation()
                if name == "all-gather: Gloo":
                    assert torch.equal(self.gathered, expected_gather), name
                elif name.startswith("all-gather: ours"):
                    place = self.sequence % PLACES
                    view = torch.frombuffer(
                        memoryview(self.gather_memory), dtype=wire, count=numel, offset=place * self.largest_bytes
                    )
                    assert torch.equal(view, expected_gather), name
                elif name == "reduce-scatter: Gloo":  # sums in the wire dtype
                    torch.testing.assert_close(
                        self.reduced.double() / self.ranks, expected_mean, rtol=2 * torch.finfo(wire).eps, atol=0.05
                    )
                elif name.startswith("reduce-scatter: ours"):  # sums in float32
                    torch.testing.assert_close(self.reduced_fp32.double(), expected_mean, rtol=1e-6, atol=1e-6)
        dist.barrier()
        return {"variants": list(self.operations)}

    def memcpy(self) -> None:
        ctypes.memmove(self.gathered.data_ptr(), self.full.data_ptr(), self.full.numel() * self.itemsize)

    def gather(self, shard: Any, shard_type: Any) -> None:
        """Own shard into the place, publish, wait until all shards are readable there; release."""
        self.sequence += 1
        place = self.sequence % PLACES
        offset = place * self.largest_bytes
        shard_bytes = self.shard_numel * self.itemsize
        self.shm.wait_place_free(place)
        segment = self.gather_memory.address + offset + self.rank * shard_bytes
        self.device.cast(segment, self.wire, shard.data_ptr(), shard_type, self.shard_numel)
        self.shm.launch_gather(place, 0, self.sequence, [(offset, shard_bytes)])
        self.shm.wait_gather(place, 0, self.sequence)
        self.shm.release(place)

    def copy_in(self, slot: int) -> None:
        """The whole gradient into this rank's reduce memory."""
        target = self.reduce_memory.address + slot * self.largest_bytes
        self.device.cast(target, self.wire, self.full.data_ptr(), self.wire, self.full.numel())

    def reduce(self, copy: bool) -> None:
        """Gradient into reduce memory (unless it is there), publish, wait, mean of own segment over ranks in fp32."""
        self.round += 1
        slot = self.round % PLACES
        if self.round > PLACES:
            self.shm.wait_contribution_free(0, self.round - PLACES)
        if copy:
            self.copy_in(slot)
        self.shm.launch_reduce(0, self.round, slot * self.largest_bytes, self.shard_numel, self.wire, [1])
        self.shm.close_round(self.round)
        self.shm.wait_reduce_ready(0, self.round)
        fp32 = self.types["fp32"]
        self.device.sum(
            self.reduced_fp32.data_ptr(),
            self.shm.my_segment_everywhere(0, self.round),
            self.shard_numel,
            wire=self.wire,
            result=fp32,
            round_to=fp32,
            divisor=self.ranks,
        )
        self.shm.finish_reduce(0, self.round)

    def measure(self, variant: str, repeats: int) -> Reply:
        """Seconds of each of ``repeats`` operations, one after another, after one that is not timed."""
        operation = self.operations[variant]
        operation()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds}


def work(spec: dict[str, Any]) -> None:
    """A worker process."""
    worker = Worker(spec)
    serve({"prepare": worker.prepare, "measure": worker.measure})


def measure(group: WorkerGroup, mib: int, dtype: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants at one size and dtype; one row each."""
    order = random.Random(args.seed)
    variants: list[str] = group.call("prepare", mib=mib, dtype=dtype)[0]["variants"]
    variants.sort(key=list(VARIANTS).index)
    repeats = max(3, min(20, 200 // mib))
    rounds: dict[str, list[list[float]]] = {variant: [] for variant in variants}
    for _ in range(args.rounds):
        for variant in order.sample(variants, len(variants)):
            of_ranks = [reply["seconds"] for reply in group.call("measure", variant=variant, repeats=repeats)]
            if variant == MEMCPY:
                of_ranks = of_ranks[:1]
            rounds[variant].append([statistics.mean(times) for times in zip(*of_ranks, strict=True)])
    medians = {variant: [statistics.median(times) for times in rounds[variant]] for variant in variants}
    rows = []
    for variant in variants:
        times = [seconds for one_round in rounds[variant] for seconds in one_round]
        operation, peer = VARIANTS[variant]
        rows.append(
            {
                "mib": mib,
                "dtype": dtype,
                "operation": operation,
                "variant": variant,
                "median_ms": statistics.median(times) * 1e3,
                "min_ms": min(times) * 1e3,
                "gib_per_s": mib / 1024 / statistics.median(times),
                "speed_to_gloo": ratio_quartiles(medians[peer], medians[variant])[0] if peer else None,
                "speed_to_memcpy": ratio_quartiles(medians[MEMCPY], medians[variant])[0],
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    columns = ["MiB", "dtype", "what", "median ms", "min ms", "GiB/s", "x Gloo", "x memcpy"]
    cells = [
        [str(row["mib"]), row["dtype"], row["variant"], f"{row['median_ms']:.3f}", f"{row['min_ms']:.3f}"]
        + [f"{row['gib_per_s']:.2f}", f"{row['speed_to_gloo']:.1f}" if row["speed_to_gloo"] else ""]
        + [f"{row['speed_to_memcpy']:.2f}"]
        for row in rows
    ]
    return table(columns, cells, left=3)


def plot(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    groups = [(mib, dtype) for mib in args.sizes for dtype in args.dtypes]
    medians = {(row["mib"], row["dtype"], row["variant"]): row["median_ms"] for row in rows}
    write_png(
        path,
        f"Collectives, {args.ranks} ranks on one machine",
        [f"{mib} MiB {dtype}" for mib, dtype in groups],
        {variant: [medians.get((*group, variant)) for group in groups] for variant in VARIANTS},
        "median ms",
        log_scale=True,
    )


def sizes(text: str) -> list[int]:
    """argparse type: comma-separated whole numbers."""
    return [positive(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--sizes", type=sizes, default=None, help="of the whole buffer, MiB (1,25,100; 1 with --quick)")
    parser.add_argument("--dtypes", type=names(DTYPES), default=list(DTYPES), help=",".join(DTYPES))
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument("--rounds", type=positive, default=None, help="turns of every variant (20; 2 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    args = parser.parse_args()
    args.sizes = args.sizes or ([1] if args.quick else [1, 25, 100])
    args.rounds = args.rounds or (2 if args.quick else 20)
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(json.loads(args.worker))
        return
    require_plotting(args.png)
    require_package("")
    print(
        header(
            "Collectives" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"{args.ranks} ranks x 1 thread; {args.rounds} rounds of turns in random order (seed {args.seed}); "
                "results checked before timing",
                "times: mean over ranks; of all calls the median and minimum; x Gloo, x memcpy: how many times as "
                "fast, per round, of them the median",
                "GiB/s: bytes of the whole buffer / median; memcpy copies the whole buffer once, within one process",
                "all-gather, ours: cast or copy of the own shard into shared memory until all can read all shards",
                "reduce-scatter, ours: copy of the whole gradient into shared memory and mean of the own shard in "
                "fp32; 'sum only': without the copy",
                "reduce-scatter, Gloo: reduce_scatter_tensor, sum in the buffer's dtype",
            ],
        ),
        flush=True,
    )
    rows: list[dict[str, Any]] = []
    spec = {"sizes": args.sizes, "socket": f"benchmark-{secrets.token_hex(16)}"}
    with WorkerGroup(Path(__file__), spec, args.ranks, "collectives") as group:
        for mib in args.sizes:
            for dtype in args.dtypes:
                progress(f"{mib} MiB, {dtype}")
                rows += measure(group, mib, dtype, args)
    print("\n" + format_table(rows), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        plot(args.png, rows, args)


if __name__ == "__main__":
    main()
