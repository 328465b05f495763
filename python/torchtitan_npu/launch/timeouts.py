"""How long ranks wait for each other: HCCL's environment variables, which drive every backend here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torchtitan_npu.launch.environment import LaunchError

_CONNECT = ("HCCL_CONNECT_TIMEOUT", 120, 7200, 120)
_EXEC = ("HCCL_EXEC_TIMEOUT", 0, 2147483647, 1836)
# A process group that gives up first would hide the message of the timeout that should have fired.
_MARGIN_SECONDS = 60
_NEVER = timedelta(days=365)


@dataclass(frozen=True)
class Timeouts:
    """Effective waiting times."""

    connect_seconds: int
    """Until all ranks have arrived (HCCL_CONNECT_TIMEOUT)."""
    exec_seconds: int
    """Inside one collective (HCCL_EXEC_TIMEOUT); 0 is for ever."""
    warnings: tuple[str, ...] = ()

    @property
    def process_group(self) -> timedelta:
        """Timeout of the process group: longer than the other two."""
        if self.exec_seconds == 0:
            return _NEVER
        return timedelta(seconds=max(self.connect_seconds, self.exec_seconds) + _MARGIN_SECONDS)

    def describe(self) -> str:
        """One line for the log."""
        collective = f"{self.exec_seconds} s" if self.exec_seconds else "no limit"
        return (
            f"timeouts: connect {self.connect_seconds} s (HCCL_CONNECT_TIMEOUT), "
            f"collective {collective} (HCCL_EXEC_TIMEOUT), process group {self.process_group.total_seconds():.0f} s"
        )


def read_timeouts(environ: Mapping[str, str] | None = None) -> Timeouts:
    """Read HCCL_CONNECT_TIMEOUT (120..7200 s, default 120) and HCCL_EXEC_TIMEOUT (0..2147483647 s, default 1836).

    Raises:
        LaunchError: a value is not a whole number of seconds or out of range.
    """
    env = os.environ if environ is None else environ
    connect = _read(env, *_CONNECT)
    execute = _read(env, *_EXEC)
    warnings = []
    if 0 < execute < _EXEC[3]:
        warnings.append(
            f"HCCL_EXEC_TIMEOUT={execute} is below the default of {_EXEC[3]} s: a slow checkpoint or one slow rank may "
            "be reported as a failed collective"
        )
    return Timeouts(connect, execute, tuple(warnings))


def _read(env: Mapping[str, str], name: str, low: int, high: int, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()) or not low <= int(text) <= high:
        raise LaunchError(f"{name}={text} must be a whole number of seconds in {low}..{high}; unset it for {default}")
    return int(text)
