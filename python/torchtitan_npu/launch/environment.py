"""What torchrun tells a rank through its environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

_HINT = (
    "start through torchrun, which sets them all:\n"
    "    torchrun --nproc_per_node=2 train.py …\n"
    "or unset them all to run a single process"
)


class LaunchError(RuntimeError):
    """The ranks were started, or connected to each other, in a way that cannot work."""


@dataclass(frozen=True)
class Environment:
    """A rank's place in the job."""

    rank: int = 0
    """This process among all, 0 … world_size - 1."""
    local_rank: int = 0
    """This process among those of its machine; the index of its device."""
    world_size: int = 1
    """Processes of the job."""
    local_world_size: int = 1
    """Processes of the job on this machine."""
    from_torchrun: bool = False
    """False: a single process that nothing launched; there is no rendezvous to go to."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    None of the first four set means one process (``MASTER_ADDR`` and ``MASTER_PORT`` alone mean nothing). Otherwise all
    six are needed.

    Raises:
        LaunchError: a variable is missing, not a number, or contradicts another; all problems are listed.
    """
    env = os.environ if environ is None else environ
    counts = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if not any(env.get(name) for name in counts):
        return Environment()

    problems: list[str] = []
    values: dict[str, int] = {}
    for name in (*counts, "MASTER_PORT"):
        text = env.get(name, "")
        if not text:
            problems.append(f"{name} is not set")
        elif not text.isascii() or not text.isdecimal():
            problems.append(f"{name}={text} is not a whole number")
        else:
            values[name] = int(text)
    if not env.get("MASTER_ADDR"):
        problems.append("MASTER_ADDR is not set")

    def check(low: str, high: str, *, may_equal: bool) -> None:
        if low in values and high in values:
            fits = values[low] <= values[high] if may_equal else values[low] < values[high]
            if not fits:
                rule = "at most" if may_equal else "less than"
                problems.append(f"{low}={values[low]} must be {rule} {high}={values[high]}")

    check("RANK", "WORLD_SIZE", may_equal=False)
    check("LOCAL_RANK", "LOCAL_WORLD_SIZE", may_equal=False)
    check("LOCAL_WORLD_SIZE", "WORLD_SIZE", may_equal=True)
    check("LOCAL_RANK", "RANK", may_equal=True)
    if "MASTER_PORT" in values and not 1 <= values["MASTER_PORT"] <= 65535:
        problems.append(f"MASTER_PORT={values['MASTER_PORT']} is not in 1..65535")
    if problems:
        raise LaunchError("environment variables of the launch:\n  " + "\n  ".join(problems) + f"\n{_HINT}")
    return Environment(
        rank=values["RANK"],
        local_rank=values["LOCAL_RANK"],
        world_size=values["WORLD_SIZE"],
        local_world_size=values["LOCAL_WORLD_SIZE"],
        from_torchrun=True,
    )
