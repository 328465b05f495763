"""Tokens per second of `torchtitan-npu generate`: with cached keys and values, and with the whole sequence every time.

    python benchmarks/generate.py --csv generate.csv --png generate.png
    python benchmarks/generate.py --prompts 16,1024 --new_tokens 128 --dtype bf16

One process and one thread. Both ways live in it and take turns in random order, and have to choose the same tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict
from typing import Any

from common import (
    add_output_options,
    header,
    positive,
    progress,
    ratio_quartiles,
    require_package,
    require_plotting,
    table,
    write_csv,
    write_png,
)
from model import Shape

CACHED, WHOLE = "cached", "whole"
QUICK_SHAPE = {"dim": 64, "layers": 2, "heads": 4, "ffn": 96, "vocab": 256}
MIB = 1024**2


def build(shape: Shape, positions: int, dtype: str) -> Any:
    """Llama of ``shape``, with the first values of training."""
    import torch

    from torchtitan_npu.config import preset
    from torchtitan_npu.models import build_model

    sizes = {"dim": shape.dim, "n_layers": shape.layers, "n_heads": shape.heads, "n_kv_heads": shape.heads // 2}
    sizes |= {"ffn_dim": shape.ffn, "vocab_size": shape.vocab, "max_seq_len": positions}
    torch.manual_seed(0)
    model = build_model(preset("llama3_debug", **sizes, use_flash_attention=True))
    model.init_weights()
    return model.to(torch.bfloat16) if dtype == "bf16" else model


def measure(model: Any, prompts: list[int], args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per length of the prompt and way."""
    import torch

    from torchtitan_npu.models.generation import generate, make_cache

    order = random.Random(args.seed)
    rows = []
    for length in prompts:
        prompt = torch.randint(model.cfg.vocab_size, (length,), generator=torch.Generator().manual_seed(1)).tolist()
        positions = length + args.new_tokens
        first: dict[str, list[float]] = {CACHED: [], WHOLE: []}
        total: dict[str, list[float]] = {CACHED: [], WHOLE: []}
        chosen, cache_bytes = {}, {CACHED: 0, WHOLE: 0}
        for number in range(args.rounds):
            progress(f"prompt of {length}, round {number + 1} of {args.rounds}")
            for way in order.sample([CACHED, WHOLE], 2):
                cache = make_cache(model, positions) if way == CACHED else None
                cache_bytes[way] = cache.num_bytes if cache else 0
                times = [time.perf_counter()]
                chosen[way] = generate(
                    model,
                    prompt,
                    max_new_tokens=args.new_tokens,
                    max_seq_len=model.cfg.max_seq_len,
                    cache=cache,
                    on_token=lambda token, times=times: times.append(time.perf_counter()),
                )
                first[way].append(times[1] - times[0])
                total[way].append(times[-1] - times[0])
        if args.dtype == "fp32" and chosen[CACHED] != chosen[WHOLE]:
            raise SystemExit(f"a prompt of {length}: the two ways chose different tokens")
        for way in (CACHED, WHOLE):
            ratio, low, high = ratio_quartiles(total[WHOLE], total[way])
            rows.append(
                {
                    "prompt_tokens": length,
                    "new_tokens": args.new_tokens,
                    "way": way,
                    "tokens_per_second": args.new_tokens / statistics.median(total[way]),
                    "first_token_seconds": statistics.median(first[way]),
                    "speedup": ratio,
                    "speedup_q1": low,
                    "speedup_q3": high,
                    "cache_bytes": cache_bytes[way],
                }
            )
    return rows


def lengths(text: str) -> list[int]:
    """argparse type: comma-separated whole numbers."""
    return [positive(part) for part in text.split(",")]


def main() -> None:
    require_package("")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--prompts", type=lengths, default=None, help="tokens (16,128,512; 8 with --quick)")
    parser.add_argument("--new_tokens", type=positive, default=None, help="of each continuation (64; 4 with --quick)")
    parser.add_argument("--rounds", type=positive, default=None, help="turns of each way (3; 1 with --quick)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of the model (fp32)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns (0)")
    args = parser.parse_args()
    require_plotting(args.png)
    shape = Shape(**(asdict(Shape()) | (QUICK_SHAPE if args.quick else {})))
    prompts = args.prompts or ([8] if args.quick else [16, 128, 512])
    args.new_tokens = args.new_tokens or (4 if args.quick else 64)
    args.rounds = args.rounds or (1 if args.quick else 3)
    print(
        header(
            "Generation" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [
                f"dim {shape.dim}, {shape.layers} layers, {shape.heads} heads, {shape.heads // 2} key/value heads, "
                f"ffn {shape.ffn}, vocab {shape.vocab}, {args.dtype}; 1 process, 1 thread",
                f"greedy, {args.new_tokens} tokens; {args.rounds} rounds, both ways in each in random order (seed "
                f"{args.seed})",
                "tokens/s: new tokens over the whole time, prompt included; / whole: tokens/s over the other way's of "
                "the same round; medians [quartiles]",
            ],
        ),
        flush=True,
    )
    import torch

    torch.set_num_threads(1)
    rows = measure(build(shape, max(prompts) + args.new_tokens, args.dtype), prompts, args)
    cells = [
        [row["way"], str(row["prompt_tokens"]), f"{row['tokens_per_second']:.1f}"]
        + [f"{row['speedup']:.2f} [{row['speedup_q1']:.2f} {row['speedup_q3']:.2f}]"]
        + [f"{1e3 * row['first_token_seconds']:.1f}", f"{row['cache_bytes'] / MIB:.1f}"]
        for row in rows
    ]
    columns = ["way", "prompt", "tokens/s", "/ whole [quartiles]", "first token ms", "cache MiB"]
    print("\n" + table(columns, cells), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        series = {w: [r["tokens_per_second"] for r in rows if r["way"] == w] for w in (CACHED, WHOLE)}
        groups = [f"prompt {length}" for length in prompts]
        write_png(args.png, f"Generation, {args.dtype}", groups, dict(series), "tokens/s")


if __name__ == "__main__":
    main()
