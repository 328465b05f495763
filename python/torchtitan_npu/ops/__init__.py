"""Operators the models are built from: one public function each, dispatch to a backend's kernel below it."""

from torchtitan_npu.ops.attention import attention
from torchtitan_npu.ops.cross_entropy import IGNORE_INDEX, cross_entropy, z_loss
from torchtitan_npu.ops.documents import Documents
from torchtitan_npu.ops.flash_attention import flash_attention
from torchtitan_npu.ops.linear_cross_entropy import linear_cross_entropy
from torchtitan_npu.ops.norm import rms_norm
from torchtitan_npu.ops.rotary import RotaryScaling, apply_rotary, rotary_tables
from torchtitan_npu.ops.swiglu import swiglu

__all__ = [
    "RotaryScaling",
    "IGNORE_INDEX",
    "Documents",
    "apply_rotary",
    "attention",
    "cross_entropy",
    "flash_attention",
    "linear_cross_entropy",
    "rms_norm",
    "rotary_tables",
    "swiglu",
    "z_loss",
]
