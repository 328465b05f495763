"""Settings whose feature does not exist yet. Whoever builds one deletes its row here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """A key, the values of it that cannot be honoured, and what to do instead."""

    key: str
    values: str
    """The values in words, for the documentation."""
    matches: Callable[[Any], bool]
    way_out: str


REFUSED: tuple[Unsupported, ...] = (
    *(
        Unsupported(f"parallel.{kind}_degree", "> 1", lambda degree: degree > 1, "set it to 1")
        for kind in ("cp", "pp", "ep")
    ),
)
"""These values are errors."""
