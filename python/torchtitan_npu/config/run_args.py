"""The paths of one run: they belong to the machine, so they are flags and not in the YAML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunArgs:
    """Where a run reads and writes."""

    data_dir: str | None
    """A file, a directory or a glob of prepared JSONL files; with ``data.mixture``, the directory of its paths."""
    checkpoint_dir: Path
    """Where checkpoints are written and looked for."""
    log_dir: Path
    """Where the log, ``metrics.jsonl`` and the TensorBoard events go."""
