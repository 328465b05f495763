"""Our trainer, and a plain PyTorch trainer on FSDP2 with the same model: tokens per second, memory, and start-up.

    python benchmarks/train_step.py --csv train.csv --png train.png
    python benchmarks/train_step.py --dtypes fp32 --rounds 5 --dim 768

Both are started by torchrun as users start them, in turns, each run a fresh one. PyPI's torchtitan cannot be the peer:
version 0.3 attends by FlexAttention, which has no backward pass on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    add_output_options,
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
from fsdp_step import pss
from model import Shape

HERE = Path(__file__).resolve().parent
ENGINES = ("ours", "fsdp2")
DTYPES = ("fp32", "bf16")
WARMUP_STEPS = 3
MIB = 1024**2


@dataclass
class Run:
    tokens_per_second: float
    startup_seconds: float
    pss_mib: float
    """Of all ranks together, at most; 0 where it was not sampled."""
    last_loss: float


@dataclass
class Results:
    runs: list[Run] = field(default_factory=list)
    """Of the timed rounds."""
    sampled: Run | None = None
    """Of the round that sampled memory, which slows training down."""


def write_data(folder: Path, shape: Shape, samples: int) -> tuple[Path, Path]:
    """The same random tokens as prepared JSONL and as a file of uint16."""
    tokens = np.random.default_rng(0).integers(0, shape.vocab, samples * shape.seq + 1, dtype=np.uint16)
    binary, jsonl = folder / "tokens.bin", folder / "tokens.jsonl"
    tokens.tofile(binary)
    with open(jsonl, "w") as file:
        for start in range(0, len(tokens), 4096):
            file.write(json.dumps({"tokens": tokens[start : start + 4096].tolist()}) + "\n")
    return jsonl, binary


def command(engine: str, dtype: str, shape: Shape, args: argparse.Namespace, data: tuple[Path, Path]) -> list[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(args.ranks)]
    if engine == "fsdp2":
        flags = ["--shape", json.dumps(asdict(shape)), "--tokens", str(data[1]), "--dtype", dtype]
        return [*torchrun, str(HERE / "fsdp2_trainer.py"), *flags, "--steps", str(args.steps)]
    model = {
        "name": "llama3_debug",
        "dim": shape.dim,
        "n_layers": shape.layers,
        "n_heads": shape.heads,
        "n_kv_heads": shape.heads,
        "ffn_dim": shape.ffn,
        "vocab_size": shape.vocab,
        "max_seq_len": shape.seq,
        "use_flash_attention": True,
    }
    training = {"batch_size": shape.batch, "learning_rate": 1e-3, "max_steps": args.steps, "log_interval": 1}
    sections = {"model": model, "training": training, "parallel": {"dtype": dtype}}
    config = data[0].with_name("config.yaml")
    config.write_text("".join(f"{name}: {json.dumps(section)}\n" for name, section in sections.items()))
    folder = Path(tempfile.mkdtemp(dir=data[0].parent))
    flags = ["--config", config, "--data_dir", data[0], "--checkpoint_dir", folder / "checkpoints"]
    flags += ["--log_dir", folder / "logs", "--training.resume", "none", "--training.checkpoint.save_interval", "0"]
    return [*torchrun, str(HERE.parent / "train.py"), *map(str, flags)]


def ranks_of(torchrun: int) -> list[int]:
    """The processes that torchrun has started."""
    children = Path(f"/proc/{torchrun}/task/{torchrun}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


class PeakSampler(threading.Thread):
    """The most memory that the ranks under a torchrun have together, looked at without pause (which slows them)."""

    def __init__(self, torchrun: int) -> None:
        super().__init__(daemon=True)
        self._torchrun, self._peak_bytes, self._ended = torchrun, 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.005):
            self._peak_bytes = max(self._peak_bytes, sum(pss(pid) for pid in ranks_of(self._torchrun)))

    def stop(self) -> int:
        self._ended.set()
        self.join()
        return self._peak_bytes


def measure(engine: str, command: Sequence[str], shape: Shape, ranks: int, *, sample: bool) -> Run:
    """One whole run, from the start of torchrun to its end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    start = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        first, losses, lines = 0.0, [], []
        sampler = PeakSampler(process.pid) if sample else None
        for line in process.stdout:
            lines.append(line)
            found = re.match(r'(?:\[Step (\d+)\] loss=|\{"step": (\d+), "loss": )([\d.]+)', line)
            if not found:
                continue
            losses.append((time.monotonic(), float(found[3])))
            first = first or losses[0][0] - start
            if sampler is not None and len(losses) == WARMUP_STEPS:
                sampler.start()
        errors = process.stderr.read()
    if process.returncode != 0 or len(losses) <= WARMUP_STEPS:
        raise SystemExit(
            f"{engine} failed with status {process.returncode}:\n{''.join(lines)[-3000:]}\n{errors[-3000:]}"
        )
    steps = [later - earlier for (earlier, _), (later, _) in pairwise(losses[WARMUP_STEPS - 1 :])]
    tokens = shape.batch * shape.seq * ranks
    return Run(tokens / statistics.median(steps), first, sampler.stop() / MIB if sampler else 0.0, losses[-1][1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument("--dtypes", type=names(DTYPES), default=None, help="fp32,bf16 (both; bf16 with --quick)")
    parser.add_argument("--rounds", type=positive, default=None, help="runs of each (5; 1 with --quick)")
    parser.add_argument("--steps", type=positive, default=None, help="steps of a run (25; 6 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of runs (0)")
    for name, value in asdict(Shape()).items():
        parser.add_argument(f"--{name}", type=positive, default=None, help=f"of the model or batch ({value})")
    args = parser.parse_args()
    require_plotting(args.png)
    require_package("")
    sizes = asdict(Shape())
    if args.quick:
        sizes |= {"dim": 64, "layers": 2, "heads": 4, "ffn": 160, "vocab": 512, "seq": 64}
    shape = Shape(**{name: getattr(args, name) or size for name, size in sizes.items()})
    args.dtypes = args.dtypes or (["bf16"] if args.quick else list(DTYPES))
    args.rounds, args.steps = args.rounds or (1 if args.quick else 5), args.steps or (6 if args.quick else 25)
    if args.steps <= WARMUP_STEPS + 1:
        parser.error(f"--steps {args.steps}: must be above {WARMUP_STEPS + 1}, of which {WARMUP_STEPS} are not timed")
    print(
        header(
            "Trainers" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"{shape.parameters / 1e6:.1f} M parameters, batch {shape.batch} x {shape.seq} tokens per rank, "
                f"{args.ranks} ranks, 1 thread each; {args.rounds} runs of {args.steps} steps each in random order",
                "tokens/s: over the median time between two log lines, all ranks together; start-up: from torchrun to "
                "the end of step 1; PSS: of all ranks, at most, from step 3 on, in a run of its own",
                "ratios: ours / fsdp2 of the same round, median and quartiles",
            ],
        ),
        flush=True,
    )
    results = {(engine, dtype): Results() for dtype in args.dtypes for engine in ENGINES}
    order = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = write_data(Path(folder), shape, 4 * args.ranks * shape.batch * args.steps)
        for round_ in range(args.rounds + 1):
            sample = round_ == args.rounds
            for engine, dtype in order.sample(list(results), len(results)):
                progress(f"{'memory' if sample else f'round {round_ + 1} of {args.rounds}'}: {engine}, {dtype}")
                run = measure(engine, command(engine, dtype, shape, args, data), shape, args.ranks, sample=sample)
                result = results[engine, dtype]
                result.sampled, result.runs = (run, result.runs) if sample else (None, [*result.runs, run])
    report(args, results)


def report(args: argparse.Namespace, results: dict[tuple[str, str], Results]) -> None:
    rows: list[dict[str, Any]] = []
    for (engine, dtype), result in results.items():
        peer = results["fsdp2", dtype]
        assert result.sampled is not None and peer.sampled is not None
        row: dict[str, Any] = {"dtype": dtype, "engine": engine, "ranks": args.ranks}
        for name in ("tokens_per_second", "startup_seconds"):
            ours, theirs = ([getattr(run, name) for run in runs] for runs in (result.runs, peer.runs))
            row[name] = statistics.median(ours)
            row[f"{name}_ratio"], row[f"{name}_low"], row[f"{name}_high"] = ratio_quartiles(ours, theirs)
        row["pss_mib"] = result.sampled.pss_mib
        row["pss_ratio"] = result.sampled.pss_mib / peer.sampled.pss_mib
        row["loss"] = result.runs[0].last_loss
        rows.append(row)

    def ratio(row: dict[str, Any], name: str) -> str:
        return f"{row[f'{name}_ratio']:.2f} [{row[f'{name}_low']:.2f} {row[f'{name}_high']:.2f}]"

    columns = ["dtype", "engine", "tokens/s", "ratio", "start-up s", "ratio", "PSS MiB", "ratio", "loss"]
    print()
    print(
        table(
            columns,
            [
                [
                    row["dtype"],
                    row["engine"],
                    f"{row['tokens_per_second']:.0f}",
                    ratio(row, "tokens_per_second"),
                    f"{row['startup_seconds']:.2f}",
                    ratio(row, "startup_seconds"),
                    f"{row['pss_mib']:.0f}",
                    f"{row['pss_ratio']:.2f}",
                    f"{row['loss']:.2f}",
                ]
                for row in rows
            ],
            left=2,
        )
    )
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        series = {e: [r["tokens_per_second"] for r in rows if r["engine"] == e] for e in ENGINES}
        beside = {e: [r["pss_mib"] for r in rows if r["engine"] == e] for e in ENGINES}
        write_png(
            args.png,
            f"Trainers, {args.ranks} ranks",
            args.dtypes,
            {name: list(values) for name, values in series.items()},
            "tokens/s",
            beside=("PSS of all ranks, MiB", {name: list(values) for name, values in beside.items()}),
        )


if __name__ == "__main__":
    main()
