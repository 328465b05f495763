"""What ``tune`` has measured on this machine, kept for the hints of later runs."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchtitan_npu.config import Config
from torchtitan_npu.config.presets import family
from torchtitan_npu.launch.cache import cache_directory
from torchtitan_npu.launch.processor import processor_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MeasuredCaps:
    """The caps of one call of ``tune``, for one model, number of ranks, device and dtype."""

    best: float | None
    """The cap that was recommended, in MiB; None is one bucket per unit."""
    slowdowns: Mapping[float | None, float]
    """By cap: its step time over the recommended one's, the median over rounds."""
    date: str
    """Of the measurement, UTC."""

    def slowdown(self, cap_mb: float | None) -> float | None:
        """Of a step with ``cap_mb``: as measured, between two measured caps by its logarithm, outside of them that of
        the nearest; None where that is not known.
        """
        if cap_mb in self.slowdowns:
            return self.slowdowns[cap_mb]
        points = sorted((cap, slowdown) for cap, slowdown in self.slowdowns.items() if cap is not None)
        if cap_mb is None or not points:
            return None
        for (low, at_low), (high, at_high) in zip(points, points[1:], strict=False):
            if low < cap_mb < high:
                share = math.log(cap_mb / low) / math.log(high / low)
                return at_low + share * (at_high - at_low)
        return points[0][1] if cap_mb < points[0][0] else points[-1][1]


def remember(
    cfg: Config, world_size: int, device_type: str, best: float | None, slowdowns: Mapping[Any, float]
) -> Path:
    """Keep what was measured for ``cfg``, instead of what was measured before; returns the file.

    Raises:
        OSError: the cache directory cannot be written.
    """
    key = _key(cfg, world_size, device_type)
    record = {
        "key": key,
        "best": best,
        "caps": list(slowdowns.items()),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def recall(cfg: Config, world_size: int, device_type: str) -> MeasuredCaps | None:
    """What was measured for ``cfg``, or None where nothing was, or its file cannot be read."""
    key = _key(cfg, world_size, device_type)
    path = _path(key)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["key"] != key:
            return None
        slowdowns = {None if cap is None else float(cap): float(slowdown) for cap, slowdown in record["caps"]}
        best = None if record["best"] is None else float(record["best"])
        if best not in slowdowns or not all(math.isfinite(value) and value > 0 for value in slowdowns.values()):
            raise ValueError("its numbers make no sense")
        return MeasuredCaps(best, slowdowns, str(record["date"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s cannot be read, so nothing is known of measured bucket caps: %s; delete it", path, error)
        return None


def _key(cfg: Config, world_size: int, device_type: str) -> dict[str, Any]:
    """What the result of ``tune`` depends on most; the batch is left out."""
    model, parallel = cfg.model, cfg.parallel
    return {
        "family": family(model.name),
        "shape": [model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.head_width, model.ffn_dim],
        "vocabulary": [model.vocab_size, model.tie_embeddings],
        "parallel": [parallel.strategy, parallel.tp_degree, parallel.dtype, parallel.reduce_dtype],
        "prefetch": [parallel.prefetch, parallel.reshard_after_forward],
        "world_size": world_size,
        # The cache may be on a disk that several kinds of machines share.
        "device": f"{device_type}: {processor_name()}",
    }


def _path(key: dict[str, Any]) -> Path:
    digest = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=8).hexdigest()
    return cache_directory() / f"bucket_caps-{digest}.json"
