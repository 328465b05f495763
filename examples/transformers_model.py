"""FSDP around an unmodified model of `transformers`, in a loop of your own, and saved in its own format.

    pip install transformers
    torchrun --nproc_per_node 2 examples/transformers_model.py --output hf-model
    torchrun --nproc_per_node 2 examples/transformers_model.py --model PATH --text corpus.txt --output hf-model

Without --model it is a small Qwen3 with random weights; --model takes a directory as `save_pretrained` writes it, with
its tokenizer. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from torchtitan_npu import FSDP, MixedPrecisionPolicy, StateDictType


def build(path: str | None) -> PreTrainedModel:
    """From ``path``, or a small model of 256 ids, one for each byte; the same on every process."""
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def read_tokens(path: str | None, text: Path) -> torch.Tensor:
    """The ids of ``text``: bytes, or those of the model's own tokenizer."""
    if path is None:
        return torch.tensor(list(text.read_bytes()))
    return torch.tensor(AutoTokenizer.from_pretrained(path, local_files_only=True)(text.read_text())["input_ids"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what to learn (default: this file)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch_size", type=int, default=4, help="sequences per process")
    parser.add_argument("--seq_len", type=int, default=128)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world_size))
    model = build(args.model)
    # Blocks are found by themselves: the children of the model's nn.ModuleList.
    model = FSDP(model, mixed_precision=MixedPrecisionPolicy(param_dtype=getattr(torch, args.dtype)), bucket_cap_mb=25)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    tokens = read_tokens(args.model, args.text)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, args.steps + 1):
        # All draw the same starts, and each process takes its share.
        starts = torch.randint(0, len(tokens) - args.seq_len, (world_size, args.batch_size), generator=generator)[rank]
        batch = torch.stack([tokens[start : start + args.seq_len] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and (step == 1 or step % 10 == 0):
            print(f"step {step}: loss {mean.item() / world_size:.4f}, gradient norm {float(norm):.3f}", flush=True)

    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        whole = model.state_dict()  # collective; whole tensors on rank 0, nothing elsewhere
    if rank == 0:
        model.save_pretrained(args.output, state_dict=whole)
        if args.model is not None:
            AutoTokenizer.from_pretrained(args.model, local_files_only=True).save_pretrained(args.output)
        print(f"saved in {args.output}; AutoModelForCausalLM.from_pretrained loads it", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
