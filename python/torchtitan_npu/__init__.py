"""Distributed training of large language models on Ascend NPUs and CPUs, with a native FSDP core.

``FSDP``, ``fully_shard``, ``MixedPrecisionPolicy`` and ``StateDictType`` are the public names; they are loaded at first
use, so that ``import torchtitan_npu`` costs nothing beyond ``import torch`` and needs no NPU library. The only thing
that it may change is in ``_autoload``: torch's plug-ins are switched off where they could only fail.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import (
        FSDP,
        GradScaler,
        MixedPrecisionPolicy,
        PeerError,
        StateDictType,
        clip_grad_norm_,
        fully_shard,
        save_full,
    )

__version__ = "0.1.0"

_PUBLIC = {
    "FSDP",
    "GradScaler",
    "MixedPrecisionPolicy",
    "PeerError",
    "StateDictType",
    "clip_grad_norm_",
    "fully_shard",
    "save_full",
}

__all__ = [
    "FSDP",
    "GradScaler",
    "MixedPrecisionPolicy",
    "PeerError",
    "StateDictType",
    "__version__",
    "clip_grad_norm_",
    "fully_shard",
    "save_full",
]


if find_spec("torch_npu") is not None:
    from torchtitan_npu._autoload import switch_off_without_cann, warn_if_switched_off

    switch_off_without_cann()


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        if "warn_if_switched_off" in globals():
            warn_if_switched_off()
        return getattr(import_module("torchtitan_npu.fsdp"), name)
    raise AttributeError(f"module 'torchtitan_npu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
