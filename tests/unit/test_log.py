"""The end of a process whose terminal or pipe has gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from processes import clean_environment

PROGRAM = """
import sys
from torchtitan_npu.launch.failure import _exit_at_once
from torchtitan_npu.launch.log import flush_output

sys.stdin.read()
print("nobody reads this")
{end}
"""


@pytest.mark.parametrize("end", ["flush_output()", "_exit_at_once(0)"])
def test_output_that_nobody_takes_is_no_failure(end: str) -> None:
    """With buffers, as Python has them unless PYTHONUNBUFFERED is set: the text is still there at the end."""
    environment = {key: value for key, value in clean_environment().items() if key != "PYTHONUNBUFFERED"}
    readable, writable = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(end=end)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=writable,
    )
    os.close(writable)
    os.close(readable)
    process.communicate()
    assert process.returncode == 0
