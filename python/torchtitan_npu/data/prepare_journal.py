"""Where an unfinished run of ``prepare`` keeps what it has done, so that the same command goes on after a stop.

``OUTPUT.unfinished/`` lies beside the output and holds the data so far, under names that no glob for data matches, and
``journal``: up to where the data are good, what has been read for them, and what the command was. The journal is
replaced in one step, after the data have reached the disk; what they hold beyond it is cut off. At the end the data are
renamed to their final names and the directory goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import atomic_write, fsync_directory
from torchtitan_npu.data.prepare_encode import Summary
from torchtitan_npu.data.prepare_read import Position

logger = logging.getLogger(__name__)

# Raised when an older journal could be misread, or the same command would write other bytes.
_VERSION = 2
_JOURNAL = "journal"


@dataclass(frozen=True)
class State:
    """How far a run has come: where to read on, bytes read of the files on disk, the output's own state, the sums."""

    position: Position
    read_bytes: int
    output: dict[str, Any]
    summary: Summary
    finished: bool = False


class WorkDirectory:
    """``OUTPUT.unfinished``, locked against a second run. A context manager.

    Errors: DataError when another process is at work there; OSError.
    """

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + ".unfinished")
        self._lock: BinaryIO | None = None

    def __enter__(self) -> WorkDirectory:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = (self.path / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.stat(self.path / "lock"), os.fstat(self._lock.fileno())):
                raise BlockingIOError("a run that has just ended removed the file, and another one made it anew")
        except OSError as error:
            self._lock.close()
            raise DataError(f"another process is preparing this output (it holds {self.path}/lock)") from error
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Closes. Keeps what can be continued, and removes what cannot."""
        if not (self.path / _JOURNAL).exists():
            self.remove()
        assert self._lock is not None
        self._lock.close()

    def load(self, identity: dict[str, Any], targets: dict[str, Path]) -> State | None:
        """Where to go on, or None to begin: nothing there, or of another command, with a message.

        Of a finished run, each of its data is here, or under its final name already: ``publish`` is what is left to do.
        """
        try:
            journal = json.loads((self.path / _JOURNAL).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError:
            self._start_anew("its journal is damaged")
            return None
        reason = _difference(journal, identity)
        if not reason and journal["finished"] and not self._holds(targets):
            reason = "what it wrote is gone"
        if reason:
            self._start_anew(reason)
            return None
        return State(
            Position(**journal["position"]),
            journal["read_bytes"],
            journal["output"],
            Summary.from_json(journal["summary"]),
            journal["finished"],
        )

    def store(self, identity: dict[str, Any], state: State) -> None:
        """Call it after the output's data have been synced."""
        journal = {
            "version": _VERSION,
            "identity": identity,
            "position": asdict(state.position),
            "read_bytes": state.read_bytes,
            "output": state.output,
            "summary": state.summary.to_json(),
            "finished": state.finished,
        }
        with atomic_write(self.path / _JOURNAL) as file:
            file.write(json.dumps(journal).encode())

    def publish(self, targets: dict[str, Path]) -> None:
        """Renames the finished data to their final names; can be repeated after a stop in the middle."""
        for name, target in targets.items():
            data = self.path / name
            if data.exists():
                os.replace(data, target)
        fsync_directory(self.path.parent)
        self.remove()

    def kept(self) -> str:
        """What a user whose run has stopped needs to know."""
        if not (self.path / _JOURNAL).exists():
            return "Nothing is kept"
        return f"What is done is kept in {self.path}: the same command goes on there (rm -r it to begin anew)"

    def discard(self) -> None:
        """Nothing of this run can be of use to another."""
        (self.path / _JOURNAL).unlink(missing_ok=True)

    def remove(self) -> None:
        # The journal goes first: without it, what else is left means nothing.
        self.discard()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.path)

    def _holds(self, targets: dict[str, Path]) -> bool:
        return all((self.path / name).exists() or target.exists() for name, target in targets.items())

    def _start_anew(self, reason: str) -> None:
        logger.info("%s is of an earlier run that cannot be continued: %s. Starting anew", self.path, reason)
        self.discard()


def _difference(journal: dict[str, Any], identity: dict[str, Any]) -> str:
    """Why the run of ``journal`` cannot go on under ``identity``, or "".

    Input files that it has not come to may have changed.
    """
    if journal.get("version") != _VERSION:
        return f"its journal has version {journal.get('version')}, this release writes {_VERSION}"
    old = journal["identity"]
    begun = journal["position"]["file"] + 1
    if journal["finished"]:
        begun = max(len(old["inputs"]), len(identity["inputs"]))
    for before, now in zip(old["inputs"][:begun], identity["inputs"][:begun], strict=False):
        if before != now:
            return f"the input {now[0]} has changed, or is another one"
    if len(old["inputs"][:begun]) != len(identity["inputs"][:begun]):
        return "there are fewer input files" if len(identity["inputs"]) < begun else "there are more input files"
    for key, value in identity.items():
        if key != "inputs" and old.get(key) != value:
            return f"{key} was {old.get(key)}, is {value}"
    return ""
