"""What the benchmarks share: groups of worker processes, ratios, tables, CSV, PNG, and the machine's facts."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import json
import math
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Reply = dict[str, Any]

# Replies travel on a pipe of their own: libraries print to stdout.
_REPLY_FD = "BENCHMARK_REPLY_FD"


# ---- worker processes ------------------------------------------------------------------------------------------------


class WorkerGroup:
    """Rank processes of one script that stay alive and, when not asked for anything, sleep in a read.

    Each runs ``python SCRIPT --worker SPEC`` where SPEC is ``spec`` plus ``rank``, ``ranks`` and ``store`` (a file for
    torch.distributed's FileStore) as JSON, with one OpenMP thread. Use as a context manager.
    """

    def __init__(
        self, script: Path, spec: dict[str, Any], ranks: int, name: str, timeout_seconds: float = 1800
    ) -> None:
        self.name = name
        self.timeout_seconds = timeout_seconds
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._replies: list[int] = []
        self._pending: list[bytes] = []
        for rank in range(ranks):
            full = {**spec, "rank": rank, "ranks": ranks, "store": str(Path(self._directory.name) / "store")}
            read_fd, write_fd = os.pipe()
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", _REPLY_FD: str(write_fd)}
            with open(self._log(rank), "wb") as log:
                process = subprocess.Popen(
                    [sys.executable, str(script), "--worker", json.dumps(full)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(write_fd,),
                    env=environment,
                )
            os.close(write_fd)
            self._processes.append(process)
            self._replies.append(read_fd)
            self._pending.append(b"")

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, command: str, **arguments: Any) -> None:
        """Tells all ranks to run ``command``."""
        line = json.dumps({"command": command, **arguments}).encode() + b"\n"
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                raise self._failure(rank, "has ended") from None

    def receive(self, while_waiting: Callable[[], None] | None = None, period_seconds: float = 0.01) -> list[Reply]:
        """One reply per rank, in rank order. Raises RuntimeError, with the end of its output, where a rank fails.

        ``while_waiting`` is called every ``period_seconds`` until all have answered.
        """
        deadline = time.monotonic() + self.timeout_seconds
        replies: dict[int, Reply] = {}
        while len(replies) < len(self._processes):
            if while_waiting is not None:
                while_waiting()
            missing = {fd: rank for rank, fd in enumerate(self._replies) if rank not in replies}
            for fd in select.select(list(missing), [], [], period_seconds if while_waiting else 1.0)[0]:
                rank = missing[fd]
                data = os.read(fd, 1 << 16)
                if not data:
                    raise self._failure(rank, "has ended")
                self._pending[rank] += data
                line, newline, rest = self._pending[rank].partition(b"\n")
                if newline:
                    self._pending[rank] = rest
                    replies[rank] = json.loads(line)
                    if "error" in replies[rank]:
                        raise RuntimeError(f"{self.name}, rank {rank} failed:\n{replies[rank]['error']}")
            if time.monotonic() > deadline:
                rank = min(missing.values())
                raise self._failure(rank, f"has not answered within {self.timeout_seconds:.0f} s")
        return [replies[rank] for rank in range(len(self._processes))]

    def call(self, command: str, **arguments: Any) -> list[Reply]:
        """``send`` and ``receive``."""
        self.send(command, **arguments)
        return self.receive()

    def close(self) -> None:
        """Ends the processes: politely, then not."""
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except BrokenPipeError:  # it ended before it read its last command
                    continue
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for fd in self._replies:
            os.close(fd)
        self._replies = []
        self._processes = []
        self._directory.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank{rank}.log"

    def _failure(self, rank: int, what: str) -> RuntimeError:
        output = self._log(rank).read_text(errors="replace")[-3000:]
        code = self._processes[rank].poll()
        return RuntimeError(f"{self.name}, rank {rank} {what} (exit status {code}). End of its output:\n{output}")


def serve(handlers: dict[str, Callable[..., Reply]]) -> None:
    """The worker's loop: runs the handler of each command that arrives, until its parent closes the pipe or ends.

    An exception is answered with its traceback and ends the worker.
    """
    with os.fdopen(int(os.environ[_REPLY_FD]), "w", buffering=1) as replies:
        for line in sys.stdin:
            message = json.loads(line)
            try:
                reply = handlers[message.pop("command")](**message)
            except Exception:
                replies.write(json.dumps({"error": traceback.format_exc()}) + "\n")
                raise
            replies.write(json.dumps(reply) + "\n")


def init_gloo(spec: dict[str, Any]) -> None:
    """Joins the group of this worker's ranks."""
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec['store']}",
        rank=spec["rank"],
        world_size=spec["ranks"],
        timeout=datetime.timedelta(minutes=30),
    )


# ---- the machine -----------------------------------------------------------------------------------------------------


