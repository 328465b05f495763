"""``torchtitan-npu simulate``: run a command on simulated Ascend cards.

It only sets environment variables for the command: the product itself never loads the simulator.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torchtitan_npu import cli
from torchtitan_npu._autoload import environment_of_the_user

EXIT_NOT_FOUND = 127
"""What a shell returns for a command that does not exist."""

_LIBRARY = "lib64/libascendcl.so"
_CARDS, _MOST_CARDS = 8, 64
_LEAST_MEMORY_MB, _MOST_MEMORY_MB = 4, 1 << 20

_EXAMPLE = """\
example (in an environment with torch_npu, see docs/simulator.md):
  torchtitan-npu simulate --npus 2 -- torchrun --nproc_per_node=2 train.py --config examples/llama3_debug.yaml \\
    --data_dir data/train.jsonl --parallel.device npu
"""


class SimulatorError(RuntimeError):
    """The simulator cannot be used; the message says how to get it."""


def simulate_main(argv: Sequence[str] | None = None) -> int:
    """``torchtitan-npu simulate [options] -- COMMAND …``: becomes the command; returns, with a status, on errors."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not arguments:
        cli.say(parser.format_usage() + "\n" + _EXAMPLE)
        return cli.EXIT_USAGE
    own, command = _split(arguments)
    args = parser.parse_args(own)
    if not command:
        parser.error("no command: write it after --, for example: torchtitan-npu simulate -- python script.py")
    try:
        _require_torch_npu()
        outer = environment_of_the_user()
        folder = find_simulator(outer)
    except SimulatorError as error:
        cli.say(f"{error}\n")
        return cli.EXIT_USAGE
    environment = simulated_environment(outer, folder, npus=args.npus, memory_mb=args.memory_mb)
    cards = environment["TT_SIM_NPUS"]
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        cli.say(f"command not found: {command[0]}\n")
        return EXIT_NOT_FOUND
    cli.say(
        f"simulation: {command[0]} runs on {cards} simulated Ascend cards, computed on this machine's CPU by "
        f"{folder}; it says nothing about the speed of a real card\n"
    )
    return _become(program, command, environment)


def find_simulator(environ: Mapping[str, str]) -> Path:
    """The folder ``cann`` of a simulator: TT_SIMULATOR_DIR, the installed package's, or that of a source tree (the
    one that this package belongs to, or the current directory).

    Raises:
        SimulatorError: there is none; the message says where it was looked for and how to get one.
    """
    named = environ.get("TT_SIMULATOR_DIR")
    if named:
        if not (Path(named) / _LIBRARY).is_file():
            raise SimulatorError(
                f"TT_SIMULATOR_DIR={named} is no simulator: {Path(named) / _LIBRARY} does not exist. It names the "
                "folder `cann` of a build, for example build/simulator/simulator/cann"
            )
        return Path(named).resolve()
    package = Path(__file__).resolve().parent
    places = [package / "_simulator" / "cann"]
    for root in dict.fromkeys((package.parents[1], Path.cwd())):
        if (root / "simulator" / "CMakeLists.txt").is_file():
            places.append(root / "build" / "simulator" / "simulator" / "cann")
    for place in places:
        if (place / _LIBRARY).is_file():
            return place
    tried = "".join(f"\n  {place}" for place in places)
    raise SimulatorError(
        f"there is no simulator in{tried}\n"
        "Build it in the source tree: `make simulator`; or install a wheel that has it: "
        "`pip install . -C cmake.define.TT_SIMULATOR=ON`; or set TT_SIMULATOR_DIR to the folder `cann` of a build"
    )


def simulated_environment(
    environ: Mapping[str, str], folder: Path, *, npus: int | None, memory_mb: int | None
) -> dict[str, str]:
    """``environ`` with everything that makes torch_npu load the libraries in ``folder`` and no others."""
    environment = dict(environ)
    # A real CANN's own operators would be looked up before the simulator's.
    environment.pop("ASCEND_CUSTOM_OPP_PATH", None)
    # This environment's torchrun and python are the ones that have torch_npu, whether it is activated or not.
    own = os.path.dirname(os.path.abspath(sys.executable))
    libraries = [str(folder / "lib64"), environment.get("LD_LIBRARY_PATH", "")]
    environment.update(
        ASCEND_HOME_PATH=str(folder),
        ASCEND_OPP_PATH=str(folder / "opp"),
        LD_LIBRARY_PATH=":".join(path for path in libraries if path),
        PATH=os.pathsep.join([own, environment.get("PATH", os.defpath)]),
        TT_SIM_NPUS=str(npus or environ.get("TT_SIM_NPUS") or _CARDS),
    )
    if memory_mb is not None:
        environment["TT_SIM_MEMORY_MB"] = str(memory_mb)
    return environment


def _require_torch_npu() -> None:
    if importlib.util.find_spec("torch_npu") is not None:
        return
    try:
        version = importlib.metadata.version("torch").partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        version = "2.13.0"
    raise SimulatorError(
        f"torch_npu is not installed for {sys.executable}: pip install torch_npu=={version} (it has to belong to torch "
        f"{version}; where torch came from an index of CPU builds, name that index again, or pip may replace it)"
    )


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is before and after the first ``--``."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _become(program: str, command: Sequence[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [program, *command[1:]], environment)  # Python finds its environment by its first argument


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="torchtitan-npu simulate",
        usage="%(prog)s [--npus N] [--memory_mb N] -- COMMAND [ARGUMENT ...]",
        description="Run a command on simulated Ascend cards: the unmodified torch_npu, over a CANN that computes on "
        "the CPU. For trying out and testing programs without a card; it says nothing about speed.",
        epilog="docs/simulator.md explains what it checks and which environment variables (TT_SIM_...) it takes.\n\n"
        + _EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--npus", type=_cards, metavar="N", help=f"cards, 1..{_MOST_CARDS} (default: TT_SIM_NPUS, or {_CARDS})"
    )
    parser.add_argument(
        "--memory_mb",
        type=_memory_mb,
        metavar="N",
        help="MiB per card (default: TT_SIM_MEMORY_MB, or 16384; only what is used takes memory)",
    )
    return parser


def _cards(text: str) -> int:
    return _whole(text, 1, _MOST_CARDS)


def _memory_mb(text: str) -> int:
    return _whole(text, _LEAST_MEMORY_MB, _MOST_MEMORY_MB)


def _whole(text: str, low: int, high: int) -> int:
    if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {low}..{high}")
    return int(text)
