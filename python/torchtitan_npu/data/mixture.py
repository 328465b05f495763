"""Dealing the samples of a run out to several corpora by weight."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


class Mixture:
    """Which corpus sample g comes from, and how many came from it before: exact, and without going through them.

    Of the first g samples, floor(g * w / W) come from the first corpus, w being its weight and W the sum of all; the
    others are dealt out to the other corpora in the same way. So each corpus has its share of every stretch of samples,
    to within one per corpus before it, and nothing is drawn at random.

    Args:
        weights: more than 0; only their ratios count. A float counts as the decimal number that it is written as.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {list(weights)}: must be one or more numbers above 0")
        exact = [Fraction(repr(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        """Of all samples; they add up to 1."""
        # Of what the corpora before have left.
        self._splits = [weight / sum(exact[i:]) for i, weight in enumerate(exact)]

    def counts(self, samples: int) -> list[int]:
        """How many of the first ``samples`` come from each corpus."""
        counts, left = [], samples
        for split in self._splits:
            taken = left * split.numerator // split.denominator
            counts.append(taken)
            left -= taken
        return counts

    def locate(self, sample: int) -> tuple[int, int]:
        """(corpus, number of the sample within it) of global sample ``sample``."""
        left = sample
        for corpus, split in enumerate(self._splits):
            before = left * split.numerator // split.denominator
            if (left + 1) * split.numerator // split.denominator > before:
                return corpus, before
            left -= before
        raise AssertionError("the last split takes everything")
