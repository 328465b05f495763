"""What a checkpoint holds besides tensors. JSON, so that it can be read by eye and never executes anything."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan_npu.checkpoint.manifest import CheckpointError, FileSum, write_durably
from torchtitan_npu.config import CONFIG_VERSION

FORMAT = 2
"""Of everything besides the tensors; a reader refuses other ones."""
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

    learning_rate: float = 0.0
    """Of the last step. For readers: the schedule is a function of the step, and a resumed run computes it anew."""
    train_seconds: float = 0.0
    """Wall time of all training steps since step 1, over all runs."""
    saved_at: str = ""
    """UTC, ISO 8601."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of the libraries that saved."""

    def write(self, directory: Path) -> FileSum:
        """Write ``meta.json``."""
        content = {"format": FORMAT, "config_version": CONFIG_VERSION, **asdict(self)}
        return write_durably(directory / META, json.dumps(content, indent=1))

    @classmethod
    def read(cls, directory: Path) -> TrainState:
        """Read ``meta.json``.

        Raises:
            CheckpointError: it is missing or not one of ours.
        """
        path = directory / META
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, known in (("format", FORMAT), ("config_version", CONFIG_VERSION)):
                version = content.pop(name)
                if version != known:
                    by = "a newer version of torchtitan-npu wrote it, use that" if version > known else "it is too old"
                    raise ValueError(f"its {name} is {version}, and this torchtitan-npu reads {known}: {by}")
            return cls(**content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}; resume from another checkpoint") from error


def library_versions() -> dict[str, str]:
    """What a checkpoint records about the libraries that save it; ``not installed`` where one runs from its sources."""

    def version(name: str) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed"

    names = ["torchtitan-npu", "torch", "numpy", *(["torch_npu"] if "torch_npu" in sys.modules else [])]
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
