"""The command line: ``torchtitan-npu COMMAND …``, and ``train.py``.

Wrong arguments and wrong configurations end with exit status 2 and one message; heavy imports wait until both are
right.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchtitan_npu.config import (
    Config,
    ConfigError,
    Problem,
    RunArgs,
    configured_world_size,
    load_config,
    validate_world,
)
from torchtitan_npu.config.coerce import show
from torchtitan_npu.config.keys import KEYS
from torchtitan_npu.config.overrides import split_overrides

logger = logging.getLogger(__name__)

EXIT_USAGE = 2

_EXAMPLE = """\
example (two processes on this machine):
  torchrun --nproc_per_node=2 {prog} --config examples/llama3_debug.yaml \\
    --data_dir data/train.jsonl --checkpoint_dir checkpoints --log_dir logs
"""

_COMMANDS = """\
commands:
  train     train a model from one YAML file
  plan      check a YAML file and print what training would need (the same as train --dry_run)
  tune      measure which bucket_cap_mb suits a YAML file on these ranks
  report    write one HTML page about runs, from their log directories
  prepare   turn text into token files
  tokenizer learn a tokenizer from text
  merge     write a checkpoint's model into one safetensors file
  export    write a checkpoint's model as Hugging Face's transformers loads it
  import    turn a Hugging Face model into a checkpoint to start from
  generate  continue a text with a checkpoint's model
  doctor    say what this machine has for NPUs, and what is wrong with it
  simulate  run a command on simulated Ascend cards, on the CPU

'torchtitan-npu <command> --help' explains each.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """``torchtitan-npu <command> …``. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        prog="torchtitan-npu",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_COMMANDS,
        allow_abbrev=False,
    )
    commands = (
        "train",
        "plan",
        "tune",
        "report",
        "prepare",
        "tokenizer",
        "merge",
        "export",
        "import",
        "generate",
        "doctor",
        "simulate",
    )
    parser.add_argument("command", choices=commands, help="what to do, see below")
    if not arguments:
        say(parser.format_help())
        return EXIT_USAGE
    command = parser.parse_args(arguments[:1]).command
    rest = arguments[1:]
    if command == "prepare":
        from torchtitan_npu.cli_prepare import main as prepare_main

        return prepare_main(rest)
    if command == "tokenizer":
        from torchtitan_npu.cli_tokenizer import tokenizer_main

        return tokenizer_main(rest)
    if command == "tune":
        from torchtitan_npu.cli_tune import tune_main

        return tune_main(rest)
    if command == "report":
        from torchtitan_npu.cli_report import report_main

        return report_main(rest)
    if command in ("merge", "export", "import"):
        from torchtitan_npu.cli_convert import convert_main

        return convert_main(command, rest)
    if command == "generate":
        from torchtitan_npu.cli_generate import generate_main

        return generate_main(rest)
    if command == "doctor":
        return _doctor(rest)
    if command == "simulate":
        from torchtitan_npu.cli_simulate import simulate_main

        return simulate_main(rest)
    if command == "plan":
        return train_main(["--dry_run", *rest], prog="torchtitan-npu plan")
    return train_main(rest, prog="torchtitan-npu train")


def train_main(argv: Sequence[str] | None = None, prog: str = "train.py") -> int:
    """``train.py --config … --data_dir …``: train, or with ``--dry_run`` print the plan. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _train_parser(prog)
    if not arguments or arguments == ["--dry_run"]:
        say(parser.format_usage() + "\n" + _EXAMPLE.format(prog=prog))
        return EXIT_USAGE
    overrides, others = split_overrides(arguments)
    args, unknown = parser.parse_known_args(others)
    if unknown:
        parser.error(unrecognized(unknown, parser))
    if args.world_size is not None and not args.dry_run:
        parser.error(
            "--world_size goes with --dry_run; torchrun's --nproc_per_node and --nnodes set the number of ranks"
        )
    try:
        config = load_config(args.config, overrides)
        if args.dry_run:
            return _dry_run(config, args.world_size, args.data_dir)
        if args.data_dir is None and not config.data.mixture:
            parser.error(
                "--data_dir is missing: name a file, a directory or a glob of prepared JSONL or .bin (see "
                "prepare_data.py), or several in data.mixture"
            )
        return _train(config, RunArgs(data_dir=args.data_dir, checkpoint_dir=args.checkpoint_dir, log_dir=args.log_dir))
    except ConfigError as error:
        say(f"{error}\n")
        return EXIT_USAGE


class Parser(argparse.ArgumentParser):
    """Reports wrong usage once a machine, not once a rank."""

    def error(self, message: str) -> NoReturn:
        if _reports():
            super().error(message)
        self.exit(EXIT_USAGE)


