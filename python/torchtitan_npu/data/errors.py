"""The error that bad data, or a bad place for it, raises."""

from __future__ import annotations


class DataError(ValueError):
    """Input that cannot be used. The message names the file (and line), the value, the rule and the way out."""
