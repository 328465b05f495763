"""Time, traffic and memory of one training step: one process alone, independent processes, DDP, FSDP1, FSDP2, ours.

    python benchmarks/fsdp_step.py                     # everything; say nothing else to the machine meanwhile
    python benchmarks/fsdp_step.py --quick             # a small model, seconds: does everything run and agree?
    python benchmarks/fsdp_step.py --engines independent,fsdp2,ours --dtypes bf16 --csv step.csv --png step.png

Every engine lives in processes of its own, one thread per rank, which stay alive and sleep while another engine is
measured. In each round all engines take a turn of --steps steps, in random order, so that a noisy machine disturbs all
alike; a ratio compares an engine with `independent`, or with `fsdp2`, in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import (
    WorkerGroup,
    add_output_options,
    available_bytes,
    header,
    names,
    positive,
    progress,
    ratio_quartiles,
    require_package,
    require_plotting,
    table,
    write_csv,
    write_png,
)
from engines import DTYPES, ENGINES, work
from model import Shape

REFERENCE = "independent"
PEER = "fsdp2"
# Relative difference of the loss after the same steps that different orders of float32 or bfloat16 sums explain.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
WARMUP_STEPS = 2
QUICK_SHAPE = {"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 256, "seq": 32, "batch": 2}


@dataclass
class Measured:
    """Results of one engine in one dtype. Times in seconds, mean over ranks."""

    engine: str
    dtype: str
    rounds: list[list[list[float]]] = field(default_factory=list)  # round, step, (forward, backward, optimizer)
    sent_bytes: int = 0  # per rank and step
    pss_bytes: int = 0  # per rank
    rss_bytes: int = 0  # largest rank
    loss: float = float("nan")

    def round_medians(self) -> list[float]:
        return [statistics.median(sum(step) for step in steps) for steps in self.rounds]

    def all_steps(self) -> list[list[float]]:
        return [step for steps in self.rounds for step in steps]

    def part(self, index: int) -> float:
        return statistics.median(step[index] for step in self.all_steps())


def pss(pid: int) -> int:
    """Proportional set size in bytes without file-backed pages (libraries): memory shared by n processes counts 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended; receive() says so
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def measure_memory(group: WorkerGroup, result: Measured) -> None:
    """Untimed steps while this process samples the ranks' memory."""
    peak = 0

    def sample() -> None:
        nonlocal peak
        peak = max(peak, sum(pss(pid) for pid in group.pids))

    group.send("peak", count=2)
    replies = group.receive(while_waiting=sample)
    result.pss_bytes = peak // len(replies)
    result.rss_bytes = max(reply["peak_rss_bytes"] for reply in replies)
    result.loss = statistics.mean(reply["loss"] for reply in replies)


def measure_bytes(group: WorkerGroup, result: Measured) -> None:
    """Payload of the collectives of one step, or what ours computes."""
    replies = group.call("count_bytes")
    result.sent_bytes = max(sum(reply["collectives"].values()) + reply["computed"] for reply in replies)


def measure_dtype(dtype: str, args: argparse.Namespace) -> list[Measured]:
    """All engines in one dtype: set up, count, then alternate."""
    results = {engine: Measured(engine, dtype) for engine in args.engines}
    order = random.Random(args.seed)
    with contextlib.ExitStack() as stack:
        groups: dict[str, WorkerGroup] = {}
        for engine in args.engines:
            ranks = ENGINES[engine][0] or args.ranks
            spec = {
                "engine": engine,
                "dtype": dtype,
                "shape": asdict(args.shape),
                "bucket_cap_mb": args.bucket_cap_mb,
            }
            groups[engine] = stack.enter_context(WorkerGroup(Path(__file__), spec, ranks, f"{engine} {dtype}"))
        for group in groups.values():
            group.call("ready")
        progress(f"{dtype}: {len(groups)} engines are up")
        for engine, group in groups.items():
            group.call("steps", count=0, warmup=WARMUP_STEPS)
            measure_bytes(group, results[engine])
            measure_memory(group, results[engine])
        progress(f"{dtype}: warm, traffic and memory measured")
        for number in range(args.rounds):
            progress(f"{dtype}: round {number + 1} of {args.rounds}")
            for engine in order.sample(args.engines, len(args.engines)):
                ranks_seconds = [reply["seconds"] for reply in groups[engine].call("steps", count=args.steps, warmup=1)]
                results[engine].rounds.append(
                    [
                        [statistics.mean(parts) for parts in zip(*of_ranks, strict=True)]
                        for of_ranks in zip(*ranks_seconds, strict=True)
                    ]
                )
    return list(results.values())


