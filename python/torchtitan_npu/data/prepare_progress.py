"""How far ``prepare`` is: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from torchtitan_npu.data.prepare_encode import Summary

logger = logging.getLogger(__name__)

_SECONDS = 10.0


class Progress:
    """Counts bytes of the input files as they lie on disk. Close it.

    ``start_bytes`` were read, and ``start_tokens`` written, by the run that is continued.
    """

    def __init__(self, total_bytes: int, start_bytes: int, start_tokens: int) -> None:
        self._start_tokens = start_tokens
        self._total = total_bytes
        self._start = start_bytes
        self._began = self._reported = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_bytes, initial=start_bytes, unit="B", unit_scale=True, desc="prepare", dynamic_ncols=True
            )

    def update(self, read_bytes: int, summary: Summary) -> None:
        if self._bar is not None:
            self._bar.update(read_bytes - self._bar.n)
            return
        now = time.monotonic()
        if now - self._reported >= _SECONDS:
            self._reported = now
            logger.info("%s", self.describe(read_bytes, summary))

    def describe(self, read_bytes: int, summary: Summary) -> str:
        """One line: how much, how fast, and how long it will take."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = (read_bytes - self._start) / seconds
        left = max(self._total - read_bytes, 0)
        eta = f", {_clock(left / rate)} left" if left and rate > 0 else ""
        percent = 100 * read_bytes / max(self._total, 1)
        done, speed = f"{summary.documents:,} documents", f"{rate / 1e6:,.1f} MB/s"
        if summary.tokens:
            done += f", {summary.tokens:,} tokens"
            speed += f", {(summary.tokens - self._start_tokens) / seconds:,.0f} tokens/s"
        return (
            f"{done} from {read_bytes / 1e6:,.1f} of {self._total / 1e6:,.1f} MB ({percent:.0f} %) in {seconds:.1f} s "
            f"({speed}{eta})"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
