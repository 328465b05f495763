"""One HTML page about runs, from what they left in their ``--log_dir``. Needs neither torch nor a network."""

from torchtitan_npu.report.page import render
from torchtitan_npu.report.read import ReportError, Run, read_run

__all__ = ["ReportError", "Run", "read_run", "render"]
