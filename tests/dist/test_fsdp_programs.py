"""Random programs: models, options and usage, bit for bit beside a plain model in one process."""

from __future__ import annotations

import os

from fuzz import fuzz
from pool import RankPool


def test_random_programs(rank_pool: RankPool) -> None:
    """The same ones each time. ``make fuzz`` runs others, and more of them."""
    fuzz(rank_pool, programs=int(os.environ.get("TORCHTITAN_NPU_PROGRAMS", "150")), first=1)()
