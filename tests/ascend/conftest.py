"""Processes on the simulator.

A test that ends a process, or that could leave a stream in an error, gives its program to `run`. The simulator is
looked for in TT_SIMULATOR_DIR (the folder `cann` of a build) and in build/simulator.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from simulated import HERE, ROOT, Run, find_simulator, simulator_environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file first: no worker is then left with it when the others are done."""
    items.sort(key=lambda item: item.path.name != "test_train.py")


@pytest.fixture(scope="session")
def simulator() -> Path:
    return find_simulator()


@pytest.fixture(scope="session")
def run(simulator: Path) -> Run:
    """Runs a Python program: `run(text, TT_SIM_DELAY="3")`. Its exit code is for the caller to check."""

    def call(
        program: str, *arguments: str, timeout: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program), *arguments],
            env=simulator_environment(simulator, **environment),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return call


@pytest.fixture(scope="session")
def run_well(run: Run) -> Run:
    """`run` for programs that must succeed, without any check of the simulator finding something."""

    def call(program: str, *arguments: str, **options: str) -> subprocess.CompletedProcess[str]:
        done = run(program, *arguments, **options)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "simulated Ascend: rank" not in done.stderr, done.stderr
        return done

    return call


@pytest.fixture(scope="session")
def launcher(simulator: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library through which programs launch operators of their own; see launcher.cpp."""
    library = tmp_path_factory.mktemp("launcher") / "liblauncher.so"
    subprocess.run(
        [os.environ.get("CXX", "c++"), "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'simulator'}"]
        + [str(HERE / "launcher.cpp"), "-o", str(library), f"-L{simulator / 'lib64'}", "-lascendcl"],
        check=True,
    )
    os.environ["TEST_LAUNCHER"] = str(library)
    return library
