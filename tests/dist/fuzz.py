"""Draws programs (see ``programs.py``) and runs them on groups of ranks; what fails is shrunk to a minimal program.

    python tests/dist/fuzz.py --programs 1000 --seed 7
    python tests/dist/fuzz.py --program "Program(model=Group(children=()), actions=(Train(),))"
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import programs
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pool import RankPool
from programs import (
    CONTAINERS,
    LEAVES,
    Action,
    Alone,
    Call,
    Evaluate,
    Fail,
    Group,
    Leaf,
    Options,
    Program,
    Reload,
    Step,
    Train,
    Zero,
    run_program,
)

# Simple values first: hypothesis shrinks towards them.
_indices = st.integers(0, 3) | st.integers(-4, -1)
_paths = st.lists(_indices, max_size=4).map(tuple)
_calls = st.builds(Call, _paths, st.sampled_from(["", "children", "pairs", "whole"]))
_leaves = st.builds(Leaf, st.sampled_from(LEAVES), st.booleans(), st.sampled_from([False, False, False, True]))


def _groups(children: st.SearchStrategy[Any], least: int) -> st.SearchStrategy[Group]:
    return st.builds(
        Group,
        st.lists(children, min_size=least, max_size=4).map(tuple),
        st.sampled_from(CONTAINERS),
        st.booleans(),
        st.sampled_from(["tensor", "tuple", "dict"]),
        st.booleans(),
    )


_models = _groups(_leaves | _groups(_leaves | _groups(_leaves, 1), 1), 0)
_trains = st.builds(
    Train,
    st.lists(_calls, min_size=1, max_size=3).map(tuple),
    st.sampled_from([True, True, False]),
    st.sampled_from(["sum", "each", "reversed", "twice", "input", "drop"]),
    st.sampled_from(["", "", "no_grad", "inference"]),
)
_others: st.SearchStrategy[Action] = st.one_of(
    st.builds(Step),
    st.builds(Zero, st.booleans()),
    st.builds(Evaluate, _calls, st.sampled_from(["no_grad", "inference"])),
    st.builds(Alone, st.integers(0, 3), st.booleans()),
    st.builds(Reload, st.sampled_from(["sharded", "local", "full"])),
    st.builds(Fail, _calls, st.integers(0, 3), st.sampled_from(["forward", "backward", "recompute"])),
)
_options = st.builds(
    Options,
    st.sampled_from(["policy", "marks", "default"]),
    st.sampled_from(["auto", "auto", "c10d"]),
    st.sampled_from([None, 0.0002, 0.0005]),
    st.sampled_from([None, True, False]),
    st.sampled_from([False, False, False, True]),
)


def all_programs(world_sizes: tuple[int, ...] = (1, 2, 3, 4)) -> st.SearchStrategy[Program]:
    """Every program that ranks in step can run."""
    return st.builds(
        Program,
        _models,
        st.lists(_trains | _others, min_size=1, max_size=8).map(tuple),
        _options,
        st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=2).map(tuple),
        st.sampled_from(["adamw", "sgd"]),
        st.sampled_from(world_sizes),
    )


def run_on(pool: RankPool, program: Program, timeout: float = 60) -> None:
    try:
        pool.run(program.world_size, run_program, timeout=timeout, program=program)
    except pytest.fail.Exception as error:
        raise AssertionError(f'{error}\nagain: python tests/dist/fuzz.py --program "{program}"') from None


def fuzz(pool: RankPool, programs: int, first: int | None = None) -> Callable[[], None]:
    """A test of ``programs`` programs, the same ones for the same ``first`` (None: others each time)."""

    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(all_programs())
    def run(program: Program) -> None:
        run_on(pool, program)

    return run if first is None else seed(first)(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, help="the same programs again; default: others each time")
    parser.add_argument("--program", help="run this one: what a failure printed")
    arguments = parser.parse_args()
    pool = RankPool()
    try:
        if arguments.program:
            run_on(pool, eval(arguments.program, vars(programs)))
        else:
            fuzz(pool, arguments.programs, arguments.seed)()
    finally:
        pool.close()
    print("all right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
