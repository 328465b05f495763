"""Which corpora a run reads: ``--data_dir``, or those of ``data.mixture``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.config import DataConfig
from torchtitan_npu.data.errors import DataError


@dataclass(frozen=True)
class Source:
    """Where a corpus lies, its weight, what the log calls it, and what errors call its path."""

    path: str
    weight: float
    name: str
    key: str


def training_sources(data: DataConfig, data_dir: str | None) -> list[Source]:
    """One source, or those of ``data.mixture`` with their paths below ``data_dir``.

    Errors: DataError when there is none, when ``data_dir`` is no directory for a mixture, or for a path named twice.
    """
    if not data.mixture:
        if data_dir is None:
            raise DataError("no data: give --data_dir, or name corpora in data.mixture")
        return [Source(data_dir, 1.0, "the data", "--data_dir")]
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(
            f"--data_dir {data_dir}: with data.mixture it must be a directory, which the paths there are relative to; "
            "leave it out, or leave out data.mixture to train on it alone"
        )
    paths = [os.path.join(data_dir or "", part.path) for part in data.mixture]
    repeated = sorted({path for path in paths if paths.count(path) > 1})
    if repeated:
        raise DataError(f"data.mixture: {', '.join(repeated)} stands there more than once; add up the weights")
    return [
        Source(path, part.weight, part.name or part.path, f"data.mixture, item {number}")
        for number, (path, part) in enumerate(zip(paths, data.mixture, strict=True), 1)
    ]
