"""Where files go that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$TORCHTITAN_NPU_CACHE``, else ``$XDG_CACHE_HOME/torchtitan_npu``, else ``~/.cache/torchtitan_npu``."""
    named = os.environ.get("TORCHTITAN_NPU_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "torchtitan_npu"
