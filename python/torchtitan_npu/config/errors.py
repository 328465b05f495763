"""What a wrong configuration raises: one error that lists every problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where the user wrote it."""

    where: str
    """The YAML key (``training.max_steps``) or the flag (``--training.max_steps``)."""
    what: str
    """The value, the rule and the way out, in one line."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


class ConfigError(ValueError):
    """A configuration that cannot be used; ``str()`` lists all its problems, one a line."""

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        """``source`` is the file's name (or ``command line``); ``problems`` must not be empty."""
        self.source = source
        self.problems = tuple(problems)
        assert self.problems, "a ConfigError needs at least one problem"
        count = len(self.problems)
        lines = [f"{source}: {count} problem{'s' if count > 1 else ''}", *(f"  {problem}" for problem in self.problems)]
        super().__init__("\n".join(lines))
