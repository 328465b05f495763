"""A rank's random states: Python's, NumPy's, torch's on the host and on the rank's device. JSON."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchtitan_npu.checkpoint.manifest import CheckpointError, FileSum, write_durably


def file_name(rank: int) -> str:
    """Of the rank's file in a checkpoint."""
    return f"rank-{rank:05d}.json"


def capture(device: torch.device) -> dict[str, Any]:
    """The states now, as JSON has them."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type != "cpu":
        states[device.type] = _text(torch.get_device_module(device).get_rng_state(device))
    return states


def write(directory: Path, rank: int, states: dict[str, Any]) -> FileSum:
    """Save what ``capture`` gave."""
    return write_durably(directory / file_name(rank), json.dumps(states))


def restore(directory: Path, rank: int, device: torch.device) -> None:
    """Continue from the saved states; that of a device of another kind than the saved one's stays.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = directory / file_name(rank)
    try:
        states = json.loads(path.read_text(encoding="utf-8"))
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, position, has_gauss, cached = states["numpy"]
        np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(states["torch"]))
        if device.type in states and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(_tensor(states[device.type]), device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; resume from another checkpoint") from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
