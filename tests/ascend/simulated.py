"""Where the simulator is, and the environment of a process that uses it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

Run = Callable[..., subprocess.CompletedProcess[str]]  # see conftest.py


def find_simulator() -> Path:
    """The folder `cann` of the simulator's build; an error that says what to build if there is none."""
    named = os.environ.get("TT_SIMULATOR_DIR")
    folder = Path(named) if named else ROOT / "build" / "simulator" / "simulator" / "cann"
    if not (folder / "lib64" / "libascendcl.so").exists():
        raise FileNotFoundError(
            f"no simulator in {folder}: build it with `make simulator`, or\n"
            "  cmake -S . -B build/simulator -G Ninja -DTT_SIMULATOR=ON && ninja -C build/simulator\n"
            "or set TT_SIMULATOR_DIR to the folder 'cann' of a build"
        )
    return folder


def simulator_environment(folder: Path, **extra: str) -> dict[str, str]:
    """The environment of a process that uses the simulator."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TT_SIM_")}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "ASCEND_RT_VISIBLE_DEVICES"):
        environment.pop(name, None)
    libraries = [str(folder / "lib64"), environment.get("LD_LIBRARY_PATH", "")]
    # The package is installed, or else its core was compiled in place.
    in_place = [str(ROOT / "python")] if any((ROOT / "python" / "torchtitan_npu").glob("_C*.so")) else []
    environment.update(
        ASCEND_HOME_PATH=str(folder),
        ASCEND_OPP_PATH=str(folder / "opp"),
        LD_LIBRARY_PATH=":".join(path for path in libraries if path),
        PYTHONPATH=":".join([str(HERE), *in_place]),
        OMP_NUM_THREADS="1",
        TT_SIM_MEMORY_MB="1024",
    )
    environment.update(extra)
    return environment
