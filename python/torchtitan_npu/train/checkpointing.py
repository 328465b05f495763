"""When a run saves, and what becomes of the results. Every rank decides the same, from what all told at the step."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torchtitan_npu.checkpoint import CheckpointError, Saver, TrainState
from torchtitan_npu.config import CheckpointConfig
from torchtitan_npu.train.signals import StopSignals

logger = logging.getLogger(__name__)


class Checkpointing:
    """The trainer's side of saving. Per step: ``flags`` on each rank, ``agree`` on all, then ``after_step``."""

    def __init__(self, cfg: CheckpointConfig, saver: Saver, signals: StopSignals, *, rank: int, last: Path | None):
        self._cfg, self._saver, self._signals, self._rank = cfg, saver, signals, rank
        self.last = last
        """The newest checkpoint that is known to be complete."""
        self.failed_steps: list[int] = []
        """Steps whose checkpoints could not be saved."""
        self.stop_signal = 0
        """The signal after which all ranks save and stop, or 0."""
        self._due = False
        self._ready = False
        self._last_save_seconds = time.monotonic()

    def flags(self) -> list[float]:
        """What this rank knows: a signal, that the time is up (rank 0), that its part of a save is done."""
        minutes = self._cfg.save_interval_minutes
        due = self._rank == 0 and minutes > 0 and time.monotonic() - self._last_save_seconds >= 60 * minutes
        return [float(self._signals.received), float(due), float(self._saver.ready)]

    def agree(self, rows: Sequence[Sequence[float]]) -> None:
        """Take in all ranks' ``flags`` of the step."""
        self.stop_signal = int(max(row[0] for row in rows))
        self._due = any(row[1] for row in rows)
        self._ready = all(row[2] for row in rows)

    def after_step(self, step: int, *, final: bool, state: Callable[[], TrainState]) -> None:
        """Report a save that has ended, and save if it is time to. Collective.

        Raises:
            CheckpointError: a save failed, and it was the last one of the run or ``on_save_error`` is stop.
        """
        final = final or self.stop_signal != 0
        if self._ready:
            self._take()
        interval = self._cfg.save_interval
        if not (final or self._due or (interval and step % interval == 0)):
            return
        if self._saver.pending is not None:
            self._wait(step)
        self._last_save_seconds = time.monotonic()
        self._saver.save(state())
        if final or not self._cfg.async_save:
            self._take(final=final)

    def settle(self) -> None:
        """Wait for a save that is under way, so that ``last`` is right; training ends anyway. Collective."""
        if self._saver.pending is not None:
            try:
                self._take()
            except CheckpointError as error:
                self._log(logging.ERROR, str(error))

    def exit_status(self) -> int:
        """0, or 1 after saves that failed; says so."""
        if not self.failed_steps:
            return 0
        steps = ", ".join(map(str, self.failed_steps))
        self._log(
            logging.ERROR,
            f"{len(self.failed_steps)} checkpoint(s) could not be saved, of step(s) {steps} (see above); the last good "
            f"one is {self.last or 'none'}",
        )
        return 1

    def describe(self) -> str:
        """How saving stands, in a few words."""
        if self._saver.pending is not None:
            return f"saving step {self._saver.pending}"
        return f"saved {self.last.name}" if self.last is not None else "nothing saved yet"

    def stopped_by(self) -> str:
        """The name of ``stop_signal``."""
        return signal.Signals(self.stop_signal).name

    def _wait(self, step: int) -> None:
        pending, start = self._saver.pending, time.monotonic()
        self._log(
            logging.WARNING,
            f"step {step} is to be saved, and the checkpoint of step {pending} is still being written: training waits; "
            "raise training.checkpoint.save_interval if this happens often",
        )
        self._take()
        logger.info("training waited %.1f s for the checkpoint of step %d", time.monotonic() - start, pending)

    def _take(self, *, final: bool = False) -> None:
        step = self._saver.pending
        assert step is not None
        try:
            self.last = self._saver.result()
        except CheckpointError as error:
            self.failed_steps.append(step)
            if final or self._cfg.on_save_error == "stop":
                raise
            self._log(logging.ERROR, f"{error}; training goes on and saves again at the next interval")

    def _log(self, level: int, message: str) -> None:
        """What every rank knows is said once."""
        if self._rank == 0:
            logger.log(level, "%s", message)
