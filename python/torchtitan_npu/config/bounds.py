"""Ranges that a field's type carries: ``Annotated[int, Bounds(low=1)]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Bounds:
    """A range of numbers; ``None`` leaves a side open."""

    low: float | None = None
    high: float | None = None
    low_included: bool = True
    high_included: bool = True
    also: int | None = None
    """One more allowed value outside the range, such as -1 for "the rest"."""

    def contains(self, value: float) -> bool:
        if self.also is not None and value == self.also:
            return True
        if self.low is not None and (value < self.low or (value == self.low and not self.low_included)):
            return False
        return self.high is None or value < self.high or (value == self.high and self.high_included)

    def __str__(self) -> str:
        parts = []
        if self.low is not None:
            parts.append(f"{'>=' if self.low_included else '>'} {self.low:g}")
        if self.high is not None:
            parts.append(f"{'<=' if self.high_included else '<'} {self.high:g}")
        text = " and ".join(parts)
        return f"{text}, or {self.also}" if self.also is not None else text


PositiveInt = Annotated[int, Bounds(low=1)]
NonNegativeInt = Annotated[int, Bounds(low=0)]
PositiveFloat = Annotated[float, Bounds(low=0, low_included=False)]
NonNegativeFloat = Annotated[float, Bounds(low=0)]
AtLeastOne = Annotated[float, Bounds(low=1)]
Fraction = Annotated[float, Bounds(low=0, high=1, high_included=False)]
UnitsAhead = Annotated[int, Bounds(low=0, high=8)]
DegreeOrRest = Annotated[int, Bounds(low=1, also=-1)]
