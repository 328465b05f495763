"""Where log lines go."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

_LOGGER_NAME = "torchtitan_npu"


class _Below(logging.Filter):
    """Passes records below a level."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self._level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno < self._level


def terminal_handlers() -> list[logging.StreamHandler[Any]]:
    """The handlers that ``setup_logging`` has made and that write to a terminal."""
    handlers = logging.getLogger(_LOGGER_NAME).handlers
    return [
        handler
        for handler in handlers
        if isinstance(handler, logging.StreamHandler)
        and handler.stream in (sys.stdout, sys.stderr)
        and handler.stream.isatty()
    ]


def setup_logging(rank: int, world_size: int, log_dir: Path | None = None) -> None:
    """Send the package's log records to the terminal and to ``log_dir/train.log``.

    Rank 0 writes information to stdout, as it is, and warnings to stderr; other ranks write only warnings. In a job
    with several ranks a warning starts with ``[rank i]``. Calling it again replaces the earlier set-up.

    Raises:
        LaunchError: ``log_dir`` cannot be written.
    """
    from torchtitan_npu.launch.environment import LaunchError

    logger = logging.getLogger(_LOGGER_NAME)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    logger.propagate = False

    handlers: list[logging.Handler] = []
    prefix = f"[rank {rank}] " if world_size > 1 else ""
    warnings = logging.StreamHandler(sys.stderr)
    warnings.setLevel(logging.WARNING)
    warnings.setFormatter(logging.Formatter(f"{prefix}%(levelname)s: %(message)s"))
    handlers.append(warnings)
    if rank == 0:
        information = logging.StreamHandler(sys.stdout)
        information.addFilter(_Below(logging.WARNING))
        information.setFormatter(logging.Formatter("%(message)s"))
        handlers.append(information)
        if log_dir is not None:
            try:
                log_dir.mkdir(parents=True, exist_ok=True)
                file = logging.FileHandler(log_dir / "train.log", encoding="utf-8")
            except OSError as error:
                raise LaunchError(f"--log_dir {log_dir} cannot be written: {error}; name another directory") from error
            file.setFormatter(logging.Formatter("%(message)s"))
            handlers.append(file)
    logger = logging.getLogger(_LOGGER_NAME)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in handlers:
        logger.addHandler(handler)


def reset_logging() -> None:
    """Undo ``setup_logging``, and close its file: records go to the handlers of whoever imports the package."""
    logger = logging.getLogger(_LOGGER_NAME)
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


def flush_output() -> None:
    """Flush stdout and stderr, at the end of a process. Where a terminal or pipe has gone, what is left is dropped.

    Such a stream leads nowhere afterwards: Python flushes again when it ends, and where that fails its status is 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
