"""Training steps of a small Llama-like model on the CPU and on a simulated card; run as a program.

Arguments: attention ("sdpa" or "plain"), AdamW's way ("for", "foreach" or "fused"), type ("float32" or "bfloat16").
Prints both lists of losses as JSON.
"""

from __future__ import annotations

import json
import math
import sys

import torch
import torch.nn.functional as F
import torch_npu
from torch import nn

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH, BATCH = 67, 48, 4, 2, 24, 3


def rotary(x_BHTD: torch.Tensor) -> torch.Tensor:
    T, D = x_BHTD.shape[-2:]
    frequency_D = 1.0 / 100.0 ** (torch.arange(0, D, 2, device=x_BHTD.device).float() / D)
    angle_TD = torch.outer(torch.arange(T, device=x_BHTD.device).float(), frequency_D)
    turn_TD = torch.polar(torch.ones_like(angle_TD), angle_TD)
    pairs = torch.view_as_complex(x_BHTD.float().reshape(*x_BHTD.shape[:-1], D // 2, 2))
    return torch.view_as_real(pairs * turn_TD).flatten(-2).type_as(x_BHTD)


class Block(nn.Module):
    def __init__(self, attention: str):
        super().__init__()
        self.attention = attention
        self.before = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.between = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        B, T, _ = x_BTD.shape
        q, k, v = self.qkv(self.before(x_BTD)).view(B, T, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotary(q), rotary(k)
        if self.attention == "sdpa":
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            later = torch.ones(T, T, dtype=torch.bool, device=x_BTD.device).triu(1)
            mixed = F.softmax(scores.masked_fill(later, -math.inf), -1, dtype=torch.float32).type_as(v) @ v
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(B, T, -1))
        h = self.between(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, attention: str):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(LAYERS))
        self.last = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.last(x_BTD))


def losses(device: str, attention: str, way: str, dtype: torch.dtype, steps: int = 6) -> list[float]:
    torch.manual_seed(1)
    model = Llama(attention).to(device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=way == "foreach", fused=way == "fused")
    generator = torch.Generator().manual_seed(2)
    kept = []
    for step in range(steps):
        tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)
        logits = model(tokens_BT[:, :-1])
        labels = tokens_BT[:, 1:].masked_fill(tokens_BT[:, 1:] == step, -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())
    return [loss.item() for loss in kept]


def main() -> None:
    attention, way, dtype = sys.argv[1], sys.argv[2], getattr(torch, sys.argv[3])
    assert torch_npu.npu.is_available()
    print(json.dumps({device: losses(device, attention, way, dtype) for device in ("cpu", "npu")}))


if __name__ == "__main__":
    main()