def machine() -> dict[str, str]:
    """What a number is worth nothing without: processor, cores, memory, PyTorch, date."""
    import torch

    from torchtitan_npu.launch.processor import processor_name

    def yes(supported: bool) -> str:
        return "yes" if supported else "no"

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": processor_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory_bytes / 2**30:.0f} GiB",
        "bf16_matmul": yes(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def header(title: str, notes: Iterable[str]) -> str:
    """Title, machine, load, and one line per note."""
    facts = machine()
    load = os.getloadavg()[0]
    lines = [
        title,
        f"  machine: {facts['cpu']}, {facts['cores']} cores, {facts['memory']}; load average at start {load:.1f}; "
        f"fast bfloat16 matrix products: {facts['bf16_matmul']}",
        f"  torch {facts['torch']}, Python {facts['python']}, {facts['date']}",
    ]
    return "\n".join(lines + [f"  {note}" for note in notes])


def available_bytes() -> int:
    """Memory that processes can still take (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def progress(text: str) -> None:
    """One line to stderr, with the time."""
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


# ---- results ---------------------------------------------------------------------------------------------------------


def ratio_quartiles(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Median, first and third quartile of ``ours[i] / theirs[i]``, i counting rounds in which both were measured."""
    per_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(per_round) == 1:
        return per_round[0], per_round[0], per_round[0]
    low, middle, high = statistics.quantiles(per_round, n=4, method="inclusive")
    return middle, low, high


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Plain-text table; the first ``left`` columns are left-aligned."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for row in [columns, ["-" * width for width in widths], *rows]:
        cells = [row[i].ljust(widths[i]) if i < left else row[i].rjust(widths[i]) for i in range(len(columns))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One line per row, all with the first row's keys; the machine's facts are appended as columns. None is empty."""
    facts = machine()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *facts])
        writer.writeheader()
        for row in rows:
            rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in row.items()}
            writer.writerow({**rounded, **facts})


_INCHES_OF_A_LETTER = 0.08  # at 8 points, with some room


def write_png(
    path: Path,
    title: str,
    groups: Sequence[str],
    series: dict[str, Sequence[float | None]],
    ylabel: str,
    labels: dict[str, Sequence[str]] | None = None,
    log_scale: bool = False,
    beside: tuple[str, dict[str, Sequence[float | None]]] | None = None,
) -> None:
    """Grouped bars: one group per entry of ``groups``, one bar per series (None: no bar), ``labels`` above the bars.

    ``beside``: label and series of a second picture to the right, for what has another unit.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pictures = [(ylabel, series)] + ([] if beside is None else [beside])
    # No label reaches into the next one's: each has room for its longest word, and is broken between words.
    room = max(len(word) for group in groups for word in group.split()) * _INCHES_OF_A_LETTER
    widths = [max(7.0 / len(pictures) - 2, len(groups) * max(0.5 * len(drawn), room)) for _, drawn in pictures]
    letters = int(min(widths) / len(groups) / _INCHES_OF_A_LETTER)
    names = ["\n".join(textwrap.fill(line, letters) for line in group.split("\n")) for group in groups]
    width = sum(widths) + 2 * len(pictures)
    figure, all_axes = pyplot.subplots(1, len(pictures), figsize=(width, 4.5), squeeze=False)
    for axes, (label, drawn) in zip(all_axes[0], pictures, strict=True):
        bar_width = 0.8 / len(drawn)
        for i, (name, values) in enumerate(drawn.items()):
            positions = [g + (i - (len(drawn) - 1) / 2) * bar_width for g in range(len(groups))]
            bars = axes.bar(positions, [value or 0.0 for value in values], bar_width, label=name)
            if labels is not None and name in labels:
                axes.bar_label(bars, labels[name], fontsize=7, padding=1)
        axes.set_xticks(range(len(groups)), names, fontsize=8)
        axes.set_ylabel(label)
        axes.margins(y=0.12)
        if len(drawn) > 1:  # the axis names the only one
            axes.legend(fontsize=8, ncols=min(4, len(drawn)), loc="upper center", bbox_to_anchor=(0.5, -0.08))
    axes = all_axes[0][0]
    if log_scale:
        smallest = min(value for values in series.values() for value in values if value)
        axes.set_yscale("log")
        axes.set_ylim(bottom=10 ** math.floor(math.log10(smallest)))
    facts = machine()
    figure.suptitle(title, fontsize=11)
    axes.set_title(
        f"{facts['cpu']}, {facts['cores']} cores, torch {facts['torch']}, {facts['date']}", fontsize=8, loc="left"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def require_package(way_out: str) -> None:
    """Refuses before anything is measured when torchtitan_npu is not installed."""
    if importlib.util.find_spec("torchtitan_npu") is None:
        raise SystemExit(f"the package torchtitan_npu is not installed: `pip install .` in the repository{way_out}")


def require_plotting(png: Path | None) -> None:
    """Refuses before anything is measured when ``--png`` cannot be served."""
    if png is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"--png {png}: needs matplotlib ({error}); install it or leave the option out") from error


# ---- options ---------------------------------------------------------------------------------------------------------


def names(choices: Sequence[str]) -> Callable[[str], list[str]]:
    """argparse type: a comma-separated list of different names out of ``choices``."""

    def parse(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",")]
        if not set(chosen) <= set(choices) or len(set(chosen)) != len(chosen):
            raise argparse.ArgumentTypeError(f"{text!r}: must be different names out of {','.join(choices)}")
        return chosen

    return parse


def positive(text: str) -> int:
    """argparse type: a whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number from 1")
    return int(text)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """--csv, --png, --quick, and the worker's own option."""
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--csv", type=Path, default=None, help="write the table's rows here")
    parser.add_argument("--png", type=Path, default=None, help="draw the times here")
    parser.add_argument("--quick", action="store_true", help="tiny and short: a smoke test, not a measurement")
