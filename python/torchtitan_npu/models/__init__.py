"""Models: the Llama 3 family."""

from torchtitan_npu.models.llama3 import Llama
from torchtitan_npu.models.registry import build_model

__all__ = ["Llama", "build_model"]
