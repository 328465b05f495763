"""FSDP by hand on Ascend NPUs: a transformer of torch's own layers, 100 steps, and a checkpoint of the whole model.

    torchrun --nproc_per_node 8 examples/fsdp_on_npus.py
    torchtitan-npu simulate --npus 2 -- torchrun --nproc_per_node 2 examples/fsdp_on_npus.py --small

At full size the model has 6.7 billion parameters.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from torchtitan_npu import FSDP, GradScaler, MixedPrecisionPolicy, StateDictType, save_full


class Model(nn.Module):
    """Tokens (B, T) to logits (B, T, vocab): embedding and head in float32, layers in float16."""

    def __init__(self, vocab: int, hidden: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, dim_feedforward=4 * hidden, batch_first=True, dtype=torch.float16)
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).half()
        for layer in self.layers:
            x = layer(x)
        return self.head(x.to(self.head.weight.dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a model that a simulated card trains in a minute")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", default="model.pt")
    args = parser.parse_args()

    dist.init_process_group(backend="hccl")
    local_rank = int(os.environ["LOCAL_RANK"])  # not dist.get_rank(): a second machine has its own cards 0, 1, …
    torch.npu.set_device(local_rank)
    torch.manual_seed(0)
    vocab, length = (100, 32) if args.small else (32000, 2048)
    model = Model(vocab, 64, 3, 4) if args.small else Model(vocab, 4096, 32, 32)

    fsdp_config = {
        "mixed_precision": MixedPrecisionPolicy(
            param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
        ),
        "device_mesh": torch.arange(dist.get_world_size()),
        "bucket_cap_mb": 25,
        "reshard_after_forward": True,
    }
    model = FSDP(model.npu(), **fsdp_config)
    # The layers' own weights are float16, and so are their squared gradients, which vanish there: eps must be large.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.small else 1e-4, eps=1e-4)
    scaler = GradScaler(model)

    # The same few sequences again and again: the loss falls to nearly nothing if everything is right.
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randint(0, vocab, (1, length), generator=generator).npu() for _ in range(2)]
    for step in range(args.steps):
        tokens = batches[step % len(batches)]
        loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)

    model.eval()
    with torch.no_grad():
        before = model(batches[0])
    save_full(model, args.checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(torch.load(args.checkpoint, weights_only=True, map_location="cpu"))
    with torch.no_grad():
        after = model(batches[0])
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.4f}; loaded back: {'equal' if torch.equal(before, after) else 'DIFFERENT'}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
