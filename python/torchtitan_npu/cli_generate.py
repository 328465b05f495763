"""``torchtitan-npu generate``: what a checkpoint's model says. One process, on the CPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu import cli
from torchtitan_npu.cli_convert import DTYPES, add_checkpoint, model_of, torch_dtype

if TYPE_CHECKING:
    from torchtitan_npu.data import Tokenizer


def generate_main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, or 1 with one message."""
    args = _parser().parse_args(argv)
    from torchtitan_npu.checkpoint.manifest import CheckpointError
    from torchtitan_npu.config import ConfigError
    from torchtitan_npu.data import DataError

    try:
        _generate(args)
    except (CheckpointError, ConfigError, DataError) as error:
        cli.say(f"{error}\n")
        return 1
    return 0


def _generate(args: argparse.Namespace) -> None:
    import torch

    from torchtitan_npu.checkpoint.hf_import import TOKENIZER
    from torchtitan_npu.checkpoint.tensor_source import TensorSource
    from torchtitan_npu.checkpoint.whole_model import load_whole_model
    from torchtitan_npu.data import DataError, load_tokenizer
    from torchtitan_npu.models.generation import generate, make_cache
    from torchtitan_npu.planning.memory import format_bytes

    source = TensorSource(args.checkpoint)
    cfg = model_of(source, args.config)
    name = args.tokenizer
    if name is None:
        beside = source.path.parent / TOKENIZER
        if not beside.is_dir():
            raise DataError(
                f"--tokenizer is missing, and there is no {beside}: name the one that the training data were prepared "
                "with (byte, a tokenizer.json, or a directory)"
            )
        name = str(beside)
    tokenizer = load_tokenizer(name)
    if tokenizer.vocab_size > cfg.vocab_size:
        cli.say(
            f"warning: tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model {cfg.vocab_size}: unless "
            "the model was trained with it, what follows is noise\n"
        )
    prompt = _encode(tokenizer, args.prompt, cfg.vocab_size)
    if not 0 < len(prompt) < cfg.max_seq_len:
        raise DataError(
            f"--prompt has {len(prompt)} tokens; it must have at least 1 and fewer than model.max_seq_len = "
            f"{cfg.max_seq_len}"
        )
    model = load_whole_model(source, cfg, torch_dtype(args.dtype))
    generator = torch.Generator().manual_seed(args.seed)
    positions = min(len(prompt) + args.max_new_tokens, cfg.max_seq_len)
    cache = make_cache(model, positions)
    if cache is not None:
        cli.say(f"room for the keys and values of {positions} positions: {format_bytes(cache.num_bytes)}\n")
    for number in range(1, args.num_samples + 1):
        if cache is not None:
            # All samples begin with the prompt; its last token is read again, for what comes behind it.
            cache.length = min(cache.length, len(prompt) - 1)
        ids = generate(
            model,
            prompt,
            max_new_tokens=args.max_new_tokens,
            max_seq_len=cfg.max_seq_len,
            temperature=args.temperature,
            top_p=args.top_p,
            eos_id=tokenizer.eos_id,
            num_ids=min(tokenizer.vocab_size, cfg.vocab_size),
            generator=generator,
            cache=cache,
        )
        if args.num_samples > 1:
            sys.stdout.write(f"--- {number} of {args.num_samples}\n")
        sys.stdout.write(f"{tokenizer.decode([*prompt, *ids])}\n")
        sys.stdout.flush()


def _encode(tokenizer: Tokenizer, text: str, vocab_size: int) -> list[int]:
    """Ids of the prompt, with what begins a document and without what ends one."""
    from torchtitan_npu.data import DataError

    ids = tokenizer.encode_batch([text])[0]
    if ids and ids[-1] == tokenizer.eos_id:
        ids = ids[:-1]
    if ids and max(ids) >= vocab_size:
        raise DataError(
            f"--tokenizer {tokenizer.name} gives the id {max(ids)}, but the model has {vocab_size}; name the tokenizer "
            "that the training data were prepared with"
        )
    return ids


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu generate",
        description="Continue a text with the model of a checkpoint, saved at any number of ranks. One process, on the "
        "CPU, which holds the whole model, and the keys and values of the tokens so far: 2 x n_layers x n_kv_heads x "
        "head_dim numbers for each, so that a token takes one pass over itself. A prompt and its continuation are at "
        "most model.max_seq_len tokens.",
        allow_abbrev=False,
    )
    add_checkpoint(parser)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (default: nothing)")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="byte, a tokenizer.json, or a directory (default: the folder tokenizer beside the checkpoint)",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's YAML, where the checkpoint lacks it")
    parser.add_argument(
        "--max_new_tokens", type=cli.positive, default=100, metavar="N", help="at most (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=_number(0, float("inf")),
        default=0.8,
        metavar="X",
        help="0 takes the most likely token every time; higher is more varied (default: %(default)s)",
    )
    parser.add_argument(
        "--top_p",
        type=_number(0, 1),
        default=0.95,
        metavar="P",
        help="sample among the most likely tokens that together have this probability (default: %(default)s)",
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="of the samples (default: %(default)s)")
    parser.add_argument("--num_samples", type=cli.positive, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="to compute in (default: that of each tensor read)")
    return parser


def _number(least: float, most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most or value == float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least:g} to {most:g}")
        return value

    return parse


def _seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**63):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)
