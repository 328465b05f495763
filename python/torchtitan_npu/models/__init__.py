"""Models: the Llama 3 and Qwen3 families."""

from torchtitan_npu.models.llama3 import Llama
from torchtitan_npu.models.llama3_tensor_parallel import cut_for_planning, parallelize_tensors, run_for_planning
from torchtitan_npu.models.registry import build_model

__all__ = ["Llama", "build_model", "cut_for_planning", "parallelize_tensors", "run_for_planning"]
