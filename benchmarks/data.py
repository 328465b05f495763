"""From a JSONL of tokens to batches: ours beside json, Hugging Face datasets, and the loaders of torch and torchdata.

    python benchmarks/data.py --csv data.csv --png data.png
    python benchmarks/data.py --rounds 9 --directory /mnt/disk

Engines take turns. Rates of indexing are of processor time, all threads counted: tokens per second and core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import (
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

Row = dict[str, Any]

SEQ_LEN = 2048
BATCH_SIZE = 4
VOCAB_SIZE = 128256
ROOT = Path(__file__).resolve().parents[1]


def row(subject: str, engine: str, value: float, unit: str, base: str = "", ratio: float | None = None) -> Row:
    return {"subject": subject, "engine": engine, "value": value, "unit": unit, "base": base, "ratio": ratio}


def write_tokens(path: Path, documents: int) -> int:
    """A JSONL as prepare writes it: documents of 50 to 1,500 tokens, ids as frequent as words are. Returns tokens."""
    random = np.random.default_rng(0)
    total = 0
    with path.open("w") as file:
        for _ in range(documents):
            tokens = np.minimum(random.zipf(1.3, int(random.integers(50, 1500))), VOCAB_SIZE - 1).tolist()
            total += len(tokens)
            file.write(json.dumps({"tokens": tokens, "length": len(tokens)}) + "\n")
    return total


# ---- indexing --------------------------------------------------------------------------------------------------------


def index_ours(path: Path) -> int:
    from torchtitan_npu.data import build_index

    for suffix in (".idx", ".bin"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    return build_index(path, VOCAB_SIZE).tokens


def index_json(path: Path) -> int:
    total = 0
    with path.open("rb") as file:
        for line in file:
            total += len(json.loads(line)["tokens"])
    return total


def index_datasets(path: Path) -> int:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory(dir=path.parent) as cache:
        loaded = datasets.load_dataset("json", data_files=str(path), cache_dir=cache, split="train")
        return int(sum(loaded["length"]))


def indexing(directory: Path, rounds: int, documents: int) -> list[Row]:
    path = directory / "train.jsonl"
    total = write_tokens(path, documents)
    engines: dict[str, Callable[[Path], int]] = {
        "ours": index_ours,
        "json.loads": index_json,
        "datasets": index_datasets,
    }
    few = directory / "few.jsonl"
    count = write_tokens(few, 10)
    for name, index in engines.items():  # the first time, they import
        if index(few) != count:
            raise RuntimeError(f"{name} does not find {count} tokens")
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name, index in engines.items():
            start = time.process_time()
            found = index(path)
            rates[name].append(total / (time.process_time() - start) / 1e6)
            if found != total:
                raise RuntimeError(f"{name} found {found} tokens of {total}")
        progress(f"indexing, round {turn + 1} of {rounds}")
    rows = []
    for name in engines:
        for base in ("json.loads", "datasets") if name == "ours" else ("",):
            ratio = statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True)) if base else None
            rows.append(row("index a JSONL", name, statistics.median(rates[name]), "M tokens/s/core", base, ratio))
    return rows


# ---- batches ---------------------------------------------------------------------------------------------------------


def fetch(directory: Path, rounds: int, batches: int) -> list[Row]:
    """The same batches, cut where they are asked for, by a thread ahead, and by a process ahead in two loaders.

    torchdata's StatefulDataLoader is a DataLoader that can say where it is, after every batch.
    """
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    from torchtitan_npu.data import PackedLoader, open_dataset

    data = open_dataset(directory / "train.jsonl", VOCAB_SIZE)
    options = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "ahead": 8}
    plain, ahead = (PackedLoader(data, num_workers=workers, **options) for workers in (0, 1))  # type: ignore[arg-type]
    step = BATCH_SIZE

    class Batches(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return batches

        def __getitem__(self, index: int) -> Any:
            batch = plain.at(index * step % plain.samples_per_epoch)
            return batch.inputs, batch.labels, batch.document_ids

    def rate(name: str) -> float:
        source: Any = {"inline": plain, "1 thread": ahead}.get(name)
        if source is None:
            loader: Any = {"DataLoader": torch.utils.data.DataLoader, "StatefulDataLoader": StatefulDataLoader}
            source = iter(loader[name.partition(",")[0]](Batches(), batch_size=None, num_workers=1, prefetch_factor=8))
        next(source)
        start = time.perf_counter()
        for _ in range(batches - 1):
            next(source)
        return (batches - 1) * BATCH_SIZE * SEQ_LEN / (time.perf_counter() - start) / 1e6

    names = {"inline": "", "1 thread": "inline"}
    names |= {f"{loader}, 1 process": "1 thread" for loader in ("DataLoader", "StatefulDataLoader")}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            rates[name].append(rate(name))
    ahead.close()
    progress("batches")
    return [
        row(
            "fetch batches",
            name,
            statistics.median(rates[name]),
            "M tokens/s",
            base,
            statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True)) if base else None,
        )
        for name, base in names.items()
    ]


# ---- large corpora ---------------------------------------------------------------------------------------------------


def pretend(directory: Path, gigabytes: float) -> Path:
    """A converted JSONL whose .bin has that size: sparse files of token 0, in documents of 500.

    Larger than 0.25 GB, so that its tokens are not compared with a digest when it is opened.
    """
    from torchtitan_npu.data import index_file

    source = directory / f"{gigabytes:g}.jsonl"
    documents = int(gigabytes * 1e9) // 2 // 500
    tokens = 500 * documents
    source.touch()
    os.truncate(source, 5 * tokens)
    stat = source.stat()
    digest = index_file.content_hash().hexdigest()
    header_ = {
        "version": index_file.FORMAT_VERSION,
        "size": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "digest": digest,
        "dtype": "<u2",
        "documents": documents,
        "tokens": tokens,
        "largest_id": 0,
        "tokens_digest": "",
    }
    binary = source.with_name(source.name + ".bin")
    binary.write_bytes(index_file.bin_header(digest))
    os.truncate(binary, index_file.BIN_HEADER_BYTES + 2 * tokens)
    hashed = index_file.content_hash()
    with source.with_name(source.name + ".idx").open("wb") as idx:
        idx.seek(index_file.IDX_HEADER_BYTES)
        for start in range(0, documents + 1, 1 << 20):
            part = 500 * np.arange(start, min(start + (1 << 20), documents + 1), dtype=np.int64)
            hashed.update(part.data)
            idx.write(part.data)
        idx.seek(0)
        idx.write(index_file.idx_header(header_ | {"offsets_digest": hashed.hexdigest()}))
    return source


# A process of its own: opens a corpus and reads some samples all over it.
_OPEN = """
import json, sys, time
from torchtitan_npu.data import PackedLoader, open_dataset

