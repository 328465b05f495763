"""What a step reports: the log line, ``metrics.jsonl`` in full precision, and TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from torchtitan_npu.launch import LaunchError
from torchtitan_npu.train.board import Board
from torchtitan_npu.train.memory import GIB

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, over all ranks."""

    step: int
    loss: float
    """Mean over the valid labels of the step, in nats."""
    grad_norm: float | None
    """Global 2-norm before clipping; None in a step that was skipped because a float16 gradient overflowed."""
    lr: float
    tokens: int
    """Tokens consumed since the start of training."""
    step_time: float
    """Seconds, without checkpoints; ``data_time`` included."""
    data_time: float
    """Seconds spent on getting the step's micro-batches, on rank 0."""
    mem_bytes: int
    """Peak memory of the worst rank: reserved by torch's allocator, or resident on the CPU."""
    mem_allocated_bytes: int | None = None
    """Of what torch's allocator reserved, the peak that tensors used, on the worst rank; None on the CPU."""
    forward_time: float | None = None
    """Seconds in forward passes and losses, on rank 0; None on accelerators, where the host only queues them."""
    backward_time: float | None = None
    """Seconds in backward passes, gradient reductions included, on rank 0; None as for ``forward_time``."""
    optimizer_time: float | None = None
    """Seconds in the optimizer's step, on rank 0; None as for ``forward_time``."""
    checkpoint_time: float = 0.0
    """Seconds that training stood still for saves since the step before, on rank 0; not in ``step_time``."""
    comm_time: float | None = None
    """Seconds that rank 0 was blocked on other ranks in gathers and reductions; None where it is not measured (ddp)."""
    loss_scale: float | None = None
    """By which the next step's loss is multiplied; None where it is not scaled (other dtypes than fp16)."""
    validation_loss: float | None = None
    """On the held-out data after the step, in nats; None where it was not measured."""
    skipped_steps: int | None = None
    """Steps since the start of training that were skipped; None as for ``loss_scale``."""


def format_learning_rate(value: float) -> str:
    """Three significant digits, as short as possible: ``3e-4``, ``2.97e-4``, ``0``."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_step(step: StepMetrics, tokens_per_second: float, capacity_bytes: int) -> str:
    """The log line. GB means GiB.

    >>> [Step 100] loss=7.12, lr=2.7e-4, throughput=620 tokens/s, mem=58.2GB/64GB
    """
    return (
        f"[Step {step.step}] loss={step.loss:.2f}, lr={format_learning_rate(step.lr)}, "
        f"throughput={tokens_per_second:.0f} tokens/s, mem={step.mem_bytes / GIB:.1f}GB/{capacity_bytes / GIB:.0f}GB"
    )


def format_duration(seconds: float) -> str:
    """``1 d 3 h``, ``2 h 5 min``, ``3 min 20 s`` or ``12 s``."""
    minutes, rest = divmod(max(0, math.ceil(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class MetricsWriter:
    """Writes every step to ``log_dir/metrics.jsonl`` and to ``log_dir/tensorboard``. Rank 0 only.

    A resumed run drops the lines after the step it resumes from: those steps are done again. A fresh run sets the file
    of an earlier one aside, as ``metrics.1.jsonl`` and so on.
    """

    def __init__(self, log_dir: Path, *, resumed_step: int) -> None:
        """
        Raises:
            LaunchError: ``log_dir`` cannot be written.
        """
        self.path = log_dir / "metrics.jsonl"
        self.tensorboard_dir = log_dir / "tensorboard"
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
            if resumed_step > 0:
                _drop_after(self.path, resumed_step)
            else:
                _set_aside(self.path)
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())
        except OSError as error:
            raise LaunchError(f"--log_dir {log_dir} cannot be written: {error}; name another directory") from error
        self._board = Board(self.tensorboard_dir, purge_step=resumed_step + 1)

    def write(self, step: StepMetrics, tokens_per_second: float, world_size: int, mfu: float | None = None) -> None:
        """Record one step; ``tokens_per_second`` is global, ``mfu`` a fraction, None where it is not known."""
        per_card = tokens_per_second / world_size
        speed = {"tokens_per_second": tokens_per_second, "tokens_per_second_per_card": per_card, "mfu": mfu}
        record = asdict(step) | speed
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        scalars: dict[str, float | None] = {
            "train/loss": step.loss,
            "train/grad_norm": step.grad_norm,
            "train/loss_scale": step.loss_scale,
            "train/skipped_steps": step.skipped_steps,
            "train/lr": step.lr,
            "validation/loss": step.validation_loss,
            "speed/tokens_per_second": tokens_per_second,
            "speed/tokens_per_second_per_card": per_card,
            "speed/mfu": mfu,
            "speed/step_seconds": step.step_time,
            "speed/data_seconds": step.data_time,
            "speed/communication_seconds": step.comm_time,
            "speed/forward_seconds": step.forward_time,
            "speed/backward_seconds": step.backward_time,
            "speed/optimizer_seconds": step.optimizer_time,
            "speed/checkpoint_seconds": step.checkpoint_time,
            "memory/peak_gib": step.mem_bytes / GIB,
            "memory/allocated_peak_gib": None if step.mem_allocated_bytes is None else step.mem_allocated_bytes / GIB,
        }
        self._board.write(scalars, step.step)

    def close(self) -> None:
        self._file.close()
        self._board.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _drop_after(path: Path, step: int) -> None:
    """Keep the lines of steps up to ``step``; a torn last line goes too."""
    if not path.exists():
        return
    kept = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            logger.warning("%s: a line that is not a record is dropped: %.60s", path, line)
    if len(kept) != len(lines):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)


def _set_aside(path: Path) -> None:
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.replace(path, aside)
    logger.info("%s of an earlier run is now %s", path, aside)
