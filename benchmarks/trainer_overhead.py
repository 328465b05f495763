"""What the trainer adds to a step: beside it, a bare loop of the same model, engine, loss, optimizer and batches.

    python benchmarks/trainer_overhead.py --csv trainer_overhead.csv --png trainer_overhead.png
    python benchmarks/trainer_overhead.py --shapes small --pairs 500

The trainer runs its own loop, with all that a user gets: batches from files, the exchange of losses between ranks,
log lines, metrics.jsonl, TensorBoard, progress, signals, checks for checkpoints. Before each of its steps the bare loop
does one of its own, in the same processes: forward and backward, clipping, optimizer. Both see the same batches from
the same weights, so their gradients have to be the same, too.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
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
    require_package,
    require_plotting,
    serve,
    table,
    write_csv,
    write_png,
)
from model import Shape

SHAPES = {
    "small": Shape(dim=128, layers=4, heads=4, ffn=352, vocab=1024, seq=128, batch=2),
    "default": Shape(),
}
QUICK_SHAPE = Shape(dim=32, layers=2, heads=2, ffn=64, vocab=256, seq=16, batch=1)
WARMUP_PAIRS = 3


class Bare:
    """What a step cannot do without."""

    def __init__(self, trainer: Any, pairs: int) -> None:
        from torchtitan_npu.train.loss import StepLoss, count_valid_labels
        from torchtitan_npu.train.optimizer import build_optimizer
        from torchtitan_npu.train.parallelize import parallelize
        from torchtitan_npu.train.setup import open_loader

        cfg, degrees = trainer.cfg, trainer.degrees
        self.max_norm = cfg.training.max_grad_norm
        self.model = parallelize(cfg, trainer.device)
        self.optimizer = build_optimizer(self.model.module.named_parameters(), self.model.decayed, cfg)
        loader = open_loader(cfg, trainer.args, trainer.env, degrees, trainer.device)
        batches = [next(loader) for _ in range(pairs)]
        loader.close()
        valid = [count_valid_labels([batch], degrees) for batch in batches]
        losses = [StepLoss(cfg, valid_labels=count, dp_degree=degrees.dp, loss_scale=1.0) for count in valid]
        self.steps = list(zip(batches, losses, strict=True))

    def step(self, number: int) -> float:
        """The norm of the gradient."""
        batch, loss_of = self.steps[number]
        with self.model.micro_batch(last=True):
            scaled, _ = loss_of(self.model, batch.inputs, batch.labels, None)
            scaled.backward()
        norm = self.model.clip_grad_norm(self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)


class Turns:
    """Stands in for the trainer's profiling, which it calls between steps, and takes the bare loop's turns there.

    Ranks wait for each other before every time that is taken: what one does alone delays all. Rank 0's times count.
    """

    def __init__(self, trainer_module: Any, trainer: Any, bare: Bare) -> None:
        self._inner, self._bare = trainer._profiling, bare
        self.wall: dict[str, list[float]] = {"trainer": [], "bare": []}
        self.cpu: dict[str, list[float]] = {"trainer": [], "bare": []}
        self.norms: list[float] = []
        self._began = (0.0, 0.0)
        self.elsewhere: list[float] = []
        """Of each step: clipping, and waits for other ranks before the trainer's own two exchanges with them."""
        self._clip_gradients = trainer.model.clip_grad_norm
        trainer.model.clip_grad_norm = self._timed_clip
        for name in ("count_valid_labels", "gather_rows"):
            setattr(trainer_module, name, self._after_waiting(getattr(trainer_module, name)))

    def before_step(self, step: int) -> None:
        if step > 1:
            self._take("trainer")
        self._start()
        self.norms.append(self._bare.step(step - 1))
        self._take("bare")
        self.elsewhere.append(0.0)
        self._start()
        self._inner.before_step(step)

    def _timed_clip(self, max_norm: float | None) -> float:
        start = time.perf_counter()
        norm: float = self._clip_gradients(max_norm)
        self.elsewhere[-1] += time.perf_counter() - start
        return norm

    def _after_waiting(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """A rank that is ahead waits here, where it would otherwise in its next gather."""
        import torch.distributed as dist

        def waiting(*arguments: Any) -> Any:
            start = time.perf_counter()
            dist.barrier()
            self.elsewhere[-1] += time.perf_counter() - start
            return exchange(*arguments)

        return waiting

    def _start(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        self._began = time.perf_counter(), time.process_time()

    def _take(self, name: str) -> None:
        import torch.distributed as dist

        dist.barrier()
        wall, cpu = self._began
        self.wall[name].append(time.perf_counter() - wall)
        self.cpu[name].append(time.process_time() - cpu)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measure(spec: dict[str, Any]) -> Reply:
    """Seconds of the trainer's and the bare loop's steps, wall and CPU time, pair by pair."""
    import torch

    from torchtitan_npu.config import RunArgs, config_from_dict
    from torchtitan_npu.launch import connect, read_environment, read_timeouts, reset_logging, setup_logging
    from torchtitan_npu.train import trainer as trainer_module

    torch.set_num_threads(1)
    rank, ranks, pairs = str(spec["rank"]), str(spec["ranks"]), spec["pairs"] + WARMUP_PAIRS
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(spec["port"])}
    env, device = read_environment(), torch.device("cpu")
    connect(env, read_timeouts(), device)
    folder = Path(spec["folder"])
    args = RunArgs(data_dir=str(folder / "data.jsonl"), checkpoint_dir=folder / "checkpoints", log_dir=folder / "logs")
    setup_logging(env.rank, env.world_size, args.log_dir)
    # The last step saves, and is not measured.
    cfg = config_from_dict(configuration(Shape(**spec["shape"]), spec["dtype"], max_steps=pairs + 1))
    trainer = trainer_module.Trainer(cfg, args, env, device)
    turns = Turns(trainer_module, trainer, Bare(trainer, pairs + 1))
    trainer._profiling = turns  # type: ignore[assignment]
    trainer.train()
    trainer.close()
    reset_logging()
    kept = slice(WARMUP_PAIRS, pairs)
    besides = []
    if env.rank == 0:
        records = [json.loads(line) for line in (args.log_dir / "metrics.jsonl").read_text().splitlines()]
        theirs = [record["grad_norm"] for record in records]
        if theirs != turns.norms:
            raise RuntimeError(f"the trainer's gradients are not the bare loop's: norms {theirs}, {turns.norms}")
        for whole, elsewhere, record in list(zip(turns.wall["trainer"], turns.elsewhere, records, strict=False))[kept]:
            parts = (record[f"{name}_time"] for name in ("forward", "backward", "optimizer"))
            besides.append(whole - elsewhere - sum(parts))
    return {
        "besides": besides,
        "wall": {name: seconds[kept] for name, seconds in turns.wall.items()},
        "cpu": {name: seconds[kept] for name, seconds in turns.cpu.items()},
    }


def configuration(shape: Shape, dtype: str, max_steps: int) -> dict[str, Any]:
    """As a user would write it, but for saves: there are none before the end."""
    model = {"name": "llama3_debug", "dim": shape.dim, "n_layers": shape.layers, "n_heads": shape.heads}
    model |= {"n_kv_heads": shape.heads, "ffn_dim": shape.ffn, "vocab_size": shape.vocab, "max_seq_len": shape.seq}
    training = {"batch_size": shape.batch, "learning_rate": 1e-3, "max_steps": max_steps, "warmup_steps": 0}
    training |= {"lr_schedule": "constant", "resume": "none", "checkpoint": {"save_interval": 0}}
    return {
        "model": model | {"use_flash_attention": True},
        "training": training,
        "parallel": {"dtype": dtype},
    }


def run(name: str, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    import numpy as np

    with tempfile.TemporaryDirectory(prefix="bench-") as folder, socket.socket() as free:
        count = (args.pairs + WARMUP_PAIRS + 2) * args.ranks * shape.batch * shape.seq
        tokens = np.random.default_rng(0).integers(0, shape.vocab, count)
        (Path(folder) / "data.jsonl").write_text(json.dumps({"tokens": tokens.tolist()}) + "\n")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        spec = {"shape": asdict(shape), "pairs": args.pairs, "dtype": args.dtype, "folder": folder, "port": port}
        with WorkerGroup(Path(__file__), spec, args.ranks, name) as group:
            replies = group.call("measure")
    wall = replies[0]["wall"]
    added = [trainer - bare for trainer, bare in zip(wall["trainer"], wall["bare"], strict=True)]
    bare, besides = statistics.median(wall["bare"]), statistics.median(replies[0]["besides"])
    low, middle, high = statistics.quantiles(added, n=4, method="inclusive") if len(added) > 1 else added * 3

    def cpu(of: Callable[[dict[str, list[float]]], list[float]]) -> float:
        """Of all ranks together."""
        return sum(statistics.median(of(reply["cpu"])) for reply in replies)

    return {
        "shape": name,
        "parameters": shape.parameters,
        "ranks": args.ranks,
        "dtype": args.dtype,
        "pairs": len(added),
        "bare_seconds": bare,
        "trainer_seconds": statistics.median(wall["trainer"]),
        "added_seconds": middle,
        "added_seconds_q1": low,
        "added_seconds_q3": high,
        "added_fraction": middle / bare,
        "besides_seconds": besides,
        "besides_fraction": besides / bare,
        "cpu_bare_seconds": cpu(lambda of: of["bare"]),
        "cpu_added_seconds": cpu(lambda of: [t - b for t, b in zip(of["trainer"], of["bare"], strict=True)]),
    }


def main() -> None:
    require_package("")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--shapes", type=names(tuple(SHAPES)), default=list(SHAPES), help="(small,default)")
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument("--pairs", type=positive, default=None, help="of steps that are compared (60; 2 with --quick)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="(fp32)")
    args = parser.parse_args()
    if args.worker:
        spec = json.loads(args.worker)
        serve({"measure": lambda: measure(spec)})
        return
    require_plotting(args.png)
    args.pairs = args.pairs or (2 if args.quick else 60)
    shapes = {"quick": QUICK_SHAPE} if args.quick else {name: SHAPES[name] for name in args.shapes}
    print(
        header(
            "Trainer overhead" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"{args.ranks} ranks x 1 thread, {args.dtype}; {args.pairs} pairs of one step of the bare loop and one "
                f"of the trainer, after {WARMUP_PAIRS} that do not count; a log line every 10 steps, no checkpoints",
                "added: trainer - bare of the same pair, median [quartiles], rank 0, from barrier to barrier",
                "besides: what of the trainer's own step is not forward, backward, clipping, optimizer or a wait for "
                "the other rank",
                "CPU: of all ranks and their threads",
            ],
        ),
        flush=True,
    )
    rows = []
    for name, shape in shapes.items():
        progress(f"{name}: {shape.parameters / 1e6:.1f} M parameters")
        rows.append(run(name, shape, args))
    columns = [
        "shape",
        "M parameters",
        "bare ms",
        "trainer ms",
        "added ms [quartiles]",
        "besides ms",
        "%",
        "CPU ms",
        "added",
    ]
    cells = [
        [row["shape"], f"{row['parameters'] / 1e6:.1f}"]
        + [f"{1e3 * row[key]:.1f}" for key in ("bare_seconds", "trainer_seconds")]
        + ["{:.2f} [{:.2f} {:.2f}]".format(*(1e3 * row[f"added_seconds{end}"] for end in ("", "_q1", "_q3")))]
        + [f"{1e3 * row['besides_seconds']:.2f}", f"{100 * row['besides_fraction']:.2f}"]
        + [f"{1e3 * row[key]:.2f}" for key in ("cpu_bare_seconds", "cpu_added_seconds")]
        for row in rows
    ]
    print("\n" + table(columns, cells), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        series = {key: [1e3 * row[f"{key}_seconds"] for row in rows] for key in ("bare", "trainer")}
        beside = ("% of a bare step", {"besides": [100 * row["besides_fraction"] for row in rows]})
        title = f"A step of the trainer, {args.ranks} ranks, {args.dtype}"
        write_png(args.png, title, list(shapes), dict(series), "ms", beside=beside)


if __name__ == "__main__":
    main()
