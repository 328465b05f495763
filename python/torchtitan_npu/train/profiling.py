"""``profile``: a trace of some steps for chrome://tracing or Perfetto, and the history of the device's memory."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from torchtitan_npu.config import Config
from torchtitan_npu.launch import Environment, LaunchError
from torchtitan_npu.launch.simulated import is_simulated

logger = logging.getLogger(__name__)

_MEMORY_EVENTS = 200_000
"""The last allocations and releases that the history of memory keeps."""


class Profiling:
    """Records the steps ``profile.start`` … ``start + steps - 1`` on the ranks ``profile.ranks``, into
    ``log_dir/profile``.

    What cannot be recorded is refused when it is built; a trace that cannot be written is an error in the log and no
    end of the run.
    """

    def __init__(self, cfg: Config, log_dir: Path, env: Environment, device: torch.device) -> None:
        """
        Raises:
            LaunchError: this device cannot be profiled as configured, or ``log_dir`` cannot be written.
        """
        wanted = cfg.profile
        self._first, self._last = wanted.start, wanted.start + wanted.steps - 1
        self._records = wanted.steps > 0 and (wanted.ranks == "all" or env.rank in wanted.ranks)
        self._rank, self._device = env.rank, device
        self._directory = log_dir / "profile"
        self._trace: Any = None
        self._began = 0
        self._snapshot = wanted.memory_snapshot
        if wanted.steps == 0:
            return
        _refuse(device, self._snapshot)  # on all ranks alike
        if self._records:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--log_dir {log_dir} cannot be written: {error}; name another directory") from error

    @property
    def recording(self) -> bool:
        return self._trace is not None

    @contextmanager
    def around_steps(self) -> Iterator[None]:
        """Writes what was recorded also where training ends inside the profiled steps."""
        try:
            yield
        finally:
            self._end(self._last)

    def before_step(self, step: int) -> None:
        if not self._records or self.recording or not self._first <= step <= self._last:
            return
        self._trace = _make_profile(self._device)
        self._began = step
        if self._snapshot:
            torch.get_device_module(self._device).memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._trace.start()

    def after_step(self, step: int) -> None:
        if step >= self._last:
            self._end(step)

    def _end(self, step: int) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        name = f"rank-{self._rank}-steps-{self._began}-{step}"
        try:
            trace.stop()
            path = self._directory / f"{name}.json"
            trace.export_chrome_trace(str(path))
            if self._rank == 0:
                logger.info("profile of steps %d to %d: %s", self._began, step, path)
            if self._snapshot:
                memory = torch.get_device_module(self._device).memory
                memory._dump_snapshot(str(self._directory / f"{name}-memory.pickle"))
                memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            logger.error("the profile of steps %d to %d could not be written: %s", self._began, step, error)


def _refuse(device: torch.device, snapshot: bool) -> None:
    if device.type == "cpu":
        if snapshot:
            raise LaunchError(
                "profile.memory_snapshot is true, and training is on the CPU, whose allocator keeps no history; set it "
                "to false: mem_bytes in metrics.jsonl has the peak of every step"
            )
        return
    if device.type == "npu":
        if is_simulated():
            raise LaunchError(
                "profile.steps is > 0: profiles of simulated cards are not supported; set it to 0, or profile with "
                "parallel.device=cpu"
            )
        if importlib.util.find_spec("torch_npu.profiler") is None:
            raise LaunchError(
                "profile.steps is > 0, and this torch_npu has no profiler; set it to 0, or install the torch_npu that "
                f"belongs to torch {torch.__version__}"
            )


def _make_profile(device: torch.device) -> Any:
    """An object with ``start``, ``stop`` and ``export_chrome_trace``."""
    if device.type == "npu":
        npu: Any = importlib.import_module("torch_npu.profiler")
        return npu.profile(activities=[npu.ProfilerActivity.CPU, npu.ProfilerActivity.NPU])
    return torch.profiler.profile(activities=torch.profiler.supported_activities())
