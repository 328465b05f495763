"""The learning rate as a function of the step; it has no state, so a resumed run needs none."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_at(
    step: int,
    *,
    peak: float,
    minimum: float,
    warmup_steps: int,
    max_steps: int,
    shape: Literal["cosine", "linear", "constant", "wsd"],
    decay_steps: int | None = None,
) -> float:
    """Learning rate of optimizer step ``step`` (the first is 1).

    It rises linearly to ``peak`` at step ``warmup_steps`` (step 1 already has ``peak / warmup_steps``), then falls
    along ``shape`` and is ``minimum`` at ``max_steps``; ``constant`` stays at ``peak``, and ``wsd`` (warm-up, stable,
    decay; arXiv:2404.06395) does until ``decay_steps`` before ``max_steps``, or until the warm-up ends if that is
    later, and falls linearly from there. Steps after ``max_steps`` keep the last value.
    """
    step = min(step, max_steps)
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if shape == "constant":
        return peak
    start = warmup_steps
    if shape == "wsd":
        assert decay_steps is not None, "a rule of the configuration"
        start = max(warmup_steps, max_steps - decay_steps)
        if step <= start:
            return peak
    progress = min(1.0, (step - start) / max(1, max_steps - start))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if shape == "cosine" else 1.0 - progress
    return minimum + (peak - minimum) * remaining