def summarize(results: list[Measured]) -> list[dict[str, Any]]:
    """One row per engine and dtype; times in milliseconds, memory in MiB, traffic in MB (10**6)."""
    references = {r.dtype: r for r in results if r.engine == REFERENCE}
    peers = {r.dtype: r for r in results if r.engine == PEER}
    rows = []
    for result in results:
        totals = [sum(step) for step in result.all_steps()]
        reference = references.get(result.dtype)
        ratio = ratio_quartiles(result.round_medians(), reference.round_medians()) if reference else None
        peer = peers.get(result.dtype)
        to_peer = ratio_quartiles(result.round_medians(), peer.round_medians()) if peer else None
        rows.append(
            {
                "dtype": result.dtype,
                "engine": result.engine,
                "step_ms": statistics.median(totals) * 1e3,
                "min_ms": min(totals) * 1e3,
                "forward_ms": result.part(0) * 1e3,
                "backward_ms": result.part(1) * 1e3,
                "optimizer_ms": result.part(2) * 1e3,
                "ratio": ratio[0] if ratio else None,
                "ratio_q1": ratio[1] if ratio else None,
                "ratio_q3": ratio[2] if ratio else None,
                f"ratio_to_{PEER}": to_peer[0] if to_peer else None,
                f"ratio_to_{PEER}_q1": to_peer[1] if to_peer else None,
                f"ratio_to_{PEER}_q3": to_peer[2] if to_peer else None,
                "sent_mb": result.sent_bytes / 1e6,
                "pss_mib": result.pss_bytes / 2**20,
                "peak_rss_mib": result.rss_bytes / 2**20,
                "loss": result.loss,
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    columns = ["dtype", "engine", "step ms", "min", "fwd", "bwd", "opt", f"/ {REFERENCE} [quartiles]", f"/ {PEER}"]
    columns += ["sent MB", "PSS MiB", "peak RSS MiB", "loss"]
    cells = []
    for row in rows:
        ratio = f"{row['ratio']:.3f} [{row['ratio_q1']:.3f} {row['ratio_q3']:.3f}]" if row["ratio"] else "-"
        times = [row[key] for key in ("step_ms", "min_ms", "forward_ms", "backward_ms", "optimizer_ms")]
        cells.append(
            [row["dtype"], row["engine"], *(f"{time:.1f}" for time in times), ratio]
            + [f"{row[f'ratio_to_{PEER}']:.3f}" if row[f"ratio_to_{PEER}"] else "-"]
            + [f"{row['sent_mb']:.1f}", f"{row['pss_mib']:.0f}", f"{row['peak_rss_mib']:.0f}", f"{row['loss']:.5f}"]
        )
    return table(columns, cells, left=2)


def check_losses(results: list[Measured]) -> list[str]:
    """Engines that average gradients over the same batches must agree; returns what does not."""
    problems = []
    for dtype in DTYPES:
        grouped = [r for r in results if r.dtype == dtype and ENGINES[r.engine][1]]
        for result in grouped[1:]:
            first = grouped[0]
            if not abs(result.loss - first.loss) <= LOSS_TOLERANCE[dtype] * abs(first.loss):
                problems.append(
                    f"{dtype}: losses of {result.engine}, {result.loss:.6f}, and of {first.engine}, {first.loss:.6f}, "
                    f"differ by more than {LOSS_TOLERANCE[dtype]:g} relative"
                )
    return problems


def plot(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    by_key = {(row["engine"], row["dtype"]): row for row in rows}
    picked = {engine: [by_key[engine, dtype] for dtype in args.dtypes] for engine in args.engines}
    write_png(
        path,
        f"Training step, {args.ranks} ranks x 1 thread, {args.shape.parameters / 1e6:.1f} M parameters",
        args.dtypes,
        {engine: [row["step_ms"] for row in chosen] for engine, chosen in picked.items()},
        f"median step, ms (above: ratio to {REFERENCE})",
        {
            engine: [f"{row['ratio']:.2f}" if row["ratio"] else f"{row['step_ms']:.0f}" for row in chosen]
            for engine, chosen in picked.items()
        },
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--engines", type=names(tuple(ENGINES)), default=list(ENGINES), help=",".join(ENGINES))
    parser.add_argument("--dtypes", type=names(DTYPES), default=None, help="fp32,bf16; bf16 with --quick")
    parser.add_argument("--ranks", type=positive, default=2, help="processes of every engine but `single` (2)")
    parser.add_argument("--rounds", type=positive, default=None, help="turns of every engine (12; 2 with --quick)")
    parser.add_argument("--steps", type=positive, default=None, help="timed steps per turn (4; 2 with --quick)")
    parser.add_argument("--bucket_cap_mb", type=float, default=None, help="largest bucket of `ours`, MiB (none)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    shape = asdict(Shape())
    for name, value in shape.items():
        parser.add_argument(f"--{name}", type=positive, help=f"({value}; {QUICK_SHAPE[name]} with --quick)")
    args = parser.parse_args()
    chosen = {name: getattr(args, name) for name in shape if getattr(args, name) is not None}
    try:
        args.shape = Shape(**{**(QUICK_SHAPE if args.quick else shape), **chosen})
    except ValueError as error:
        parser.error(str(error))
    args.dtypes = args.dtypes or (["bf16"] if args.quick else list(DTYPES))
    args.rounds = args.rounds or (2 if args.quick else 12)
    args.steps = args.steps or (2 if args.quick else 4)
    return args


def check_memory(args: argparse.Namespace) -> None:
    processes = sum(ENGINES[engine][0] or args.ranks for engine in args.engines)
    needed = processes * args.shape.step_bytes
    if needed > available_bytes():
        raise SystemExit(
            f"{processes} processes that are alive together need about {needed / 2**30:.1f} GiB, of which "
            f"{available_bytes() / 2**30:.1f} GiB are available; name fewer --engines, or a smaller --dim, --layers or "
            "--vocab"
        )


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(json.loads(args.worker))
        return
    require_plotting(args.png)
    if "ours" in args.engines:
        require_package(", or leave `ours` out of --engines")
    check_memory(args)
    shape = args.shape
    print(
        header(
            "Training step" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"dim {shape.dim}, {shape.layers} layers, {shape.heads} heads, ffn {shape.ffn}, vocab {shape.vocab}, "
                f"seq {shape.seq}, batch {shape.batch} per rank: {shape.parameters / 1e6:.1f} M parameters; "
                f"AdamW(foreach); bucket_cap_mb of ours: {args.bucket_cap_mb}",
                f"{args.ranks} ranks x 1 thread, Gloo; {args.rounds} rounds, in each of which every engine does 1 "
                f"untimed and {args.steps} timed steps, in random order (seed {args.seed})",
                "bf16: single, independent and ddp under autocast; fsdp1, fsdp2, ours with bf16 parameters, fp32 sums, "
                "fp32 shards",
                "times: mean over ranks; of all steps the median (and minimum); ratio: per round, of them the median "
                "[quartiles]",
                "sent: MB (10**6) per rank and step; measured: payload of the collectives; ours, computed: bytes "
                "written to shared memory for peers",
                "PSS: peak per rank while stepping, sampled from outside; private and shared memory (shared pages "
                "divided among ranks), no library files",
                "peak RSS: VmHWM while stepping, largest rank; shared pages in full, library files included",
                "loss: after the same number of steps, mean over ranks; ddp, fsdp1, fsdp2, ours must agree",
            ],
        ),
        flush=True,
    )
    results = []
    for dtype in args.dtypes:
        results += measure_dtype(dtype, args)
    rows = summarize(results)
    print("\n" + format_table(rows), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        plot(args.png, rows, args)
    problems = check_losses(results)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
