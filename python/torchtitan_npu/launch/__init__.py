"""Starting and stopping ranks: environment, process groups, timeouts, log output, failure reports.

The names are loaded at first use: those that look at the environment, and ``doctor``, need no torch, which may be what
is broken.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_npu.launch.device import choose_device
    from torchtitan_npu.launch.distributed import connect, disconnect, gather_rows, gather_texts, together
    from torchtitan_npu.launch.environment import Environment, LaunchError, read_environment
    from torchtitan_npu.launch.failure import run_rank
    from torchtitan_npu.launch.log import reset_logging, setup_logging, terminal_handlers
    from torchtitan_npu.launch.meshes import data_parallel_mesh, tensor_parallel_mesh
    from torchtitan_npu.launch.npu_variables import NpuVariables, read_npu_variables
    from torchtitan_npu.launch.timeouts import Timeouts, read_timeouts
    from torchtitan_npu.launch.waiting import once_per_machine

_MODULES = {
    "Environment": "environment",
    "LaunchError": "environment",
    "NpuVariables": "npu_variables",
    "Timeouts": "timeouts",
    "choose_device": "device",
    "connect": "distributed",
    "data_parallel_mesh": "meshes",
    "disconnect": "distributed",
    "gather_rows": "distributed",
    "gather_texts": "distributed",
    "once_per_machine": "waiting",
    "read_environment": "environment",
    "read_npu_variables": "npu_variables",
    "read_timeouts": "timeouts",
    "reset_logging": "log",
    "run_rank": "failure",
    "setup_logging": "log",
    "tensor_parallel_mesh": "meshes",
    "terminal_handlers": "log",
    "together": "distributed",
}

__all__ = [
    "Environment",
    "LaunchError",
    "NpuVariables",
    "Timeouts",
    "choose_device",
    "connect",
    "data_parallel_mesh",
    "disconnect",
    "gather_rows",
    "gather_texts",
    "once_per_machine",
    "read_environment",
    "read_npu_variables",
    "read_timeouts",
    "reset_logging",
    "run_rank",
    "setup_logging",
    "tensor_parallel_mesh",
    "terminal_handlers",
    "together",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"torchtitan_npu.launch.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'torchtitan_npu.launch' has no attribute {name!r}")
