"""Step time and memory over bucket_cap_mb, beside FSDP2 of the same model in the same run.

    python benchmarks/bucket_cap.py --csv bucket_cap.csv --png bucket_cap.png
    python benchmarks/bucket_cap.py --caps 1,25,none --ranks 4 --dtype bf16
    python benchmarks/bucket_cap.py --quick            # seconds: does everything run?

The measuring is that of `torchtitan-npu tune`, for a model that knows nothing of its configuration: every variant is
built, warmed up, timed and dropped in each of five rounds, in random order.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    Reply,
    WorkerGroup,
    add_output_options,
    header,
    init_gloo,
    positive,
    progress,
    require_package,
    require_plotting,
    serve,
    table,
    write_csv,
    write_png,
)
from engines import DTYPES, wrap
from model import Llama, Shape, loss_of

FSDP2 = "fsdp2"
QUICK_SHAPE = {"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 256, "seq": 32, "batch": 2}
MIB = 1024**2


class Trial:
    """The benchmarks' model under one engine."""

    def __init__(self, engine: str, cap_mb: float | None, spec: dict[str, Any]) -> None:
        import torch

        shape = Shape(**spec["shape"])
        torch.manual_seed(0)
        self.model = wrap(engine, Llama(shape), spec["dtype"], cap_mb)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)
        generator = torch.Generator().manual_seed(1 + spec["rank"])
        self.tokens_BT = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator)

    def step(self) -> None:
        loss_of(self.model(self.tokens_BT[:, :-1]), self.tokens_BT[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def measure(spec: dict[str, Any]) -> Reply:
    """All variants in turns; one row each."""
    import torch

    from torchtitan_npu.fsdp import MixedPrecisionPolicy, plan_model
    from torchtitan_npu.planning.traffic import planned_traffic
    from torchtitan_npu.planning.tune_measure import measure_in_turns, quartiles
    from torchtitan_npu.planning.tune_report import Candidate, candidate_row, cap_name

    torch.set_num_threads(1)
    init_gloo(spec)
    caps: list[float | None] = spec["caps"]
    makers: dict[str, Callable[[], Trial]] = {FSDP2: lambda: Trial(FSDP2, None, spec)}
    for cap in caps:
        makers[cap_name(cap)] = lambda cap=cap: Trial("ours", cap, spec)
    measured = measure_in_turns(makers, spec["steps"], spec["seed"])

    with torch.device("meta"):
        model = Llama(Shape(**spec["shape"]))
    low = torch.bfloat16 if spec["dtype"] == "bf16" else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    candidates = []
    for cap in caps:
        plan = plan_model(model, spec["ranks"], mixed_precision=policy, bucket_cap_mb=cap)
        moments = 2 * plan.parameter_bytes
        candidates.append(Candidate(cap, plan, planned_traffic(plan), measured[cap_name(cap)], moments))
    fastest = min(candidates, key=lambda c: c.measured.step_seconds)
    rows = [{"engine": "ours", **candidate_row(c, fastest, fastest)} for c in candidates]
    theirs = measured[FSDP2]
    first, third = theirs.step_quartiles
    known = {
        "engine": FSDP2,
        "bucket_cap_mb": "",
        "step_seconds": theirs.step_seconds,
        "step_seconds_q1": first,
        "step_seconds_q3": third,
        "peak_resident_bytes": theirs.peak_resident_bytes or None,
    }
    rows.append({key: known.get(key) for key in rows[0]})
    for row, result in zip(rows, [*(c.measured for c in candidates), theirs], strict=True):
        del row["recommended"]
        ratios = result.ratios_to(theirs)
        row["ratio_to_fsdp2"] = statistics.median(ratios)
        row["ratio_to_fsdp2_q1"], row["ratio_to_fsdp2_q3"] = quartiles(ratios)
    return {"rows": rows}


def format_table(rows: list[dict[str, Any]]) -> str:
    columns = ["engine", "cap MiB", "step ms [quartiles]", "/ fsdp2 [quartiles]", "exposed ms", "gathers", "reductions"]
    columns += ["sent MB", "arena MiB", "planned MiB", "peak RSS MiB"]

    def cell(value: float | None, scale: float, digits: int = 1) -> str:
        return "-" if value is None else f"{value / scale:.{digits}f}"

    cells = []
    for row in rows:
        step, q1, q3 = (1e3 * row[f"step_seconds{end}"] for end in ("", "_q1", "_q3"))
        ratio, low, high = (row[f"ratio_to_fsdp2{end}"] for end in ("", "_q1", "_q3"))
        cells.append(
            [row["engine"], row["bucket_cap_mb"] or "-", f"{step:.1f} [{q1:.1f} {q3:.1f}]"]
            + [f"{ratio:.3f} [{low:.3f} {high:.3f}]", cell(row["exposed_seconds"], 1e-3)]
            + [cell(row["gathers"], 1, 0), cell(row["reductions"], 1, 0), cell(row["sent_bytes"], 1e6)]
            + [cell(row[key], MIB) for key in ("arena_bytes", "planned_bytes")]
            + [cell(row["peak_resident_bytes"], MIB, 0)]
        )
    return table(columns, cells, left=2)


def plot(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    names = [row["bucket_cap_mb"] or FSDP2 for row in rows]
    write_png(
        path,
        f"bucket_cap_mb, {args.ranks} ranks, {args.dtype}, {args.shape.parameters / 1e6:.1f} M parameters",
        names,
        {"step": [1e3 * row["step_seconds"] for row in rows]},
        "ms, by bucket_cap_mb",
        beside=(
            "MiB",
            {
                "peak RSS": [(row["peak_resident_bytes"] or 0) / MIB for row in rows],
                "arena": [row["arena_bytes"] / MIB if row["arena_bytes"] else None for row in rows],
            },
        ),
    )


def caps(text: str) -> list[float | None]:
    """argparse type: as for `torchtitan-npu tune`."""
    from torchtitan_npu.cli_tune import caps as parse

    return list(parse(text))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument(
        "--caps", type=caps, default=None, help="MiB and none (1,5,10,25,50,none; 0.05,none with --quick)"
    )
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument("--steps", type=positive, default=None, help="timed steps of each variant (20; 2 with --quick)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="(fp32)")
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
    args.caps = args.caps or ([0.05, None] if args.quick else [1.0, 5.0, 10.0, 25.0, 50.0, None])
    args.steps = args.steps or (2 if args.quick else 20)
    return args


def main() -> None:
    require_package("")
    args = parse_arguments()
    if args.worker:
        spec = json.loads(args.worker)
        serve({"measure": lambda: measure(spec)})
        return
    require_plotting(args.png)
    shape = args.shape
    print(
        header(
            "Bucket cap" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"dim {shape.dim}, {shape.layers} layers, {shape.heads} heads, ffn {shape.ffn}, vocab {shape.vocab}, "
                f"seq {shape.seq}, batch {shape.batch} per rank: {shape.parameters / 1e6:.1f} M parameters, "
                f"{args.dtype}; AdamW(foreach)",
                f"{args.ranks} ranks x 1 thread; {args.steps} timed steps of each variant in up to 5 rounds, in random "
                f"order (seed {args.seed}); each is built, warmed up and dropped in every round",
                "times: mean over ranks, of all steps the median [quartiles]; / fsdp2: per round, of them the median",
                "exposed: blocked on other ranks; sent: (N-1)/N of all buffers; arena, planned (shards, gradients, "
                "AdamW, arena): from the plan; peak RSS: largest rank",
            ],
        ),
        flush=True,
    )
    spec = {key: getattr(args, key) for key in ("caps", "steps", "dtype", "seed")} | {"shape": asdict(shape)}
    with WorkerGroup(Path(__file__), spec, args.ranks, "bucket cap") as group:
        progress(f"{len(args.caps) + 1} variants x {args.steps} steps")
        rows = group.call("measure")[0]["rows"]
    print("\n" + format_table(rows), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        plot(args.png, rows, args)


if __name__ == "__main__":
    main()
