"""Memory of training, predicted and measured, and bytes sent: ours and FSDP2, with and without gradient accumulation.

    python benchmarks/memory.py
    python benchmarks/memory.py --ranks 2,4 --dtype bf16 --csv memory.csv --png memory.png
    python benchmarks/memory.py --quick                # seconds: does everything run and add up?

Modes: `one` micro-batch per step; two micro-batches, reduced after `each`; two, of which the first is accumulated under
`no_sync`. Every engine and mode has processes of its own. The model has large parameters and few tokens, so that
activations are small against what is compared.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
from dataclasses import asdict
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
    require_package,
    require_plotting,
    serve,
    table,
    write_csv,
    write_png,
)
from engines import DTYPES, PayloadCounter, peak_resident, reset_peak, wrap
from model import Llama, Shape, loss_of

MODES = ("one", "each", "no_sync")
ENGINES = ("ours", "fsdp2")
SHAPE = {"dim": 768, "layers": 6, "heads": 8, "ffn": 2048, "vocab": 2048, "seq": 16, "batch": 1}
QUICK = {"dim": 256, "layers": 2, "heads": 4, "ffn": 512, "vocab": 512, "seq": 16, "batch": 1}
MIB = 1024**2


class Worker:
    """One rank of one engine and mode."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch

        torch.set_num_threads(1)
        init_gloo(spec)
        self.spec = spec
        self.micro_batches = 1 if spec["mode"] == "one" else 2

    def warm(self) -> Reply:
        """Trains one layer of the model and drops it: what libraries keep as scratch memory is in the baseline."""
        self.build({**self.spec["shape"], "layers": 1})
        for _ in range(2):
            self.step()
        del self.model, self.optimizer, self.tokens_BT
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        reset_peak()
        return {"rss": peak_resident()}

    def build(self, shape: dict[str, int]) -> Reply:
        import torch

        sizes = Shape(**shape)
        torch.manual_seed(0)
        self.model: Any = wrap(self.spec["engine"], Llama(sizes), self.spec["dtype"], self.spec["bucket_cap_mb"])
        # fused: no temporary copies of the shards
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        generator = torch.Generator().manual_seed(1 + self.spec["rank"])
        self.tokens_BT = torch.randint(sizes.vocab, (sizes.batch, sizes.seq + 1), generator=generator)
        return {}

    def step(self) -> None:
        for number in range(self.micro_batches):
            with self.synchronizing(number == self.micro_batches - 1):
                loss_of(self.model(self.tokens_BT[:, :-1]), self.tokens_BT[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronizing(self, last: bool) -> Any:
        """What a micro-batch runs under: no_sync for all but the last in that mode."""
        if self.spec["mode"] != "no_sync":
            return contextlib.nullcontext()
        if self.spec["engine"] == "ours":
            return contextlib.nullcontext() if last else self.model.no_sync()
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def steps(self, count: int) -> Reply:
        for _ in range(count):
            self.step()
        return {"rss": peak_resident()}

    def account(self) -> Reply:
        """Bytes that a step sends, and what tensors and arena hold right now."""
        reply: Reply = {}
        with PayloadCounter(self.spec["ranks"]) as counter:
            self.step()
        reply["sent"] = sum(counter.sent.values())
        states = self.optimizer.state.values()
        moments = [local(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        reply["optimizer"] = sum(t.numel() * t.element_size() for t in moments)
        if self.spec["engine"] == "ours":
            reply |= self.account_of_ours()
        return reply

    def account_of_ours(self) -> Reply:
        from torchtitan_npu.planning.traffic import planned_traffic

        state = self.model._fsdp_state
        plan, engine = state.plan, state.engine
        written = engine.counters.bytes_written
        self.micro_step_without_optimizer()
        gradients = {
            p.grad.untyped_storage().data_ptr(): p.grad.untyped_storage().nbytes() for p in self.model.parameters()
        }
        measured = {
            "shards": sum(engine.master(b).nbytes for b in range(plan.num_buckets)),
            "gradients": sum(gradients.values()),
            "accumulation": engine.accumulation_bytes,
            "written": engine.counters.bytes_written - written,
        }
        traffic = planned_traffic(plan, self.micro_batches, reduce_each=self.spec["mode"] != "no_sync")
        planned = {
            "shards": plan.parameter_bytes,
            "gradients": plan.gradient_bytes,
            "accumulation": plan.accumulation_bytes if self.spec["mode"] == "no_sync" else 0,
            "written": traffic.written_bytes,
        }
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "planned": planned | {"gather": plan.gather_bytes, "reduce": plan.reduce_bytes},
            "measured": measured,
            "arena_resident": arena_resident(),
            "sent": traffic.sent_bytes,
            "buffers": engine.buffer_bytes,
            "communicator": engine.communicator_name,
            "largest": max(info.numel * info.param_dtype.itemsize for info in plan.params),
        }

    def micro_step_without_optimizer(self) -> None:
        """Forward and backward of a whole step; gradients stay."""
        for number in range(self.micro_batches):
            with self.synchronizing(number == self.micro_batches - 1):
                loss_of(self.model(self.tokens_BT[:, :-1]), self.tokens_BT[:, 1:]).backward()


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; other tensors as they are."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def arena_resident() -> tuple[int, int]:
    """Rss and Pss of shared arenas in this process: bytes that it touched, and these divided among those who did."""
    rss, pss, inside = 0, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split(" ", 1)[0].endswith(":"):  # the first line of a mapping
            inside = "/memfd:torchtitan_npu" in line
        elif inside and line.startswith("Rss:"):
            rss += int(line.split()[1]) << 10
        elif inside and line.startswith("Pss:"):
            pss += int(line.split()[1]) << 10
    return rss, pss


def work(spec: dict[str, Any]) -> None:
    """A worker process."""
    worker = Worker(spec)
    shape = spec["shape"]
    serve(
        {
            "warm": worker.warm,
            "build": lambda: worker.build(shape),
            "steps": worker.steps,
            "account": worker.account,
        }
    )


def measure(engine: str, mode: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    spec = {"engine": engine, "mode": mode, "dtype": args.dtype, "shape": asdict(args.shape)}
    spec["bucket_cap_mb"] = args.bucket_cap_mb
    with WorkerGroup(Path(__file__), spec, ranks, f"{engine} {mode} x {ranks}") as group:
        before = [reply["rss"] for reply in group.call("warm")]
        group.call("build")
        after = [reply["rss"] for reply in group.call("steps", count=args.steps)]
        accounts = group.call("account")
    grown = [rss - start for rss, start in zip(after, before, strict=True)]
    shared_twice = [rss - pss for rss, pss in (account.get("arena_resident", (0, 0)) for account in accounts)]
    account = accounts[0]
    row: dict[str, Any] = {
        "ranks": ranks,
        "dtype": args.dtype,
        "engine": engine,
        "mode": mode,
        "sent_bytes": max(other["sent"] for other in accounts),
        "optimizer_bytes": round(statistics.mean(other["optimizer"] for other in accounts)),
        "peak_bytes": round(statistics.mean(a - b for a, b in zip(grown, shared_twice, strict=True))),
        "rss_growth_bytes": max(grown),
    }
    kinds = ("shards", "gradients", "gather", "reduce", "accumulation")
    row |= {f"{kind}_bytes": None for kind in kinds}
    row |= {"arena_resident_bytes": None, "buffer_bytes": None, "in_flight_bytes": None, "predicted_bytes": None}
    if engine == "ours":
        planned = account["planned"]
        for other in accounts:
            for kind, value in other["measured"].items():
                expected = other["planned"][kind]
                if value != expected:
                    raise SystemExit(f"{engine} {mode}: {kind} are {value} bytes, and {expected} were planned")
        row |= {f"{kind}_bytes": planned[kind] for kind in kinds}
        shared = account["communicator"] == "shared memory"
        row["arena_resident_bytes"] = sum(o["arena_resident"][1] for o in accounts) // ranks if shared else None
        row["buffer_bytes"] = account["buffers"]
        row["in_flight_bytes"] = account["largest"]
        gather = planned["gather"] // ranks if shared else planned["gather"]
        row["predicted_bytes"] = (
            planned["shards"]
            + planned["gradients"]
            + row["optimizer_bytes"]
            + gather
            + planned["reduce"]
            + planned["accumulation"]
            + account["buffers"]
            + account["largest"]
        )
    return row


def format_table(rows: list[dict[str, Any]]) -> str:
    columns = ["ranks", "engine", "mode", "sent MB", "shards", "gradients", "AdamW", "gather", "reduce", "no_sync"]
    columns += ["in flight", "predicted", "measured", "difference", "RSS growth", "/ fsdp2"]

    def mib(value: int | None) -> str:
        return "-" if value is None else f"{value / MIB:.1f}"

    peers = {(row["ranks"], row["mode"]): row["peak_bytes"] for row in rows if row["engine"] == "fsdp2"}
    cells = []
    for row in rows:
        predicted, measured = row["predicted_bytes"], row["peak_bytes"]
        peer = peers.get((row["ranks"], row["mode"]))
        kinds = ("shards", "gradients", "optimizer", "gather", "reduce", "accumulation", "in_flight", "predicted")
        cells.append(
            [str(row["ranks"]), row["engine"], row["mode"], f"{row['sent_bytes'] / 1e6:.1f}"]
            + [mib(row[f"{kind}_bytes"]) for kind in kinds]
            + [mib(measured), f"{100 * (measured / predicted - 1):+.1f} %" if predicted else "-"]
            + [mib(row["rss_growth_bytes"]), f"{measured / peer:.2f}" if peer else "-"]
        )
    return table(columns, cells, left=0)


def plot(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    groups = [(ranks, mode) for ranks in args.ranks for mode in args.modes]
    found = {(row["ranks"], row["mode"], row["engine"]): row for row in rows}

    def series(engine: str, key: str) -> list[float | None]:
        chosen = [found.get((*group, engine)) for group in groups]
        return [row[key] / MIB if row and row[key] else None for row in chosen]

    lines = {f"{engine}, measured": series(engine, "peak_bytes") for engine in args.engines}
    if "ours" in args.engines:
        lines["ours, predicted"] = series("ours", "predicted_bytes")
    write_png(
        path,
        f"Memory of training beyond the program, {args.dtype}, {args.shape.parameters / 1e6:.1f} M parameters",
        [f"{ranks} ranks, {mode}" for ranks, mode in groups],
        lines,
        "MiB per rank",
    )


def counts(text: str) -> list[int]:
    """argparse type: comma-separated whole numbers."""
    return [positive(part) for part in text.split(",")]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--engines", type=names(ENGINES), default=list(ENGINES), help=",".join(ENGINES))
    parser.add_argument(
        "--modes", type=names(MODES), default=None, help=f"{','.join(MODES)} (all; no_sync with --quick)"
    )
    parser.add_argument("--ranks", type=counts, default=None, help="numbers of processes (2,4; 2 with --quick)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="(fp32)")
    parser.add_argument("--steps", type=positive, default=None, help="of each (4; 2 with --quick)")
    parser.add_argument("--bucket_cap_mb", type=float, default=None, help="largest bucket of `ours`, MiB (none)")
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=positive, help=f"({value}; {QUICK[name]} with --quick)")
    args = parser.parse_args()
    chosen = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    try:
        args.shape = Shape(**{**(QUICK if args.quick else SHAPE), **chosen})
    except ValueError as error:
        parser.error(str(error))
    args.modes = args.modes or (["no_sync"] if args.quick else list(MODES))
    args.ranks = args.ranks or ([2] if args.quick else [2, 4])
    args.steps = args.steps or (2 if args.quick else 4)
    return args


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(json.loads(args.worker))
        return
    require_plotting(args.png)
    require_package("")
    # A fixed threshold: what is freed goes back to the kernel at once, instead of when glibc thinks so.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    shape = args.shape
    print(
        header(
            "Memory" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"dim {shape.dim}, {shape.layers} layers, ffn {shape.ffn}, vocab {shape.vocab}, {shape.batch} x "
                f"{shape.seq} tokens per micro-batch: {shape.parameters / 1e6:.1f} M parameters, {args.dtype}; "
                f"AdamW(fused); bucket_cap_mb of ours: {args.bucket_cap_mb}; MALLOC_MMAP_THRESHOLD_=65536",
                "modes: one micro-batch; two, reduced after each; two, the first under no_sync",
                "MiB per rank. predicted: shards, gradients and AdamW's moments of a rank, its reduce memory, its 1/N "
                "of the gathered memory that ranks share, the copy of no_sync, one gradient in flight (the largest)",
                "measured: the kernel's peak resident size (VmHWM) less that after training one layer, with shared "
                "pages divided among the ranks that touch them; RSS growth: with these in full in every rank",
                "checked to be the plan's to the byte: shards, gradients, no_sync, and the bytes written for gathers",
                "sent: MB (10**6) per rank and step: fsdp2 counted, ours by the plan, (N-1)/N of each buffer",
            ],
        ),
        flush=True,
    )
    rows = []
    for ranks in args.ranks:
        for mode in args.modes:
            for engine in args.engines:
                progress(f"{ranks} ranks, {mode}, {engine}")
                rows.append(measure(engine, mode, ranks, args))
    print("\n" + format_table(rows), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        plot(args.png, rows, args)


if __name__ == "__main__":
    main()
