"""A trainer in plain PyTorch around FSDP2, as short as it gets: train_step.py's peer.

It does what train.py does in every step and no more: read a batch from a memory-mapped file, forward, backward, clip,
AdamW with a schedule, the mean loss of all ranks, one line. Start it with torchrun.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from engines import peak_resident, wrap
from model import Llama, Shape, loss_of
from torch import Tensor
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset[Tensor]):
    """``seq + 1`` tokens from every multiple of ``seq``, of a file of uint16."""

    def __init__(self, path: str, seq: int) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")
        self.seq = seq

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.tokens[index * self.seq : (index + 1) * self.seq + 1].astype(np.int64))


def batches(path: str, shape: Shape) -> Iterator[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Windows(path, shape.seq), batch_size=shape.batch * size, shuffle=True, drop_last=True)
    while True:
        for batch in loader:
            yield batch[rank::size]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = Shape(**args.shape)
    model = wrap("fsdp2", Llama(shape), args.dtype, None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 1e4)))
    data = batches(args.tokens, shape)
    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        tokens = next(data)
        loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            record = {
                "step": step,
                "loss": mean.item() / dist.get_world_size(),
                "grad_norm": total.item(),
                "step_time": time.perf_counter() - start,
                "mem_bytes": peak_resident(),
            }
            print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
