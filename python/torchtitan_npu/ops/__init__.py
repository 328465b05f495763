"""Operators the models are built from: one public function each, dispatch to a backend's kernel below it."""

from torchtitan_npu.ops.attention import attention
from torchtitan_npu.ops.cross_entropy import IGNORE_INDEX, cross_entropy
from torchtitan_npu.ops.norm import rms_norm
from torchtitan_npu.ops.rotary import apply_rotary, rotary_tables

__all__ = ["IGNORE_INDEX", "apply_rotary", "attention", "cross_entropy", "rms_norm", "rotary_tables"]
