"""The simulated card in the process that runs the tests, for tests too small and too many for processes of their own.

To be called before torch is imported, since torch loads torch_npu, and torch_npu the libraries of CANN. Nothing that is
tested this way may leave an error behind on a stream: later tests would see it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os

import pytest
from simulated import find_simulator, simulator_environment

# In the order of what they need of each other; one that is loaded already is found by its name.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi")


def use_simulator() -> None:
    """Loads the simulator; skips the calling module where torch_npu is not installed."""
    if importlib.util.find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed", allow_module_level=True)
    folder = find_simulator()
    environment = simulator_environment(folder)
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "OMP_NUM_THREADS", "TT_SIM_MEMORY_MB"):
        os.environ[name] = environment[name]
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / "lib64" / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
