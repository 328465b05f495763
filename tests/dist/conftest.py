"""Rank processes that the tests of a session share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Groups of ranks, one per world size, started at first use."""
    pool = RankPool()
    yield pool
    pool.close()
