"""``torchtitan-npu tokenizer``: learn a tokenizer from text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchtitan_npu import cli
from torchtitan_npu.cli_prepare import add_input_arguments, reported


def tokenizer_main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0, 1 (bad data) or 130 (interrupted)."""
    args = _parser().parse_args(argv)
    from torchtitan_npu.data.tokenizer_train import TrainOptions, train_tokenizer

    options = TrainOptions(
        vocab_size=args.vocab_size,
        special_tokens=tuple(args.special_tokens),
        sample_mb=args.sample_mb,
        input_format=args.input_format,
        text_field=args.text_field,
        max_document_mb=args.max_document_mb,
    )
    with reported() as status:
        train_tokenizer(args.input, args.output, options)
    return status.code


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu tokenizer",
        description="Learn a byte-level BPE tokenizer from text and write it as a Hugging Face directory, for "
        "`prepare --tokenizer DIR` and `generate --tokenizer DIR`. The input is read as by `prepare`; the same input "
        "gives the same tokenizer.",
        allow_abbrev=False,
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new directory")
    parser.add_argument("--vocab_size", required=True, type=cli.positive, metavar="N", help="ids; model.vocab_size")
    parser.add_argument(
        "--special_tokens",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help="besides <|begin_of_text|> (0), <|end_of_text|> (1) and <|pad|> (2)",
    )
    parser.add_argument(
        "--sample_mb",
        type=cli.positive,
        metavar="N",
        help="learn from about N MB of the files, evenly spread (default: all; every different word takes memory)",
    )
    return parser
