"""Calls that all ranks must make: who does not is found out."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torchtitan_npu.fsdp.mesh import RankGroup

TIMEOUT_SECONDS = 30.0
"""How long such a call waits for ranks that do not take part; ``TORCHTITAN_NPU_STATE_DICT_TIMEOUT`` overrides it."""


def all_ranks_here(ranks: RankGroup, what: str, way_out: str = "") -> None:
    """Returns when all ranks have called it; RuntimeError that names ``what`` and the missing ranks otherwise."""
    if ranks.group is None or ranks.size == 1:
        return
    seconds = float(os.environ.get("TORCHTITAN_NPU_STATE_DICT_TIMEOUT", TIMEOUT_SECONDS))
    try:
        # dist.monitored_barrier refuses groups that have another backend beside gloo.
        group: Any = ranks.group
        group.monitored_barrier(timedelta(seconds=seconds), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {ranks.ranks[ranks.index]}: {what} is collective, but not all ranks called it within {seconds:g} s "
            f"({error}). Call it on all ranks (outside of 'if rank == 0'){way_out}"
        ) from error
