"""Which checkpoint a run continues from, and whether it may."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torchtitan_npu.checkpoint import CheckpointError, CheckpointStore, TrainState
from torchtitan_npu.checkpoint.manifest import corruption
from torchtitan_npu.config import Config, to_dict

logger = logging.getLogger(__name__)

_FREE_MODEL_KEYS = ("name", "use_flash_attention", "max_seq_len")


def choose_checkpoint(resume: str, store: CheckpointStore) -> Path | None:
    """The checkpoint that ``training.resume`` means, or None for a fresh start. For one rank; it reads the disk.

    Raises:
        CheckpointError: there is no such checkpoint, or the run would write among newer ones of another run.
    """
    if resume == "auto":
        return store.newest()
    chosen = None if resume == "none" else _explicit(Path(resume))
    chosen_step = 0 if chosen is None else TrainState.read(chosen).step
    newer = [step for step in store.complete_steps() if step > chosen_step]
    if newer:
        raise CheckpointError(
            f"training.resume={resume} would start at step {chosen_step}, but --checkpoint_dir {store.root} holds "
            f"checkpoints of later steps (newest: step {newer[-1]}), and the two runs would mix; name another "
            "--checkpoint_dir, or set training.resume to auto to continue from the newest"
        )
    return chosen


def _explicit(path: Path) -> Path:
    try:
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such directory"
            raise CheckpointError(f"training.resume={path}: {what}; give a checkpoint's directory, or auto")
        list(path.iterdir())
    except OSError as error:
        raise CheckpointError(f"training.resume={path} cannot be read: {error}") from error
    inside = CheckpointStore(path)
    if inside.steps():
        newest = inside.newest()
        if newest is None:
            raise CheckpointError(f"training.resume={path}: none of its checkpoints is complete")
        return newest
    reason = corruption(path)
    if reason is not None:
        raise CheckpointError(f"training.resume={path} cannot be used: {reason}")
    return path


def compare_configuration(path: Path, saved: dict[str, Any], cfg: Config, table: str) -> None:
    """Refuse a checkpoint of another model; log every other setting that has changed since.

    Args:
        table: the tensors that differ, or nothing.

    Raises:
        CheckpointError: a tensor differs, or a key of the model section that changes what the model computes.
    """
    now = to_dict(cfg)
    changed = {
        key: (old, new)
        for key, (old, new) in _differences(_flatten(saved), _flatten(now)).items()
        if not key.startswith(("source", "warnings", "preset_overrides"))
    }
    model = {
        key: values
        for key, values in changed.items()
        if key.startswith("model.") and key.partition(".")[2] not in _FREE_MODEL_KEYS
    }
    if model or table:
        lines = [f"{key}: {old} in the checkpoint, {new} now" for key, (old, new) in model.items()]
        listed = "\n  ".join(lines + table.splitlines())
        raise CheckpointError(
            f"{path} belongs to another model; use the model section it was trained with, or another "
            f"--checkpoint_dir:\n  {listed}"
        )
    for key, (old, new) in changed.items():
        logger.info("changed since the checkpoint: %s: %s -> %s", key, old, new)


def _flatten(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, dict):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = list(value) if isinstance(value, tuple) else value
    return flat


def _differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (old.get(key), new[key]) for key in new if key in old and old[key] != new[key]}
