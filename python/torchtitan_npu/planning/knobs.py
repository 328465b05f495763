"""Settings that would need less memory, with what each saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_npu.config import Config, ConfigError, config_from_dict, to_dict
from torchtitan_npu.config.coerce import show
from torchtitan_npu.config.keys import KEYS
from torchtitan_npu.planning.memory import estimate_memory, format_bytes

_WORTH_IT = 0.02
"""Of the total; a setting that saves less is not proposed."""


@dataclass(frozen=True)
class Knob:
    """A change of the configuration."""

    settings: dict[str, Any]
    saved_bytes: int
    """Per card, by the estimate; with this change alone."""
    price: str
    """What it costs, in words."""

    def describe(self) -> str:
        """``model.use_flash_attention=true saves about 1.2 GB (…)``."""
        values = {key: value if isinstance(value, str) else show(value) for key, value in self.settings.items()}
        changes = " with ".join(f"{key}={value}" for key, value in values.items())
        return f"{changes} saves about {format_bytes(self.saved_bytes)} ({self.price})"


def cheapest_knobs(cfg: Config, world_size: int, count: int = 3) -> list[Knob]:
    """The first ``count`` changes, in the order of what they cost in speed, that save memory for this configuration."""
    before = estimate_memory(cfg, world_size).total
    knobs: list[Knob] = []
    for settings, price in _candidates(cfg):
        candidate = changed(cfg, settings)
        if candidate is None:
            continue
        saved = before - estimate_memory(candidate, world_size).total
        if saved >= _WORTH_IT * before:
            knobs.append(Knob(settings, saved, price))
            if len(knobs) == count:
                break
    return knobs


def _candidates(cfg: Config) -> Iterator[tuple[dict[str, Any], str]]:
    """All there are, the cheapest first; some may change nothing."""
    training = cfg.training
    if not cfg.model.use_flash_attention:
        yield {"model.use_flash_attention": True}, "the same result within rounding, and faster"
    if training.loss_chunk_tokens == 0:
        yield {"training.loss_chunk_tokens": 1024}, "the same loss, logits of 1,024 tokens at a time"
    if cfg.parallel.strategy == "ddp":
        yield {"parallel.strategy": "fsdp"}, "the same result; parameters are sent once more in each pass"
    if cfg.parallel.reshard_after_forward is False:
        yield {"parallel.reshard_after_forward": None}, "parameters are gathered again for backward"
    if training.activation_checkpointing is False:
        yield {"training.activation_checkpointing": "selective"}, "the same result; recomputes the cheaper half"
    if training.batch_size % 2 == 0:
        halves = {
            "training.batch_size": training.batch_size // 2,
            "training.gradient_accumulation_steps": 2 * training.gradient_accumulation_steps,
        }
        yield halves, "the same update, in smaller pieces"
    if cfg.parallel.prefetch > 0:
        yield {"parallel.prefetch": 0}, "gathers no longer overlap with computing"
    if training.optimizer == "adamw" and training.optimizer_state_dtype == "fp32":
        yield {"training.optimizer_state_dtype": "bf16"}, "the moments are rounded, without bias"
    if training.activation_checkpointing is not True:
        yield {"training.activation_checkpointing": True}, "the same result; a third more computing"
    if cfg.parallel.bucket_cap_mb is None or cfg.parallel.bucket_cap_mb > 1:
        yield {"parallel.bucket_cap_mb": 1.0}, "more and smaller collectives"
    if cfg.parallel.dtype == "fp32":
        yield {"parallel.dtype": "bf16"}, "computes in 16 bits; the master copy stays fp32"
    if training.seq_len >= 2:
        yield {"training.seq_len": training.seq_len // 2}, "shorter context"


def changed(cfg: Config, settings: Mapping[str, Any]) -> Config | None:
    """``cfg`` with other values, or None where that is no valid configuration."""
    values = to_dict(cfg)
    for name, value in settings.items():
        assert name in KEYS
        *sections, leaf = name.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[leaf] = value
    try:
        return config_from_dict(values)
    except ConfigError:
        return None
