"""Starting and stopping ranks: environment, process groups, timeouts, log output, failure reports."""

from torchtitan_npu.launch.device import choose_device
from torchtitan_npu.launch.distributed import connect, disconnect, gather_rows, gather_texts, together
from torchtitan_npu.launch.environment import Environment, LaunchError, read_environment
from torchtitan_npu.launch.failure import run_rank
from torchtitan_npu.launch.log import setup_logging
from torchtitan_npu.launch.timeouts import Timeouts, read_timeouts

__all__ = [
    "Environment",
    "LaunchError",
    "Timeouts",
    "choose_device",
    "connect",
    "disconnect",
    "gather_rows",
    "gather_texts",
    "read_environment",
    "read_timeouts",
    "run_rank",
    "setup_logging",
    "together",
]
