"""How long it takes to plan large models for many ranks, and what the plan costs: padding and arena.

    python benchmarks/planning.py --csv planning.csv
    python benchmarks/planning.py --models llama3_70b --ranks 1024 --caps 25,none

Planning needs shapes only: the models are on the meta device, and one process plans for any number of ranks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from common import (
    add_output_options,
    header,
    names,
    positive,
    require_package,
    require_plotting,
    table,
    write_csv,
    write_png,
)

MODELS = ("llama3_debug", "llama3_7b", "llama3_8b", "llama3_13b", "llama3_70b")
MIB = 1024**2


def measure(
    models: Sequence[str], ranks: Sequence[int], caps: Sequence[float | None], repeats: int
) -> list[dict[str, Any]]:
    """One row per model, number of ranks and cap; the median of ``repeats``."""
    import torch

    from torchtitan_npu.config import ModelConfig
    from torchtitan_npu.config.presets import PRESETS
    from torchtitan_npu.fsdp import MixedPrecisionPolicy, plan_model
    from torchtitan_npu.models import build_model

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rows = []
    for name in models:
        with torch.device("meta"):
            model = build_model(ModelConfig(name=name, **PRESETS[name]))  # type: ignore[arg-type]
        for size in ranks:
            for cap in caps:
                seconds = []
                for _ in range(repeats):
                    start = time.perf_counter()
                    plan = plan_model(model, size, mixed_precision=policy, bucket_cap_mb=cap)
                    seconds.append(time.perf_counter() - start)
                rows.append(
                    {
                        "model": name,
                        "ranks": size,
                        "bucket_cap_mb": "none" if cap is None else f"{cap:g}",
                        "plan_ms": statistics.median(seconds) * 1e3,
                        "buckets": plan.num_buckets,
                        "padding_percent": 100 * plan.padding_fraction,
                        "shard_mib": plan.parameter_bytes / MIB,
                        "arena_mib": plan.arena_bytes / MIB,
                    }
                )
    return rows


def caps(text: str) -> list[float | None]:
    """argparse type: as for `torchtitan-npu tune`."""
    from torchtitan_npu.cli_tune import caps as parse

    return list(parse(text))


def counts(text: str) -> list[int]:
    """argparse type: comma-separated whole numbers."""
    return [positive(part) for part in text.split(",")]


def main() -> None:
    require_package("")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--models", type=names(MODELS), default=None, help="(llama3_8b,llama3_70b; 8b with --quick)")
    parser.add_argument("--ranks", type=counts, default=[8, 64, 1024], help="to plan for (8,64,1024)")
    parser.add_argument("--caps", type=caps, default=[25.0, 100.0, None], help="MiB and none (25,100,none)")
    parser.add_argument("--repeats", type=positive, default=None, help="of each plan (7; 1 with --quick)")
    args = parser.parse_args()
    require_plotting(args.png)
    models = args.models or (["llama3_8b"] if args.quick else ["llama3_8b", "llama3_70b"])
    repeats = args.repeats or (1 if args.quick else 7)
    print(
        header(
            "Planning" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"plan_model of meta tensors, bf16 parameters; median of {repeats}; one process",
                "padding: share of all buckets; shard: master parameters of a rank; arena: gathered and reduce memory",
            ],
        ),
        flush=True,
    )
    rows = measure(models, args.ranks, args.caps, repeats)
    columns = ["model", "ranks", "cap MiB", "ms", "buckets", "padding %", "shard MiB", "arena MiB"]
    cells = [
        [row["model"], str(row["ranks"]), row["bucket_cap_mb"], f"{row['plan_ms']:.1f}", str(row["buckets"])]
        + [f"{row['padding_percent']:.3f}", f"{row['shard_mib']:.0f}", f"{row['arena_mib']:.0f}"]
        for row in rows
    ]
    print("\n" + table(columns, cells), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        groups = [f"{model}\ncap {cap}" for model in models for cap in dict.fromkeys(r["bucket_cap_mb"] for r in rows)]
        series = {f"{size} ranks": [r["plan_ms"] for r in rows if r["ranks"] == size] for size in args.ranks}
        write_png(args.png, "Planning a model for many ranks", groups, dict(series), "median ms")


if __name__ == "__main__":
    main()
