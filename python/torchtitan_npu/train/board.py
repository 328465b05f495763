"""TensorBoard files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import FileWriter


class Board:
    """Scalars of one run, all of a step in one record: one by one they take six times as long."""

    def __init__(self, directory: Path, *, purge_step: int) -> None:
        """What earlier writers of ``directory`` recorded of ``purge_step`` and later steps is not shown any more."""
        self._file = FileWriter(str(directory))
        # As SummaryWriter does it: TensorBoard purges at the start of a session in a file of at least this version.
        self._file.add_event(Event(step=purge_step, file_version="brain.Event:2"))
        self._file.add_event(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))

    def write(self, scalars: Mapping[str, float | None], step: int) -> None:
        """``None`` is left out."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items() if value is not None]
        self._file.add_summary(Summary(value=values), step)

    def close(self) -> None:
        self._file.close()
