"""What FSDP costs the host, ours and FSDP2: microseconds per unit and step beyond the plain model, no communication.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --units 64 --layers 4 --csv host_cost.csv --png host_cost.png
    python benchmarks/host_cost.py --profile ours      # where the time of ours goes, by Python function

One process, one rank, one thread; the model is a stack of units so small that their arithmetic costs next to nothing:
what is left is hooks, bookkeeping and copies. The plain model, FSDP2 and ours live in the same process and take turns
in random order; a cost is the difference to the plain model in the same round.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import statistics
import time
from pathlib import Path
from typing import Any

from common import (
    Reply,
    WorkerGroup,
    add_output_options,
    header,
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

PLAIN, FSDP2, OURS = "plain", "fsdp2", "ours"
ENGINES = (PLAIN, FSDP2, OURS)
WARMUP_STEPS = 5
# Relative difference of the gradients' sum; one rank sums nothing, so only bfloat16 masters (plain) could differ.
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2}


def build(engine: str, spec: dict[str, Any]) -> Any:
    """A stack of ``units`` units of ``layers`` linear layers each, ``width`` wide, under ``engine``."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width: int = spec["width"]
    units = [nn.Sequential(*(nn.Linear(width, width) for _ in range(spec["layers"]))) for _ in range(spec["units"])]

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.units = nn.ModuleList(units)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for unit in self.units:
                x = unit(x)
            return x

    model = Stack()
    low = torch.bfloat16 if spec["dtype"] == "bf16" else None
    if engine == FSDP2:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh("cpu", (1,))
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for unit in model.units:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)
    if engine == OURS:
        import torchtitan_npu

        ours = torchtitan_npu.MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        fsdp: Any = torchtitan_npu.FSDP  # returns the model, not an FSDP
        return fsdp(model, mixed_precision=ours)
    return model if low is None else model.to(low)


class Worker:
    """The one rank, with all models."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torch.set_num_threads(1)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        self.models = {engine: build(engine, spec) for engine in ENGINES}
        self.input = torch.randn(2, spec["width"], dtype=torch.bfloat16 if spec["dtype"] == "bf16" else torch.float32)

    def step(self, engine: str) -> tuple[float, float]:
        """Seconds of one forward and one backward."""
        model = self.models[engine]
        start = time.perf_counter()
        loss = model(self.input).sum()
        middle = time.perf_counter()
        loss.backward()
        return middle - start, time.perf_counter() - middle

    def measure(self, engine: str, steps: int, warmup: int) -> Reply:
        """Seconds of forward and backward, the median of each over ``steps``; and the gradients' sum, as a check."""
        model = self.models[engine]
        seconds = []
        for number in range(warmup + steps):
            model.zero_grad(set_to_none=True)
            seconds.append(self.step(engine))
            if number < warmup:
                seconds.clear()
        gradients = (parameter.grad for parameter in model.parameters())
        checksum = sum(float(g.double().abs().sum()) for g in gradients if g is not None)
        forward, backward = (statistics.median(part) for part in zip(*seconds, strict=True))
        return {"forward": forward, "backward": backward, "checksum": checksum}

    def profile(self, engine: str, steps: int, path: str) -> Reply:
        """Runs steps under cProfile, which sees the Python side, and writes its statistics to ``path``."""
        self.measure(engine, 1, WARMUP_STEPS)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            self.step(engine)
        profiler.disable()
        profiler.dump_stats(path)
        return {}


def work(spec: dict[str, Any]) -> None:
    """The worker process."""
    worker = Worker(spec)
    serve({"measure": worker.measure, "profile": worker.profile})


