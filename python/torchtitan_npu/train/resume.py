"""Which checkpoint a run continues from, and whether it may."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_npu.checkpoint import CheckpointError, CheckpointStore, TrainState
from torchtitan_npu.checkpoint.manifest import corruption, defect
from torchtitan_npu.config import Config, to_dict
from torchtitan_npu.launch import gather_texts, together

logger = logging.getLogger(__name__)

_FREE_MODEL_KEYS = ("name", "use_flash_attention", "max_seq_len")


def choose_checkpoint(resume: str, store: CheckpointStore) -> Path | None:
    """The checkpoint that ``training.resume`` means, every byte of it as it was saved, or None for a fresh start.

    Collective. Rank 0 chooses, as ranks' views of a network file system may differ; each rank reads its share of the
    files. ``store`` counts what was passed over as incomplete, on rank 0.

    Raises:
        CheckpointError: there is no such checkpoint, or the run would write among newer ones of another run.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    candidates = Candidates(resume, store)

    def choose() -> str:
        return str(candidates.best() or "") if rank == 0 else ""

    def reject(path: Path, reason: str) -> None:
        if rank == 0:
            candidates.reject(path, reason)

    while chosen := gather_texts(together(choose))[0]:
        path = Path(chosen)
        found = gather_texts(together(partial(_damage, path, rank, size)))
        wrong = next((reason for reason in found if reason), None)
        if wrong is None:
            return path
        together(partial(reject, path, wrong))
    return None


def _damage(path: Path, part: int, parts: int) -> str:
    return corruption(path, part=part, parts=parts) or ""


class Candidates:
    """What ``training.resume`` may mean, as far as names and file sizes tell."""

    def __init__(self, resume: str, store: CheckpointStore) -> None:
        self._resume, self._store = resume, store
        self._among = store if resume == "auto" else None
        """The directory of several that is chosen from."""

    def best(self) -> Path | None:
        if self._resume == "auto":
            return self._store.candidate()
        chosen = None if self._resume == "none" else self._explicit(Path(self._resume))
        chosen_step = 0 if chosen is None else TrainState.read(chosen).step
        newer = [step for step in self._store.complete_steps() if step > chosen_step]
        if newer:
            raise CheckpointError(
                f"training.resume={self._resume} would start at step {chosen_step}, but --checkpoint_dir "
                f"{self._store.root} holds checkpoints of later steps (newest: step {newer[-1]}), and the two runs "
                "would mix; name another --checkpoint_dir, or set training.resume to auto to continue from the newest"
            )
        return chosen

    def reject(self, path: Path, reason: str) -> None:
        """``path`` has turned out to be damaged."""
        if self._among is None:
            raise CheckpointError(f"training.resume={path} cannot be used: {reason}")
        self._among.pass_over(path, reason)

    def _explicit(self, path: Path) -> Path:
        try:
            if not path.is_dir():
                what = "is a file" if path.exists() else "no such directory"
                raise CheckpointError(f"training.resume={path}: {what}; give a checkpoint's directory, or auto")
            list(path.iterdir())
        except OSError as error:
            raise CheckpointError(f"training.resume={path} cannot be read: {error}") from error
        if self._among is None and CheckpointStore(path).steps():
            self._among = CheckpointStore(path)
        if self._among is None:
            reason = defect(path)
            if reason is not None:
                raise CheckpointError(f"training.resume={path} cannot be used: {reason}")
            return path
        newest = self._among.candidate()
        if newest is None:
            raise CheckpointError(f"training.resume={path}: none of its checkpoints is complete")
        return newest


def compare_configuration(path: Path, saved: dict[str, Any], cfg: Config, table: str) -> None:
    """Refuse a checkpoint of another model; log every other setting that has changed since.

    Args:
        table: the tensors that differ, or nothing.

    Raises:
        CheckpointError: a tensor differs, or a key of the model section that changes what the model computes, or the
            optimizer keeps something else.
    """
    now = to_dict(cfg)
    before, after = (_optimizer_state(config.get("training", {})) for config in (saved, now))
    if "training" in saved and before != after:  # imported weights come without
        raise CheckpointError(
            f"{path} was trained with {before}, and {after} cannot continue from that state; set training.optimizer "
            "and training.momentum as they were, or start from the weights alone: torchtitan-npu export and import"
        )
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


def _optimizer_state(training: dict[str, Any]) -> str:
    """What the optimizer keeps, in words. Checkpoints of before there was a choice do not name it."""
    if training.get("optimizer", "adamw") == "adamw":
        return "adamw"
    return "sgd with momentum" if training["momentum"] else "sgd without momentum"


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
