"""What saving costs training: ours, and torch.distributed.checkpoint on FSDP2, beside a memory copy and plain writes.

    python benchmarks/checkpoint.py --csv checkpoint.csv --png checkpoint.png
    python benchmarks/checkpoint.py --ranks 4 --mib 512 --directory /mnt/disk

Both engines live in the same processes and hold the same model and AdamW state; operations take turns in random order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
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

MIB = 1024**2
WIDTH = 1024
BYTES_PER_PARAMETER = 12  # fp32: weight and two moments
# operation: what its time is divided by, and what that figure has to be
OPERATIONS = {
    "memcpy": None,
    "ours stall": "memcpy",
    "dcp stall": "memcpy",
    "plain write": None,
    "ours save": "plain write",
    "dcp save": "plain write",
    "ours load": "dcp load",
    "ours verify + load": "dcp load",
    "dcp load": None,
}


class Worker:
    """One rank, with both engines."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        import torchtitan_npu
        from torchtitan_npu.checkpoint import CheckpointStore, Saver
        from torchtitan_npu.checkpoint.snapshot import Snapshot
        from torchtitan_npu.checkpoint.tensors import collect, initialize_optimizer_state

        torch.set_num_threads(1)
        init_gloo(spec)
        self.rank, self.dcp, self.dist, self.torch = dist.get_rank(), dcp, dist, torch
        self.root = Path(spec["directory"])
        self.step = 0

        def model() -> nn.Sequential:
            torch.manual_seed(0)
            return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(spec["layers"])))

        def optimizer(wrapped: nn.Module) -> torch.optim.AdamW:
            made = torch.optim.AdamW(wrapped.parameters())
            initialize_optimizer_state(made)
            return made

        theirs, mesh = model(), init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in theirs:
            fully_shard(layer, mesh=mesh)
        fully_shard(theirs, mesh=mesh)
        states = optimizer(theirs).state
        # As flat and as cheap to make as ours: DCP's own get_state_dict() would take longer.
        self.theirs: dict[str, Any] = {f"model.{name}": value for name, value in theirs.state_dict().items()}
        for name, parameter in theirs.named_parameters():
            self.theirs |= {f"optimizer.{name}.{key}": value for key, value in states[parameter].items()}

        fsdp: Any = torchtitan_npu.FSDP  # returns the model, not an FSDP
        self.model = fsdp(model())
        self.optimizer = optimizer(self.model)
        store = CheckpointStore(self.root / "ours")
        if self.rank == 0:
            store.prepare()
        self.store = store

        def saver(async_save: bool) -> Saver:
            cpu = torch.device("cpu")
            return Saver(store, self.model, self.optimizer, sharded=True, device=cpu, async_save=async_save, max_keep=1)

        self.savers = {True: saver(True), False: saver(False)}
        snapshot = self.savers[True]._snapshot
        assert isinstance(snapshot, Snapshot)
        tensors = collect(self.model, self.optimizer, sharded=True)
        self.state_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self.snapshot_bytes = snapshot.bytes
        self.source = torch.ones(self.state_bytes, dtype=torch.uint8)
        self.target = torch.ones_like(self.source)
        self.group = dist.new_group(backend="gloo")

    def facts(self) -> Reply:
        return {"state_bytes": self.state_bytes, "snapshot_bytes": self.snapshot_bytes}

    def measure(self, operation: str) -> Reply:
        """Seconds of one operation, after a barrier; of a stall, the call's alone."""
        self.step += 1
        run: Callable[[], Callable[[], object] | None] = getattr(
            self, "_" + operation.replace(" + ", "_").replace(" ", "_")
        )
        self.dist.barrier()
        start = time.perf_counter()
        afterwards = run()
        seconds = time.perf_counter() - start
        if afterwards is not None:
            afterwards()
        self.dist.barrier()
        return {"seconds": seconds}

    def _memcpy(self) -> None:
        self.target.copy_(self.source)

    def _plain_write(self) -> Callable[[], object]:
        path = self.root / f"plain-{self.rank}"
        with open(path, "wb", buffering=0) as file:
            view = memoryview(self.source.numpy())
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
        return path.unlink

    def _save_ours(self, async_save: bool) -> Callable[[], object]:
        from torchtitan_npu.checkpoint import TrainState

        saver = self.savers[async_save]
        saver.save(TrainState(step=self.step, tokens=0, world_size=self.dist.get_world_size()))
        return saver.result

    def _ours_stall(self) -> Callable[[], object]:
        return self._save_ours(True)

    def _ours_save(self) -> Callable[[], object]:
        return self._save_ours(False)

    def _their_path(self) -> Path:
        return self.root / f"dcp-{self.step}"

    def _keep_theirs(self) -> None:
        """Only the newest."""
        self.dist.barrier()
        if self.rank == 0:
            for path in self.root.glob("dcp-*"):
                if path != self._their_path():
                    shutil.rmtree(path)
        self.their_newest = self._their_path()

    def _dcp_stall(self) -> Callable[[], object]:
        future: Any = self.dcp.async_save(self.theirs, checkpoint_id=self._their_path(), process_group=self.group)

        def wait() -> None:
            getattr(future, "upload_completion", future).result()
            self._keep_theirs()

        return wait

    def _dcp_save(self) -> Callable[[], object]:
        self.dcp.save(self.theirs, checkpoint_id=self._their_path(), process_group=self.group)
        return self._keep_theirs

    def _dcp_load(self) -> None:
        self.dcp.load(self.theirs, checkpoint_id=self.their_newest, process_group=self.group)

    def _ours_load(self) -> None:
        from torchtitan_npu.checkpoint import load

        path = self.store.path(self.store.steps()[-1])
        load(path, self.model, self.optimizer, sharded=True, device=self.torch.device("cpu"))

    def _ours_verify_load(self) -> None:
        from torchtitan_npu.train.resume import choose_checkpoint

        assert choose_checkpoint("auto", self.store) is not None
        self._ours_load()


