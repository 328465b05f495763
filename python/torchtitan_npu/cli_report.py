"""``torchtitan-npu report``: arguments."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_npu import cli

_EXAMPLE = """\
example (compare two runs):
  torchtitan-npu report logs/baseline logs/flash --output report.html
"""


def report_main(argv: Sequence[str] | None = None) -> int:
    """``torchtitan-npu report LOG_DIR …``: write one HTML page about runs. Returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = cli.Parser(
        prog="torchtitan-npu report",
        description="Write one HTML page about one run or several: loss, gradient norm, learning rate, throughput, "
        "MFU, memory, where the time of a step goes, what differs between the configurations, and the plan. The file "
        "needs no network and no other file.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("log_dirs", nargs="+", type=Path, metavar="LOG_DIR", help="what the run had as --log_dir")
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    if not arguments:
        cli.say(parser.format_usage() + "\n" + _EXAMPLE)
        return cli.EXIT_USAGE
    args = parser.parse_args(arguments)
    from torchtitan_npu.report import ReportError, read_run, render

    try:
        runs = [read_run(directory) for directory in args.log_dirs]
    except ReportError as error:
        cli.say(f"{error}\n")
        return cli.EXIT_USAGE
    temporary = args.output.with_name(args.output.name + ".tmp")
    try:
        temporary.write_text(render(runs), encoding="utf-8")
        os.replace(temporary, args.output)
    except OSError as error:
        cli.say(f"--output {args.output} cannot be written: {error}; name another file\n")
        return 1
    for run in runs:
        for note in run.notes:
            cli.say(f"{run.directory}: {note}\n")
    sys.stdout.write(f"{args.output}\n")
    return 0
