"""Planning: what a run will need, from its configuration alone."""

from torchtitan_npu.planning.memory import MemoryEstimate, estimate_memory, on_device
from torchtitan_npu.planning.options import fsdp_options

__all__ = ["MemoryEstimate", "estimate_memory", "fsdp_options", "on_device"]
