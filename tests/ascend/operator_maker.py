"""What the operator cases are made with: equal tensors on every device, and the list of cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)


class Maker:
    """Tensors of one device and type; the same numbers on every device."""

    def __init__(self, device: str, dtype: torch.dtype):
        self.device = device
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(5)

    def normal(self, *sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=self.generator) * scale).to(self.dtype).to(self.device)

    def positive(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) + 0.5).to(self.dtype).to(self.device)

    def unit(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) * 1.8 - 0.9).to(self.dtype).to(self.device)

    def integers(self, limit: int, *sizes: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(limit, sizes, generator=self.generator).to(dtype).to(self.device)

    def booleans(self, *sizes: int) -> torch.Tensor:
        return (torch.rand(sizes, generator=self.generator) < 0.5).to(self.device)

    def values(self, numbers: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(numbers, dtype=dtype).to(self.device)


Case = Callable[[Maker], Any]
CASES: dict[str, tuple[Case, tuple[torch.dtype, ...]]] = {}


def case(name: str, function: Case, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    assert name not in CASES, name
    CASES[name] = (function, dtypes)


def words(text: str) -> list[str]:
    return text.split()


def inplace(tensor: torch.Tensor, method: str, *arguments: Any, **named: Any) -> torch.Tensor:
    copy = tensor.clone()
    getattr(copy, method)(*arguments, **named)
    return copy


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result and the gradients of a weighted sum of it."""
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    result = function(*leaves)
    weight = torch.linspace(0.5, 1.5, result.numel()).view(result.shape).to(result.dtype).to(result.device)
    (result * weight).sum().backward()
    return [result, *[leaf.grad for leaf in leaves if leaf.grad is not None]]
