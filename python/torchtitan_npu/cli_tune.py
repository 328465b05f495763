"""``torchtitan-npu tune``: arguments."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_npu import cli
from torchtitan_npu.config import Config, ConfigError, Problem, load_config, validate_world
from torchtitan_npu.config.overrides import split_overrides

_EXAMPLE = """\
example (two processes on this machine):
  torchrun --nproc_per_node=2 --no-python torchtitan-npu tune --config examples/llama3_debug.yaml
"""


def tune_main(argv: Sequence[str] | None = None) -> int:
    """``torchtitan-npu tune --config …``: measure bucket caps. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        cli.say(parser.format_usage() + "\n" + _EXAMPLE)
        return cli.EXIT_USAGE
    overrides, others = split_overrides(arguments)
    args, unknown = parser.parse_known_args(others)
    if unknown:
        parser.error(cli.unrecognized(unknown, parser))
    try:
        config = load_config(args.config, overrides)
        if config.parallel.strategy != "fsdp":
            raise ConfigError(
                str(args.config),
                [Problem("parallel.strategy", f"is {config.parallel.strategy}; tune measures fsdp: set it to fsdp")],
            )
        if config.parallel.device == "npu":
            what = "npu is not supported yet by tune, which measures on the CPU; set it to cpu"
            raise ConfigError(str(args.config), [Problem("parallel.device", what)])
        if config.training.optimizer_state_offload:
            what = "true is not supported by tune, which measures on the CPU; set it to false"
            raise ConfigError(str(args.config), [Problem("training.optimizer_state_offload", what)])
        _check_predicted(config, args.predict_ranks)
        return _tune(config, args)
    except ConfigError as error:
        cli.say(f"{error}\n")
        return cli.EXIT_USAGE


def _tune(config: Config, args: argparse.Namespace) -> int:
    from torchtitan_npu.launch import LaunchError, read_environment, reset_logging, setup_logging

    try:
        env = read_environment()
        validate_world(config, env.world_size)
        setup_logging(env.rank, env.world_size)
    except LaunchError as error:
        sys.stderr.write(f"{error}\n")
        return cli.EXIT_USAGE
    try:
        if env.rank == 0:
            cli.log_notes(config)
        from torchtitan_npu.planning.tune import TuneArgs, run
        from torchtitan_npu.train.tune_trial import TuneTrial

        return run(config, TuneArgs(args.caps, args.steps, args.predict_ranks, args.output_dir), TuneTrial)
    finally:
        reset_logging()


def _check_predicted(config: Config, rank_counts: Sequence[int]) -> None:
    tp = config.parallel.tp_degree
    for ranks in rank_counts:
        if ranks % tp:
            what = f"{tp} must divide every number of --predict_ranks, which has {ranks}; name multiples of it"
            raise ConfigError(config.source, [Problem("parallel.tp_degree", what)])


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu tune",
        usage="%(prog)s --config FILE [--caps LIST] [--steps N] [--predict_ranks LIST] [--output_dir DIR]\n"
        f"{' ' * len('usage: torchtitan-npu tune')} [--section.key VALUE ...]",
        description="Measure which parallel.bucket_cap_mb suits a configuration on these ranks: real training steps on "
        "random tokens for each cap in turns, of as many of the model's layers as fit memory. Prints step times, "
        "exposed communication, collectives and memory, writes tune.csv and tune.png, and recommends a cap.",
        epilog="--section.key VALUE replaces a setting of the YAML; docs/tuning.md explains the columns and the "
        "prediction.\n\n" + _EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file")
    parser.add_argument(
        "--caps",
        type=caps,
        default="1,5,10,25,50,100,none",
        metavar="LIST",
        help="MiB, comma-separated; none is one bucket per unit (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=cli.positive, default=20, metavar="N", help="timed steps of each cap (default: %(default)s)"
    )
    parser.add_argument(
        "--predict_ranks",
        type=rank_counts,
        default=(),
        metavar="LIST",
        help="also predict the step for these numbers of ranks, for example 8,64",
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("tune"), metavar="DIR", help="for the files (default: %(default)s)"
    )
    return parser


def caps(text: str) -> tuple[float | None, ...]:
    """argparse type: different positive numbers or ``none``, comma-separated."""
    values: list[float | None] = []
    for part in text.split(","):
        if part.strip() == "none":
            values.append(None)
            continue
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not (value > 0 and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{part.strip()!r} is neither a number of MiB above 0 nor none")
        values.append(value)
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a cap twice")
    return tuple(values)


def rank_counts(text: str) -> tuple[int, ...]:
    """argparse type: different whole numbers from 2, comma-separated."""
    values = []
    for part in text.split(","):
        digits = part.strip()
        if not (digits.isascii() and digits.isdigit() and int(digits) > 1):
            raise argparse.ArgumentTypeError(f"{digits!r} is not a whole number of ranks >= 2")
        values.append(int(digits))
    if len(set(values)) != len(values):
        raise argparse.ArgumentTypeError(f"{text!r} names a number of ranks twice")
    return tuple(values)
