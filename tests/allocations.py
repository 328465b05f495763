"""How much memory torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes allocated at any time during ``run`` beyond what was before, by the profiler's record of every
    allocation.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
