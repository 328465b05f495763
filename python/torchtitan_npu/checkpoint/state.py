"""What a checkpoint holds besides tensors. JSON, so that it can be read by eye and never executes anything."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_npu.checkpoint.directory import CheckpointError, write_durably

FORMAT = 1
META = "meta.json"


@dataclass
class TrainState:
    """Where a run stands after an optimizer step; the same on every rank."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens consumed, all ranks together."""
    world_size: int
    """Ranks that saved; 0: none, the weights were imported."""
    data: dict[str, Any] = field(default_factory=dict)
    """``PackedLoader.state_dict()``: the position in the data."""
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved configuration of the run."""
    loss_scaler: dict[str, Any] = field(default_factory=dict)
    """``GradScaler.state_dict()``: of float16 training, else empty."""

    def write(self, directory: Path) -> None:
        """Write ``meta.json``."""
        write_durably(directory / META, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def read(cls, directory: Path) -> TrainState:
        """Read ``meta.json``.

        Raises:
            CheckpointError: it is missing or not one of ours.
        """
        path = directory / META
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}; resume from another checkpoint") from error


def _rank_path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.json"


def write_random_state(directory: Path, rank: int) -> None:
    """Save this rank's state of torch's random generator."""
    state = base64.b64encode(bytes(torch.get_rng_state().tolist())).decode("ascii")
    write_durably(_rank_path(directory, rank), json.dumps({"torch_rng_state": state}))


def restore_random_state(directory: Path, rank: int) -> None:
    """Restore what ``write_random_state`` saved.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    path = _rank_path(directory, rank)
    try:
        state = base64.b64decode(json.loads(path.read_text(encoding="utf-8"))["torch_rng_state"], validate=True)
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}; resume from another checkpoint") from error
