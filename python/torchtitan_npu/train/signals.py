"""Requests to stop: what a scheduler sends before it takes the machine away."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_SIGACTION_BYTES = 256
"""At least a ``struct sigaction`` of any libc; glibc's and musl's have 152."""


class StopSignals:
    """While entered, SIGTERM and SIGUSR1 are noted in ``received`` instead of ending the process.

    Signals reach Python's main thread only; elsewhere this does nothing. Afterwards all is as it was, also a handler
    that Python does not know of, such as that of ``faulthandler.register``.
    """

    def __init__(self) -> None:
        self.received = 0
        """The number of the last signal, or 0."""
        self._before: dict[int, tuple[Any, ctypes.Array[ctypes.c_char]]] = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                action = _system_action(number)
                self._before[number] = signal.signal(number, self._note), action
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, (handler, action) in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set from Python
            _call_sigaction(number, action, None)
        self._before = {}


def _system_action(number: int) -> ctypes.Array[ctypes.c_char]:
    """What the process does on a signal, as the system knows it: Python remembers its own handlers only."""
    action = ctypes.create_string_buffer(_SIGACTION_BYTES)
    _call_sigaction(number, None, action)
    return action


def _call_sigaction(number: int, new: Any, old: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.sigaction(int(number), new, old) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"sigaction of {signal.Signals(number).name}: {os.strerror(code)}")
