"""A wrapped model beside a plain copy in one process, which sees the batches of all ranks one after the other.

Small models whose sizes divide by no world size, for every test here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import DEVICE
from torch import nn

from torchtitan_npu.fsdp import FSDP
from torchtitan_npu.fsdp.state import ShardedParam, state_of

VOCAB, DIM, LAYERS = 37, 20, 3

Loss = Callable[[Any, Any], torch.Tensor]


class Block(nn.Module):
    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class SmallModel(nn.Module):
    """Embedding, residual blocks, head: (B, T) tokens → (B, T, VOCAB) logits."""

    def __init__(self, layers: int = LAYERS, dim: int = DIM) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, VOCAB)
        if DEVICE != "cpu":
            self.to(DEVICE)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens_for(step: int, rank: int, batch: int = 2, length: int = 5) -> torch.Tensor:
    """(batch, length) token ids that differ by step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB, (batch, length), generator=generator).to(DEVICE)


def next_token_loss(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def squared_loss(model: Any, x: Any) -> torch.Tensor:
    return model(x).float().pow(2).mean()


def floats_for(step: int, rank: int, *shape: int) -> torch.Tensor:
    """Standard normal values that differ by step and rank."""
    return torch.randn(*(shape or (4, DIM)), generator=torch.Generator().manual_seed(1000 * step + rank)).to(DEVICE)


def part_of(param: ShardedParam, whole: torch.Tensor) -> torch.Tensor:
    """The elements of ``whole`` that this rank holds of ``param``, in the shape of its piece."""
    item = 1 if param.sharded.dtype.is_floating_point else param.sharded.dtype.itemsize
    start = param.piece.start // item
    return whole.detach().reshape(-1)[start : start + param.sharded.numel()].view(param.sharded.shape)


class Twin:
    """``model`` is wrapped with ``options``; ``plain`` has the same first values.

    With a 2-D ``device_mesh`` (a list of rows), plain gradients are added up row by row first, as replicas do: for two
    rows this is bit for bit what the wrapped model does.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: Loss = next_token_loss,
        batches: Callable[[int, int], Any] = tokens_for,
        **options: Any,
    ) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.loss, self.batches = loss, batches
        mesh = options.get("device_mesh")
        two_levels = isinstance(mesh, list) and isinstance(mesh[0], list)
        self.rows: list[list[int]] = mesh if two_levels else [list(range(self.size))]  # type: ignore[assignment]
        torch.manual_seed(0)
        self.plain = make().to(DEVICE)
        torch.manual_seed(0)
        self.model: Any = FSDP(make().to(DEVICE), **options)
        self.state = state_of(self.model)

    def backward(self, step: int) -> torch.Tensor:
        """This rank's loss; gradients on both sides (plain: replaced, not added to)."""
        loss = self.loss(self.model, self.batches(step, self.rank))
        loss.backward()
        plain_loss = self.plain_backward([step])
        assert torch.equal(loss, plain_loss), f"step {step}: loss {loss.item()}, plain {plain_loss.item()}"
        return loss

    def plain_backward(self, steps: Sequence[int]) -> torch.Tensor:
        """Sets the plain gradients to the sum over ``steps`` of the average: added in rank order, then divided."""
        total: dict[str, torch.Tensor] = {}
        mine = torch.zeros(())
        for step in steps:
            average: dict[str, torch.Tensor] = {}
            for row in self.rows:
                of_row: dict[str, torch.Tensor] = {}
                for rank in row:
                    self.plain.zero_grad()
                    loss = self.loss(self.plain, self.batches(step, rank))
                    if loss.requires_grad:
                        loss.backward()
                    if rank == self.rank:
                        mine = loss.detach()
                    for name, p in self.plain.named_parameters():
                        if p.grad is not None:
                            of_row[name] = of_row[name] + p.grad if name in of_row else p.grad.clone()
                for name, gradient in of_row.items():
                    average[name] = average[name] + gradient if name in average else gradient
            for name, gradient in average.items():
                gradient = gradient / self.size
                total[name] = total[name] + gradient if name in total else gradient
        for name, p in self.plain.named_parameters():
            p.grad = total.get(name)
        return mine

    def check_gradients(self, relative: float = 0.0) -> None:
        """Every piece's gradient is the plain one's part: bit for bit, or within ``relative`` of the largest."""
        plain = dict(self.plain.named_parameters())
        for param in self.state.params:
            want, got = plain[param.name].grad, param.sharded.grad
            if want is None:
                assert got is None, f"'{param.name}' has a gradient, the plain model none"
                continue
            assert got is not None, f"'{param.name}' has no gradient"
            assert got.shape == param.sharded.shape and got.dtype == param.sharded.dtype, (
                param.name,
                got.shape,
                got.dtype,
            )
            difference = (got - part_of(param, want)).abs().max().item() if got.numel() else 0.0
            bound = relative * want.abs().max().item() if want.numel() else 0.0
            assert difference <= bound, f"gradient of '{param.name}' is off by {difference}, allowed {bound}"

    def check_weights(self) -> None:
        """Every piece is the plain parameter's part, bit for bit."""
        plain = dict(self.plain.named_parameters())
        for param in self.state.params:
            got, want = param.sharded.detach(), part_of(param, plain[param.name])
            assert torch.equal(got, want), f"'{param.name}' is off by {(got - want).abs().max().item()}"

    def train(self, steps: int, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        """Checks gradients in every step and the weights after each update."""
        ours = optimizer([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)  # type: ignore[call-arg]
        theirs = optimizer([p for p in self.plain.parameters() if p.requires_grad], lr=1e-2)  # type: ignore[call-arg]
        for step in range(steps):
            ours.zero_grad()
            self.backward(step)
            self.check_gradients()
            ours.step()
            theirs.step()
            self.check_weights()

    @property
    def counters(self) -> Any:
        return self.state.engine.counters
