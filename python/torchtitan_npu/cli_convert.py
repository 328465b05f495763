"""``torchtitan-npu {merge,export,import}``: checkpoints to and from other formats. One process, no device."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchtitan_npu import cli

if TYPE_CHECKING:
    import torch

    from torchtitan_npu.checkpoint.tensor_source import TensorSource
    from torchtitan_npu.config import ModelConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_ONE_GB = 10**9


def convert_main(command: str, argv: Sequence[str]) -> int:
    """Run ``merge``, ``export`` or ``import``. Returns the exit status: 0, or 1 with one message."""
    parser, run = {
        "merge": (_merge_parser, _merge),
        "export": (_export_parser, _export),
        "import": (_import_parser, _import),
    }[command]
    args = parser().parse_args(argv)
    from torchtitan_npu.checkpoint.manifest import CheckpointError
    from torchtitan_npu.config import ConfigError

    try:
        sys.stdout.write(run(args))
    except (CheckpointError, ConfigError) as error:
        cli.say(f"{error}\n")
        return 1
    return 0


def _merge(args: argparse.Namespace) -> str:
    from tqdm import tqdm

    from torchtitan_npu.checkpoint.merge import merge
    from torchtitan_npu.checkpoint.tensor_source import TensorSource

    source = TensorSource(args.checkpoint)
    with tqdm(total=len(source.entries), unit=" tensors", disable=None) as bar:
        entries = merge(
            source,
            args.output,
            dtype=torch_dtype(args.dtype),
            overwrite=args.overwrite,
            on_tensor=lambda name: bar.update(),
        )
    total = sum(entry.num_bytes for entry in entries)
    return f"{source.path}: {len(entries)} tensors, {total:,} bytes, are in {args.output}\n"


def _export(args: argparse.Namespace) -> str:
    from tqdm import tqdm

    from torchtitan_npu.checkpoint.hf_export import export_hf
    from torchtitan_npu.checkpoint.hf_import import TOKENIZER
    from torchtitan_npu.checkpoint.tensor_source import TensorSource

    source = TensorSource(args.checkpoint)
    model = model_of(source, args.config)
    tokenizer = args.tokenizer
    if tokenizer is None and (source.path.parent / TOKENIZER).is_dir():
        tokenizer = source.path.parent / TOKENIZER
    with tqdm(total=len(source.entries), unit=" tensors", disable=None) as bar:
        files = export_hf(
            source,
            model,
            args.output,
            dtype=torch_dtype(args.dtype),
            max_shard_bytes=int(args.max_shard_gb * _ONE_GB),
            vocab_size=args.vocab_size,
            tokenizer=tokenizer,
            overwrite=args.overwrite,
            on_tensor=lambda name: bar.update(),
        )
    return f"{source.path}: exported to {args.output}: {', '.join(files)}\n"


def _import(args: argparse.Namespace) -> str:
    from tqdm import tqdm

    from torchtitan_npu.checkpoint.hf_config import yaml_of
    from torchtitan_npu.checkpoint.hf_import import import_hf

    with tqdm(unit=" tensors", disable=None) as bar:
        path, model = import_hf(
            args.model,
            args.output,
            dtype=torch_dtype(args.dtype),
            vocab_multiple=args.vocab_multiple,
            max_seq_len=args.max_seq_len,
            overwrite=args.overwrite,
            on_start=lambda count: bar.reset(total=count),
            on_tensor=lambda name: bar.update(),
        )
    return (
        f"{args.model}: imported to {path}; train it with --checkpoint_dir {args.output} and this model section:\n\n"
        f"{yaml_of(model)}"
    )


def torch_dtype(name: str | None) -> torch.dtype | None:
    import torch

    return None if name is None else getattr(torch, DTYPES[name])


def model_of(source: TensorSource, config: Path | None) -> ModelConfig:
    """The model section of ``config``, or else of the run that saved the checkpoint."""
    from torchtitan_npu.checkpoint.manifest import CheckpointError
    from torchtitan_npu.checkpoint.state import META, TrainState
    from torchtitan_npu.config import ConfigError, config_from_dict, load_config

    if config is not None:
        return load_config(config).model
    if not (source.path / META).exists():
        raise CheckpointError(f"{source.path} does not say what its model is (no {META}); give the YAML with --config")
    section = TrainState.read(source.path).config.get("model")
    try:
        return config_from_dict({"model": section, "training": {"learning_rate": 1.0, "max_steps": 1}}).model
    except ConfigError as error:
        raise CheckpointError(f"{source.path / META}: {error}; give the YAML with --config") from error


def _merge_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu merge",
        description="Write the model of a checkpoint into one safetensors file, under the model's own names.",
        allow_abbrev=False,
    )
    add_checkpoint(parser)
    _add_output(parser, "FILE", "the safetensors file to write")
    return parser


def _export_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu export",
        description="Write the model of a checkpoint as a directory that Hugging Face's transformers loads: "
        "config.json, sharded safetensors with their index, and the tokenizer's files.",
        allow_abbrev=False,
    )
    add_checkpoint(parser)
    parser.add_argument("--to", choices=("hf",), required=True, help="the format: hf is Hugging Face's")
    _add_output(parser, "DIR", "the directory to write")
    parser.add_argument("--config", type=Path, metavar="FILE", help="the run's YAML, where the checkpoint lacks it")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="whose tokenizer files go along (default: the folder tokenizer beside the checkpoint, if there is one)",
    )
    parser.add_argument(
        "--vocab_size", type=cli.positive, metavar="N", help="cut the vocabulary to N ids; the others are padding"
    )
    parser.add_argument(
        "--max_shard_gb", type=_positive_number, default=5.0, metavar="GB", help="size of a file (default: %(default)s)"
    )
    return parser


def _import_parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu import",
        description="Turn a Llama or Qwen3 model of Hugging Face's transformers into the checkpoint of step 0, from "
        "which train.py starts on any number of ranks. Prints the model section for the YAML.",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the directory with config.json and safetensors")
    parser.add_argument("--from", choices=("hf",), required=True, help="the format: hf is Hugging Face's")
    _add_output(parser, "DIR", "a directory for checkpoints, which train.py then gets as --checkpoint_dir")
    parser.add_argument(
        "--vocab_multiple",
        type=cli.positive,
        default=1,
        metavar="N",
        help="pad the vocabulary with zeros to a multiple of N",
    )
    parser.add_argument(
        "--max_seq_len", type=cli.positive, metavar="N", help="model.max_seq_len instead of max_position_embeddings"
    )
    return parser


def add_checkpoint(parser: cli.Parser) -> None:
    parser.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint, or a directory of several: then the newest complete one",
    )


def _add_output(parser: cli.Parser, kind: str, text: str) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar=kind, help=text)
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the tensors written (default: that of each tensor read)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier result")


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
