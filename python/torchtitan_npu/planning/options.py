"""How the configuration asks for sharding: one place, so that the plan and the run cannot differ."""

from __future__ import annotations

from typing import Any

import torch

from torchtitan_npu.config import ParallelConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def fsdp_options(cfg: ParallelConfig) -> dict[str, Any]:
    """Keyword arguments that ``FSDP`` and ``plan_model`` share."""
    from torchtitan_npu.fsdp import MixedPrecisionPolicy

    policy = None
    if cfg.dtype != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=_DTYPES[cfg.dtype], reduce_dtype=_DTYPES[cfg.reduce_dtype])
    return {
        "mixed_precision": policy,
        "reshard_after_forward": cfg.reshard_after_forward,
        "bucket_cap_mb": cfg.bucket_cap_mb,
        "prefetch": cfg.prefetch,
    }