def work(spec: dict[str, Any]) -> None:
    """The worker process."""
    worker = Worker(spec)
    serve({"measure": worker.measure, "facts": worker.facts})


def measure(group: WorkerGroup, rounds: int, seed: int) -> list[dict[str, Any]]:
    """One row per operation; seconds of the slowest rank."""
    order = random.Random(seed)
    facts = group.call("facts")
    state_bytes = sum(reply["state_bytes"] for reply in facts)
    seconds: dict[str, list[float]] = {operation: [] for operation in OPERATIONS}
    # Loads need something to load; the first of each warms up buffers and caches.
    for operation in OPERATIONS:
        if not operation.endswith("load"):
            group.call("measure", operation=operation)
    for number in range(rounds):
        for operation in order.sample(list(OPERATIONS), len(OPERATIONS)):
            replies = group.call("measure", operation=operation)
            seconds[operation].append(max(reply["seconds"] for reply in replies))
        progress(f"round {number + 1} of {rounds}")
    rows = []
    for operation, base in OPERATIONS.items():
        ratio = ratio_quartiles(seconds[operation], seconds[base]) if base else (None, None, None)
        middle = statistics.median(seconds[operation])
        rows.append(
            {
                "operation": operation,
                "median_s": middle,
                "min_s": min(seconds[operation]),
                "gib_per_s": state_bytes / 2**30 / middle,
                "base": base or "",
                "ratio": ratio[0],
                "ratio_q1": ratio[1],
                "ratio_q3": ratio[2],
                "state_mib_per_rank": facts[0]["state_bytes"] / MIB,
                "snapshot_mib_per_rank": facts[0]["snapshot_bytes"] / MIB,
            }
        )
    ours, theirs = seconds["ours stall"], seconds["dcp stall"]
    low_mid_high = ratio_quartiles(ours, theirs)
    stall = next(row for row in rows if row["operation"] == "ours stall")
    rows.append(
        {**stall, "base": "dcp stall", **dict(zip(("ratio", "ratio_q1", "ratio_q3"), low_mid_high, strict=True))}
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--ranks", type=positive, default=2, help="processes (2)")
    parser.add_argument(
        "--mib", type=positive, default=None, help="weights and moments per rank (256; 24 with --quick)"
    )
    parser.add_argument("--rounds", type=positive, default=None, help="turns of every operation (7; 2 with --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    parser.add_argument(
        "--directory", type=Path, default=None, help="on the disk to write to (the system's for temporary files)"
    )
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    require_plotting(args.png)
    require_package("")
    mib, rounds = args.mib or (24 if args.quick else 256), args.rounds or (2 if args.quick else 7)
    layers = max(1, mib * MIB * args.ranks // (BYTES_PER_PARAMETER * WIDTH**2))
    print(
        header(
            "Checkpoints" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"{layers} linear layers {WIDTH} x {WIDTH}, fp32, AdamW; {args.ranks} ranks, 1 thread each; {rounds} "
                f"rounds in random order (seed {args.seed})",
                "seconds of the slowest rank; stall: of the call that saves in the background; save: until all is "
                "on disk (fsync), ours with checksums, rename and marker",
                "load: files in the page cache; verify: every byte is read first, each rank its share; ratio: to the "
                "base in the same round",
            ],
        ),
        flush=True,
    )
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-checkpoint-") as directory:
        spec = {"layers": layers, "directory": directory}
        with WorkerGroup(Path(__file__), spec, args.ranks, "checkpoints") as group:
            rows = measure(group, rounds, args.seed)
    columns = ["operation", "median s", "min s", "GiB/s, all ranks", "/ base [quartiles]", "base"]
    cells = [
        [row["operation"], f"{row['median_s']:.3f}", f"{row['min_s']:.3f}", f"{row['gib_per_s']:.2f}"]
        + [f"{row['ratio']:.2f} [{row['ratio_q1']:.2f} {row['ratio_q3']:.2f}]" if row["ratio"] else "-", row["base"]]
        for row in rows
    ]
    print("\n" + table(columns, cells))
    first = rows[0]
    print(
        f"host memory of the snapshot: {first['snapshot_mib_per_rank']:.1f} MiB per rank, of "
        f"{first['state_mib_per_rank']:.1f} MiB of tensors",
        flush=True,
    )
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        drawn = rows[:-1]
        write_png(
            args.png,
            f"Checkpoints, {args.ranks} ranks, {first['state_mib_per_rank']:.0f} MiB each",
            [row["operation"].replace(" ", "\n") for row in drawn],
            {"seconds": [row["median_s"] for row in drawn]},
            "median seconds",
        )


if __name__ == "__main__":
    main()
