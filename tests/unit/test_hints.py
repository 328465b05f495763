"""What is said before step 1 about memory."""

from __future__ import annotations

from typing import Any

from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.planning import estimate_memory
from torchtitan_npu.planning.hints import memory_hints


def _config(**training: Any) -> Config:
    return config_from_dict(
        {
            "model": {"name": "llama3_debug", "use_flash_attention": True},
            "training": {"learning_rate": 1e-3, "max_steps": 1, "batch_size": 3, **training},
        }
    )


def _hints(cfg: Config, capacity_bytes: int) -> list[str]:
    return memory_hints(cfg, 2, estimate_memory(cfg, 2), capacity_bytes)


def test_too_much_names_what_needs_less() -> None:
    cfg = _config()
    (hint,) = _hints(cfg, estimate_memory(cfg, 2).total - 1)
    assert "is more than the" in hint and "training.activation_checkpointing=selective saves about" in hint
    assert _hints(cfg, estimate_memory(cfg, 2).total) == []


def test_room_for_larger_micro_batches() -> None:
    """Of 12 micro-batches of 3: as many of 6 or 12 as there is room for in four fifths; 12 / 8 is no whole number."""
    cfg = _config(gradient_accumulation_steps=12)
    six, twelve = (
        estimate_memory(_config(batch_size=size, gradient_accumulation_steps=36 // size), 2).total for size in (6, 12)
    )
    (hint,) = _hints(cfg, 100 * twelve)
    assert hint.startswith("training.batch_size=12 with training.gradient_accumulation_steps=3 makes the same update")
    (hint,) = _hints(cfg, int(twelve / 0.8) - 10)
    assert hint.startswith("training.batch_size=6 with training.gradient_accumulation_steps=6 ")
    assert _hints(cfg, int(six / 0.8) - 10) == []
    assert _hints(_config(gradient_accumulation_steps=5), 100 * twelve) == []