def measure(group: WorkerGroup, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per engine; microseconds."""
    order = random.Random(args.seed)
    parts = ("forward", "backward")
    rounds: dict[str, list[Reply]] = {engine: [] for engine in ENGINES}
    for engine in ENGINES:
        group.call("measure", engine=engine, steps=1, warmup=WARMUP_STEPS)
    for _ in range(args.rounds):
        for engine in order.sample(ENGINES, len(ENGINES)):
            rounds[engine] += group.call("measure", engine=engine, steps=args.steps, warmup=1)
    checksums = {engine: rounds[engine][0]["checksum"] for engine in ENGINES}
    for engine, value in checksums.items():
        if abs(value - checksums[PLAIN]) > TOLERANCE[args.dtype] * abs(checksums[PLAIN]):
            raise SystemExit(f"gradients of {engine} are wrong: their sum is {value}, of plain {checksums[PLAIN]}")

    def per_unit(engine: str, part: str) -> list[float]:
        """Microseconds per unit beyond the plain model, by round."""
        pairs = zip(rounds[engine], rounds[PLAIN], strict=True)
        return [(mine[part] - plain[part]) / args.units * 1e6 for mine, plain in pairs]

    costs = {engine: {part: per_unit(engine, part) for part in parts} | {"rounds": []} for engine in ENGINES}
    for cost in costs.values():
        cost["rounds"] = [sum(both) for both in zip(cost["forward"], cost["backward"], strict=True)]
    rows = []
    for engine in ENGINES:
        steps = [reply["forward"] + reply["backward"] for reply in rounds[engine]]
        cost = costs[engine]
        ratio = ratio_quartiles(cost["rounds"], costs[FSDP2]["rounds"]) if engine != PLAIN else None
        rows.append(
            {
                "engine": engine,
                "step_us": statistics.median(steps) * 1e6,
                "per_unit_us": statistics.median(cost["rounds"]),
                "per_unit_min_us": min(cost["rounds"]),
                "per_unit_forward_us": statistics.median(cost["forward"]),
                "per_unit_backward_us": statistics.median(cost["backward"]),
                "ratio": ratio[0] if ratio else None,
                "ratio_q1": ratio[1] if ratio else None,
                "ratio_q3": ratio[2] if ratio else None,
            }
        )
    return rows


def format_table(rows: list[dict[str, Any]]) -> str:
    columns = ["engine", "step us", "per unit us", "min", "forward", "backward", "/ fsdp2 [quartiles]"]
    cells = [
        [row["engine"], f"{row['step_us']:.0f}"]
        + [
            f"{row[key]:.1f}"
            for key in ("per_unit_us", "per_unit_min_us", "per_unit_forward_us", "per_unit_backward_us")
        ]
        + [f"{row['ratio']:.3f} [{row['ratio_q1']:.3f} {row['ratio_q3']:.3f}]" if row["ratio"] else "-"]
        for row in rows
    ]
    return table(columns, cells)


def plot(path: Path, rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    write_png(
        path,
        f"Host time per unit and step beyond the plain model, {args.units} units of {args.layers} linear layers",
        ["forward", "backward", "both"],
        {
            row["engine"]: [row["per_unit_forward_us"], row["per_unit_backward_us"], row["per_unit_us"]]
            for row in rows
            if row["engine"] != PLAIN
        },
        "median us per unit",
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--units", type=positive, default=64, help="units of the model (64)")
    parser.add_argument("--layers", type=positive, default=2, help="linear layers per unit, two parameters each (2)")
    parser.add_argument("--width", type=positive, default=8, help="of the layers (8)")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="fp32", help="of parameters and inputs (fp32)")
    parser.add_argument("--rounds", type=positive, default=None, help="turns of every engine (30; 2 with --quick)")
    parser.add_argument("--steps", type=positive, default=None, help="timed steps per turn (10; 2 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    parser.add_argument("--profile", type=names(ENGINES), default=[], help="instead: profile these, by Python function")
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 30)
    args.steps = args.steps or (2 if args.quick else 10)
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
            "Host cost" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"{args.units} units of {args.layers} linear layers {args.width} x {args.width} with bias, "
                f"{args.dtype}, batch 2; 1 rank, 1 thread; no optimizer",
                f"{args.rounds} rounds, in each of which every engine does 1 untimed and {args.steps} timed steps, in "
                f"random order (seed {args.seed}); all in one process",
                "per unit: (median step of the round - the plain model's in that round) / units, of the rounds the "
                "median; / fsdp2: per round, of them the median [quartiles]",
                "fsdp2 calls the collectives of torch's `fake` backend, which send nothing and do not wait; ours casts "
                "into shared memory and sums out of it, as with more ranks",
            ],
        ),
        flush=True,
    )
    spec = {key: getattr(args, key) for key in ("units", "layers", "width", "dtype")}
    with WorkerGroup(Path(__file__), spec, 1, "host cost") as group:
        if args.profile:
            for engine in args.profile:
                path = f"{args.csv or 'host_cost'}.{engine}.prof"
                group.call("profile", engine=engine, steps=100, path=str(Path(path).resolve()))
                pstats.Stats(path).sort_stats("tottime").print_stats(25)
            return
        progress("up")
        rows = measure(group, args)
    print("\n" + format_table(rows), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        plot(args.png, rows, args)


if __name__ == "__main__":
    main()
