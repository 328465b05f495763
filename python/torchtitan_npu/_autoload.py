"""Keeps ``import torch`` alive where torch_npu is installed and CANN is not.

torch loads installed device plug-ins at its own import, and torch_npu raises without CANN's libraries: nothing that
uses torch would run on such a machine, not even on the CPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import warnings

_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_LIBRARY = "libascendcl.so"

switched_off = False
"""Whether this process switched the plug-ins off, here, and not the user."""
_warned = False


def switch_off_without_cann() -> None:
    """Switch torch's plug-ins off, if torch is not imported yet, the user says nothing about it, torch_npu is installed
    and CANN cannot be found. Loads nothing that ``import torch`` would not.
    """
    global switched_off
    if "torch" in sys.modules or _VARIABLE in os.environ or importlib.util.find_spec("torch_npu") is None:
        return
    if not _cann_is_there():
        os.environ[_VARIABLE] = "0"
        switched_off = True


def warn_if_switched_off() -> None:
    """Say so, once."""
    global _warned
    if switched_off and not _warned:
        _warned = True
        warnings.warn(
            f"torch_npu is installed, but CANN's {_LIBRARY} cannot be found: torch is used without torch_npu "
            f"({_VARIABLE}=0), on the CPU. `torchtitan-npu doctor` says where it was looked for",
            RuntimeWarning,
            stacklevel=3,
        )


def environment_of_the_user() -> dict[str, str]:
    """The environment for other programs: without what this process set for itself."""
    environment = dict(os.environ)
    if switched_off:
        environment.pop(_VARIABLE, None)
    return environment


def _cann_is_there() -> bool:
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    # The places of csrc/ascend/libraries.cpp.
    roots = [os.environ.get("ASCEND_HOME_PATH", ""), os.environ.get("ASCEND_TOOLKIT_HOME", "")]
    roots += ["/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest"]
    folders += [f"{root}/lib64" for root in roots if root]
    if any(folder and os.path.exists(os.path.join(folder, _LIBRARY)) for folder in folders):
        return True
    try:
        ctypes.CDLL(_LIBRARY)  # the loader's own configuration
    except OSError:
        return False
    return True
