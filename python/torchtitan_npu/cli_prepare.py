"""The command line of ``prepare_data.py`` and ``torchtitan-npu prepare``."""

from __future__ import annotations

import argparse
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchtitan_npu import cli
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_encode import DEFAULT_MAX_SEQ_LEN, SPECIAL_CHOICES, Options
from torchtitan_npu.data.prepare_read import DEFAULT_MAX_DOCUMENT_MB, INPUT_FORMATS

logger = logging.getLogger("torchtitan_npu.data")

_DESCRIPTION = """\
Turn text into a token file: JSONL with one {"tokens": [...], "length": n} per document, or the binary form.

Input, plain or compressed with gzip or zstd:
  text     one document per line, UTF-8
  jsonl    one JSON object per line with a string field (--text_field), which can hold newlines
  parquet  a column of strings (--text_field)

A run that was stopped goes on where it was when it is started again with the same arguments.
"""


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="prepare_data.py",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, type=Path, metavar="train.jsonl|train.bin", help="the file to write")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="byte, a tokenizer.json, a Hugging Face directory, or a name in the Hugging Face cache of this machine",
    )
    parser.add_argument(
        "--format", choices=("jsonl", "bin"), help="to write (default: bin where --output ends in .bin, or else jsonl)"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument(
        "--max_seq_len",
        type=cli.positive,
        default=DEFAULT_MAX_SEQ_LEN,
        metavar="N",
        help="tokens kept (default: %(default)s)",
    )
    length.add_argument("--no_truncate", action="store_true", help="keep documents of any length whole")
    for flag, what in (("bos", "begin with the tokenizer's BOS"), ("eos", "end with the tokenizer's EOS")):
        parser.add_argument(
            f"--{flag}",
            nargs="?",
            choices=SPECIAL_CHOICES,
            const="always",
            default="auto",
            help=f"whether documents {what}; auto (default): as the tokenizer does by itself; without a value: always",
        )
    parser.add_argument(
        "--num_proc", type=cli.positive, default=1, metavar="N", help="processes that encode (default: 1)"
    )
    return parser


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """What ``prepare`` and ``tokenizer`` read, and how."""
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="FILE|DIR|GLOB",
        help="DIR: *.txt, *.jsonl, *.json, *.ndjson, *.parquet, and these with .gz, .zst or .zstd; not its folders",
    )
    parser.add_argument("--input_format", choices=INPUT_FORMATS, default="auto", help="default: by file ending")
    parser.add_argument(
        "--text_field", default="text", metavar="NAME", help="of JSONL and Parquet (default: %(default)s)"
    )
    parser.add_argument(
        "--max_document_mb",
        type=cli.positive,
        default=DEFAULT_MAX_DOCUMENT_MB,
        metavar="N",
        help="MiB of text; longer documents are dropped and counted (default: %(default)s)",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 (bad data) or 130 (interrupted)."""
    args = _parser().parse_args(argv)
    from torchtitan_npu.data.prepare import prepare

    options = Options(
        tokenizer=args.tokenizer,
        max_seq_len=None if args.no_truncate else args.max_seq_len,
        bos=args.bos,
        eos=args.eos,
        output_format=args.format or ("bin" if args.output.suffix == ".bin" else "jsonl"),
        text_field=args.text_field,
        max_document_mb=args.max_document_mb,
    )
    with reported() as status:
        prepare(args.input, args.output, options, input_format=args.input_format, num_proc=args.num_proc)
    return status.code


class Status:
    """``code``: the exit status."""

    code = 0


@contextlib.contextmanager
def reported() -> Iterator[Status]:
    """Logs to stderr; bad data and interruptions become one message and an exit status."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.INFO)
    status = Status()
    try:
        with _raise_on_sigterm():
            yield status
    except DataError as error:
        logger.error("error: %s", error)
        status.code = 1
    except KeyboardInterrupt:
        logger.error("interrupted")
        status.code = 130


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does: worker processes are stopped and what cannot be continued is removed."""

    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
