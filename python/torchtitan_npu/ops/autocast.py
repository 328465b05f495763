"""Autocast, which not every device has."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch

_WITHOUT = "meta"
"""Has shapes only; torch refuses to say whether it is under autocast."""


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What autocast computes matrix products in now; None where it is off."""
    if device_type == _WITHOUT or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context in which operators keep the dtypes they are given."""
    return contextlib.nullcontext() if device_type == _WITHOUT else torch.autocast(device_type, enabled=False)
