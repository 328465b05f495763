"""Requests to stop: what a scheduler sends before it takes the machine away."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """While entered, SIGTERM and SIGUSR1 are noted in ``received`` instead of ending the process.

    Signals reach Python's main thread only; elsewhere this does nothing.
    """

    def __init__(self) -> None:
        self.received = 0
        """The number of the last signal, or 0."""
        self._before: dict[int, Any] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