def _train_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        usage="%(prog)s --config FILE --data_dir PATH [--checkpoint_dir DIR] [--log_dir DIR]\n"
        f"{' ' * len(f'usage: {prog}')} [--dry_run [--world_size N]] [--section.key VALUE ...]",
        description="Train a model from one YAML file.",
        epilog="--section.key VALUE replaces a setting of the YAML, for example --training.max_steps 100; "
        "docs/configuration.md lists the keys.\n\n" + _EXAMPLE.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file")
    parser.add_argument(
        "--data_dir",
        metavar="PATH",
        help="a file, a directory or a glob of prepared JSONL or .bin; with data.mixture, the directory of its paths",
    )
    parser.add_argument(
        "--checkpoint_dir", type=Path, default=Path("checkpoints"), metavar="DIR", help="default: %(default)s"
    )
    parser.add_argument("--log_dir", type=Path, default=Path("logs"), metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--dry_run", action="store_true", help="check everything and print the plan; nothing is trained"
    )
    parser.add_argument(
        "--world_size",
        type=positive,
        metavar="N",
        help="ranks to plan for (default: WORLD_SIZE, or else the product of the YAML's degrees)",
    )
    return parser


def positive(text: str) -> int:
    """argparse type: a whole number from 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(text)


def unrecognized(unknown: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """The message for arguments nobody knows, with the nearest flag or YAML key for the first."""
    message = f"unrecognized arguments: {' '.join(unknown)}"
    name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
    flags = {key.rpartition(".")[2]: f"--{key}" for key in KEYS}
    flags |= {flag.lstrip("-"): flag for flag in parser._option_string_actions}
    close = difflib.get_close_matches(name, flags, n=1)
    return f"{message}; did you mean {flags[close[0]]}?" if close else message


def _doctor(arguments: Sequence[str]) -> int:
    parser = Parser(
        prog="torchtitan-npu doctor",
        description="Say what this machine has for NPUs (driver, firmware, CANN, torch, torch_npu, cards, network, "
        "environment variables) and what is wrong with it. Status 0: an NPU can be used, or none was to be expected; "
        "1: something is wrong.",
        allow_abbrev=False,
    )
    parser.parse_args(arguments)
    from torchtitan_npu.launch.doctor import examine

    examination = examine()
    sys.stdout.write(f"{examination.describe()}\n")
    return 1 if examination.problems else 0


def _dry_run(config: Config, world_size: int | None, data_dir: str | None) -> int:
    if world_size is None:
        text = os.environ.get("WORLD_SIZE", "")
        try:
            world_size = positive(text) if text else configured_world_size(config)
        except argparse.ArgumentTypeError as error:
            raise ConfigError("environment", [Problem("WORLD_SIZE", str(error))]) from error
    validate_world(config, world_size)
    from torchtitan_npu.data.errors import DataError
    from torchtitan_npu.data.sources import training_sources
    from torchtitan_npu.data.standalone import token_files

    try:
        if data_dir is not None or config.data.mixture:
            for source in training_sources(config.data, data_dir):
                token_files(source.path, source.key)
        if config.validation.data_dir is not None:
            token_files(config.validation.data_dir, "validation.data_dir")
    except DataError as error:
        say(f"{error}\n")
        return EXIT_USAGE
    if not _reports():
        return 0
    from torchtitan_npu.launch import reset_logging, setup_logging
    from torchtitan_npu.planning.report import dry_run

    setup_logging(rank=0, world_size=1)
    try:
        log_notes(config)
        sys.stdout.write(f"{dry_run(config, world_size).rstrip()}\n")
    finally:
        reset_logging()
    return 0


def _train(config: Config, run_args: RunArgs) -> int:
    from torchtitan_npu.launch import LaunchError, read_environment, reset_logging, setup_logging
    from torchtitan_npu.launch.log import flush_output

    try:
        env = read_environment()
        validate_world(config, env.world_size)
        setup_logging(env.rank, env.world_size, run_args.log_dir)
    except LaunchError as error:
        # Not only from the first rank of a machine: with broken variables nobody knows which that is.
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    try:
        if env.rank == 0:
            log_notes(config)
        from torchtitan_npu.train import run

        return run(config, run_args)
    finally:
        reset_logging()
        flush_output()


def log_notes(config: Config) -> None:
    """What the user should know about the configuration before anything starts."""
    for key, (preset_value, value) in config.preset_overrides.items():
        logger.info("%s: %s replaces %s's %s", key, show(value), config.model.name, show(preset_value))
    for warning in config.warnings:
        logger.warning("%s", warning)


def _reports() -> bool:
    """Whether this process speaks for its machine: what is wrong with a file there may be right on rank 0's."""
    return os.environ.get("LOCAL_RANK", "0") in ("0", "")


def say(text: str) -> None:
    """To stderr, once a machine."""
    if _reports():
        sys.stderr.write(text)


if __name__ == "__main__":
    sys.exit(main())