def kib(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))

path, seq_len, samples = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
before = kib("RssAnon:")
start = time.perf_counter()
loader = PackedLoader(open_dataset(path, 65536), batch_size=1, seq_len=seq_len)
opened = time.perf_counter() - start
batches = [next(loader) for _ in range(2)]
first = time.perf_counter() - start
for _ in range(samples):
    next(loader)
print(json.dumps({"opened": opened, "first": first, "grown": kib("RssAnon:") - before, "mapped": kib("RssFile:")}))
"""


def large(directory: Path, rounds: int, sizes: tuple[float, ...]) -> list[Row]:
    rows = []
    for gigabytes in sizes:
        path = pretend(directory, gigabytes)
        found = []
        for _ in range(rounds):
            done = subprocess.run(
                [sys.executable, "-c", _OPEN, str(path), str(SEQ_LEN), "2000"], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            found.append(json.loads(done.stdout))
        for key, unit, factor in (("opened", "ms", 1e3), ("grown", "MiB of its own", 1 / 1024)):
            subject = f"{'open' if key == 'opened' else 'read 2,000 samples of'} {gigabytes:g} GB"
            rows.append(row(subject, "ours", statistics.median(one[key] for one in found) * factor, unit))
        for file in directory.glob(f"{path.name}*"):
            file.unlink()
        progress(f"a corpus of {gigabytes:g} GB")
    return rows


def waiting(directory: Path, steps: int) -> list[Row]:
    """The share of training steps that the loop waits for data: ``llama3_debug`` on one process."""
    rows = []
    for workers in (0, 1):
        logs = directory / f"logs{workers}"
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "examples" / "llama3_debug.yaml")]
        command += ["--data_dir", str(directory / "bytes.jsonl"), "--log_dir", str(logs)]
        command += ["--checkpoint_dir", str(directory / f"checkpoints{workers}"), "--training.max_steps", str(steps)]
        command += ["--training.checkpoint.save_interval", "0", "--data.num_workers", str(workers)]
        path = directory / "bytes.jsonl"
        if not path.exists():
            random = np.random.default_rng(0)
            lines = [json.dumps({"tokens": random.integers(0, 256, 400).tolist()}) for _ in range(500)]
            path.write_text("\n".join(lines) + "\n")
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        steps_ = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()][2:]
        share = statistics.median(100 * step["data_time"] / step["step_time"] for step in steps_)
        rows.append(row("wait for data in training", f"{workers} threads", share, "% of the step"))
    progress("training")
    return rows


def measure(rounds: int, *, quick: bool, directory: Path) -> list[Row]:
    return [
        *indexing(directory, rounds, 300 if quick else 30_000),
        *fetch(directory, rounds, 20 if quick else 300),
        *large(directory, rounds, (0.6,) if quick else (1.0, 10.0)),
        *waiting(directory, 4 if quick else 10),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--rounds", type=positive, default=None, help="turns of every engine (5; 1 with --quick)")
    parser.add_argument("--directory", type=Path, default=None, help="where files are written (the system's temporary)")
    args = parser.parse_args()
    require_plotting(args.png)
    require_package("")
    rounds = args.rounds or (1 if args.quick else 5)
    print(
        header(
            "Data" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"medians of {rounds} rounds; batches of {BATCH_SIZE} x {SEQ_LEN} tokens, packed, shuffled",
                "ratio: median of the rounds' ratios to the base",
            ],
        ),
        flush=True,
    )
    directory = Path(tempfile.mkdtemp(dir=args.directory, prefix="bench-data-"))
    try:
        rows = measure(rounds, quick=args.quick, directory=directory)
    finally:
        shutil.rmtree(directory)
    columns = ["subject", "engine", "median", "unit", "ratio", "base"]
    cells = [
        [
            r["subject"],
            r["engine"],
            f"{r['value']:.4g}",
            r["unit"],
            f"{r['ratio']:.2f}" if r["ratio"] else "-",
            r["base"],
        ]
        for r in rows
    ]
    print("\n" + table(columns, cells, left=2), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        drawn = [r for r in rows if r["unit"].startswith("M tokens") and r["base"] != "datasets"]
        write_png(
            args.png,
            "Tokens from disk to batches",
            [f"{r['subject']}\n{r['engine']}" for r in drawn],
            {"M tokens/s": [r["value"] for r in drawn]},
            "million tokens per second",
            log_scale=True,
        )


if __name__ == "__main__":
    main()
