"""Named parts of a step, timed on the host and shown in a profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_NOTHING = nullcontext()


class Spans:
    """Adds up seconds by name; a name may be entered several times.

    Host time: where work is queued on an accelerator, it says how long the queueing took.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self.recorded = False
        """Whether a profile is being recorded, in which spans are to be ranges."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            with torch.profiler.record_function(name) if self.recorded else _NOTHING:
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def take(self, name: str) -> float:
        """Seconds of ``name`` since it was last taken."""
        return self._seconds.pop(name, 0.0)
