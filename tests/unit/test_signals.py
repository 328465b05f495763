"""Requests to stop: noted while training runs; before and after, signals do what they did."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

import pytest

from torchtitan_npu.train.signals import STOP_SIGNALS, StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_handler_of_pythons_is_restored(number: signal.Signals) -> None:
    received: list[int] = []
    before = signal.signal(number, lambda number, frame: received.append(number))
    try:
        with StopSignals() as signals:
            assert signals.received == 0
            signal.raise_signal(number)
            assert signals.received == number and received == []
        signal.raise_signal(number)
        assert received == [number]
    finally:
        signal.signal(number, before)


def test_a_handler_that_python_does_not_know_is_restored(tmp_path: Path) -> None:
    """Twice, as where one process trains two times."""
    with (tmp_path / "traces").open("w+") as traces:
        faulthandler.register(signal.SIGUSR1, file=traces, all_threads=False)
        try:
            for times in (1, 2):
                with StopSignals() as signals:
                    signal.raise_signal(signal.SIGUSR1)
                    assert signals.received == signal.SIGUSR1
                signal.raise_signal(signal.SIGUSR1)
                traces.seek(0)
                assert traces.read().count("most recent call first") == times
        finally:
            faulthandler.unregister(signal.SIGUSR1)
