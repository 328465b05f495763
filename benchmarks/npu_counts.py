"""What sharding asks of an Ascend card beyond the plain model's own step: FSDP2 and ours, counted on simulated cards.

    python benchmarks/npu_counts.py --ranks 4            # in an environment with torch_npu and a simulator
    python benchmarks/npu_counts.py --quick              # 2 ranks, a small model
    python benchmarks/npu_counts.py --csv counts.csv --png counts.png

Counts of operator launches, of bytes and of memory, no times: they are the same in every run, and a simulated card
knows nothing about a real one's speed. One step is counted, the third, of the same model with the same batches under
`plain` (one process, bfloat16 parameters, no communication), `fsdp2` (torch's fully_shard of every block and the root,
its defaults) and `ours`, as it is and with bucket_cap_mb=25. FSDP computes in bfloat16 and sums in float32; AdamW steps
float32 shards. An engine's own share is what it has more than `plain`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import (
    Reply,
    WorkerGroup,
    add_output_options,
    header,
    positive,
    progress,
    require_package,
    require_plotting,
    table,
    write_csv,
    write_png,
)

ENGINES = ("plain", "fsdp2", "ours", "ours_cap25")
PEER = "fsdp2"
SHAPE = {"dim": 512, "layers": 8, "heads": 8, "ffn": 1376, "vocab": 2048, "seq": 32, "batch": 1}
QUICK_SHAPE = {"dim": 64, "layers": 8, "heads": 4, "ffn": 96, "vocab": 256, "seq": 32, "batch": 2}
# Relative difference of the losses that other orders of summing gradients explain.
LOSS_TOLERANCE = 1e-3
# Operators that only move values from one place to another, perhaps into another type.
COPIES = ("aclnnInplaceCopy", "aclnnForeachCopy", "aclnnCat", "aclnnChunkCat", "aclnnStack", "aclnnCast")
GATHERS = ("HcclAllGather", "HcclAllGatherV", "HcclBroadcast")


@dataclass(frozen=True)
class Measure:
    """A row of the table."""

    key: str
    title: str
    unit: float  # what the numbers are divided by before they are printed
    target: float | None = None  # largest ratio of ours to FSDP2's


MEASURES = (
    Measure("added_launches", "operator launches added to plain", 1, 0.40),
    Measure("added_copied", "bytes copied or cast, added to plain (kB)", 1e3, 0.45),
    Measure("collectives", "HCCL calls", 1),
    Measure("gradients_sent", "gradient bytes sent (kB)", 1e3, 0.55),
    Measure("parameters_sent", "parameter bytes sent (kB)", 1e3, 1.01),
    Measure("allocated", "peak memory in use, tensors (MB)", 1e6, 0.85),
    Measure("rest_peak", "  before the forward (MB)", 1e6),
    Measure("forward_peak", "  peak in the forward (MB)", 1e6),
    Measure("backward_peak", "  peak in the backward (MB)", 1e6),
    Measure("optimizer_peak", "  peak in the optimizer's step (MB)", 1e6),
    Measure("card_memory", "peak memory of the card without communicators (MB)", 1e6, 0.85),
    Measure("communicators", "HCCL communicators' own buffers (MB)", 1e6),
)


def simulator_environment() -> dict[str, str]:
    """Variables with which a process finds the simulated cards; SystemExit where there are none."""
    require_package("")
    if importlib.util.find_spec("torch_npu") is None:
        raise SystemExit("torch_npu is not installed here: `make simulator`, then run this with .venv-npu/bin/python")
    from torchtitan_npu import cli_simulate

    try:
        folder = cli_simulate.find_simulator(os.environ)
    except cli_simulate.SimulatorError as error:
        raise SystemExit(str(error)) from error
    return cli_simulate.simulated_environment(os.environ, folder, npus=None, memory_mb=None)


def count(engine: str, ranks: int, shape: dict[str, int]) -> list[Reply]:
    """One step under ``engine``, counted by every rank."""
    processes = 1 if engine == "plain" else ranks
    script = Path(__file__).with_name("npu_rank.py")
    with WorkerGroup(script, {"engine": engine, "shape": shape}, processes, engine, timeout_seconds=900) as group:
        replies = group.call("count")
    for rank, reply in enumerate(replies):
        if reply["violations"]:
            raise SystemExit(f"{engine}, rank {rank}: the simulator found {reply['violations']}")
    return replies


def summarize(reply: Reply) -> dict[str, float]:
    """What one rank counted, in the terms of the table."""
    operators, sent = reply["operators"], reply["collectives"]
    return {
        "launches": sum(o["launches"] for o in operators.values()),
        "copied": sum(operators[name]["bytes_written"] for name in COPIES if name in operators)
        + reply["copies"].get("d2d", {"bytes": 0})["bytes"],
        "collectives": sum(c["calls"] for c in sent.values()),
        "parameters_sent": sum(c["bytes_sent"] for name, c in sent.items() if name in GATHERS),
        "gradients_sent": sum(c["bytes_sent"] for name, c in sent.items() if name not in GATHERS),
        "allocated": max(reply["peaks"].values()),
        **{f"{name}_peak": peak for name, peak in reply["peaks"].items()},
        "card_memory": reply["memory"]["peak_bytes"] - reply["memory"]["communicator_peak_bytes"],
        "communicators": reply["memory"]["communicator_peak_bytes"],
        "loss": reply["loss"],
    }


def measure(ranks: int, shape: dict[str, int]) -> dict[str, dict[str, Any]]:
    """By engine: the largest number of any rank, the mean loss, and launches by operator beyond plain's (rank 0)."""
    results: dict[str, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for engine in ENGINES:
        replies = count(engine, ranks, shape)
        of_ranks = [summarize(reply) for reply in replies]
        result: dict[str, Any] = {key: max(r[key] for r in of_ranks) for key in of_ranks[0]}
        result["loss"] = sum(r["loss"] for r in of_ranks) / len(of_ranks)
        plain = plain or {**result, "operators": replies[0]["operators"]}
        result["added_launches"] = result["launches"] - plain["launches"]
        result["added_copied"] = result["copied"] - plain["copied"]
        result["by_operator"] = added(replies[0]["operators"], plain["operators"])
        results[engine] = result
        progress(f"{engine}: {result['launches']:.0f} launches")
    return results


def added(operators: dict[str, Any], plain: dict[str, Any]) -> dict[str, int]:
    """Launches by operator beyond plain's."""
    nothing = {"launches": 0}
    more = {
        name: operators.get(name, nothing)["launches"] - plain.get(name, nothing)["launches"]
        for name in sorted(set(operators) | set(plain))
    }
    return {name: launches for name, launches in more.items() if launches != 0}


def ratio(results: dict[str, dict[str, Any]], engine: str, key: str) -> float:
    """Of an engine's number to FSDP2's."""
    return float(results[engine][key] / results[PEER][key])


def verdict(results: dict[str, dict[str, Any]], of: Measure) -> str:
    if of.target is None:
        return ""
    return f"{of.target:.2f} {'met' if ratio(results, 'ours', of.key) <= of.target else 'MISSED'}"


def format_table(results: dict[str, dict[str, Any]]) -> str:
    columns = ["per rank and step", *ENGINES, "ours / fsdp2", "ours_cap25 / fsdp2", "target for ours"]
    cells = [["operator launches in total", *(f"{results[e]['launches']:.0f}" for e in ENGINES), "", "", ""]]
    for of in MEASURES:
        numbers = [f"{results[engine][of.key] / of.unit:.{1 if of.unit == 1e6 else 0}f}" for engine in ENGINES]
        ratios = [f"{ratio(results, engine, of.key):.3f}" for engine in ("ours", "ours_cap25")]
        cells.append([of.title, *numbers, *ratios, verdict(results, of)])
    return table(columns, cells)


def format_operators(results: dict[str, dict[str, Any]]) -> str:
    lines = []
    for engine in ENGINES[1:]:
        counted = ", ".join(f"{number:+d} {name}" for name, number in results[engine]["by_operator"].items())
        lines.append(f"{engine}, launches beyond plain's: {counted}")
    return "\n".join(lines)


def rows_of(results: dict[str, dict[str, Any]], ranks: int) -> list[dict[str, Any]]:
    keys = ["launches", *(of.key for of in MEASURES), "loss"]
    return [{"ranks": ranks, "engine": engine, **{key: results[engine][key] for key in keys}} for engine in ENGINES]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--ranks", type=positive, default=None, help="simulated cards (4; 2 with --quick)")
    for name, value in SHAPE.items():
        parser.add_argument(f"--{name}", type=positive, help=f"({value}; {QUICK_SHAPE[name]} with --quick)")
    args = parser.parse_args()
    args.ranks = args.ranks or (2 if args.quick else 4)
    if args.ranks < 2:
        parser.error("--ranks: at least 2, with one there is nothing to shard")
    chosen = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    args.shape = {**(QUICK_SHAPE if args.quick else SHAPE), **chosen}
    return args


def main() -> None:
    args = parse_arguments()
    require_plotting(args.png)
    environment = simulator_environment()
    # This process needs torch for its header only, and no card.
    os.environ.update(environment, TORCH_DEVICE_BACKEND_AUTOLOAD="0", TT_SIM_NPUS=str(args.ranks))
    sizes = ", ".join(f"{name} {value}" for name, value in args.shape.items())
    print(
        header(
            "One training step on simulated Ascend cards: counts, not times",
            [
                f"{args.ranks} ranks; {sizes} per rank; {args.shape['layers'] + 1} FSDP units; bfloat16, sums in "
                "float32, AdamW(fused)",
                "the largest number of any rank; kB and MB are 10**3 and 10**6 bytes; sent: by the minimal direct "
                "algorithm, which is (N-1)/N of the buffer",
                "copied or cast: bytes written by operators that only move values: " + ", ".join(COPIES),
            ],
        ),
        flush=True,
    )
    results = measure(args.ranks, args.shape)
    print("\n" + format_table(results))
    print("\n" + format_operators(results))
    losses = [results[engine]["loss"] for engine in ENGINES[1:]]
    difference = (max(losses) - min(losses)) / losses[0]
    print(
        f"\nlosses of the third step, mean over ranks: {', '.join(f'{loss:.6f}' for loss in losses)}; relative "
        f"difference {difference:.1e} (allowed: {LOSS_TOLERANCE:g})",
        flush=True,
    )
    if args.csv:
        write_csv(args.csv, rows_of(results, args.ranks))
    if args.png:
        with_target = [of for of in MEASURES if of.target is not None]
        write_png(
            args.png,
            f"Simulated Ascend, {args.ranks} cards: ours / FSDP2, counts of one step",
            [of.key for of in with_target],
            {
                "target": [of.target for of in with_target],
                **{e: [ratio(results, e, of.key) for of in with_target] for e in ("ours", "ours_cap25")},
            },
            "ratio to FSDP2",
        )
    if not difference <= LOSS_TOLERANCE:
        raise SystemExit("the losses of FSDP2 and ours differ")


if __name__ == "__main__":
    main()
