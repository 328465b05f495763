"""Models: the Llama 3 and Qwen3 families."""

from torchtitan_npu.models.llama3 import Llama
from torchtitan_npu.models.registry import build_model

__all__ = ["Llama", "build_model"]
