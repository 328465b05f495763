"""How much of what the devices could compute a run uses: model FLOPs utilisation (MFU)."""

from __future__ import annotations

import logging
import time

import torch

from torchtitan_npu.config import Config
from torchtitan_npu.launch import Environment, gather_rows
from torchtitan_npu.launch.simulated import is_simulated
from torchtitan_npu.planning.device_peaks import peak_flops
from torchtitan_npu.planning.flops import flops_per_token

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GEMM_SIZE = 1024
_GEMM_SECONDS = 0.1


class Utilization:
    """Turns throughput into MFU: operations that the model needs, over what all devices could do in that time.

    On accelerators the peak is that of the table in ``planning.device_peaks``. On the CPU it is measured: a matrix
    product in the compute dtype on all ranks at once, since those of one machine share its cores.
    """

    def __init__(self, cfg: Config, env: Environment, device: torch.device, num_parameters: int) -> None:
        """Collective on the CPU."""
        self.flops_per_token = flops_per_token(cfg.model, cfg.training.seq_len, num_parameters)
        self.peak_flops: float | None
        """FLOP/s of all devices together, or None where it is not known."""
        if device.type == "cpu":
            mine = gemm_flops(_DTYPES[cfg.parallel.dtype])
            self.peak_flops = sum(row[0] for row in gather_rows([mine]))
        else:
            self.peak_flops = self._from_table(cfg, env, device)

    def mfu(self, tokens_per_second: float) -> float | None:
        """At a global throughput; None where the peak is not known."""
        return None if self.peak_flops is None else self.flops_per_token * tokens_per_second / self.peak_flops

    def _from_table(self, cfg: Config, env: Environment, device: torch.device) -> float | None:
        if device.type == "npu" and is_simulated():
            return None  # a simulated card computes on the CPU: a real card's peak would say nothing
        name = torch.get_device_module(device).get_device_name(device)
        peak = peak_flops(name, cfg.parallel.dtype)
        if peak is None:
            if env.rank == 0:
                logger.warning(
                    "the peak of %s in %s is not known, so there is no MFU in the metrics: add the device to "
                    "planning/device_peaks.py",
                    name,
                    cfg.parallel.dtype,
                )
            return None
        return peak * env.world_size


def gemm_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product on this process' share of the CPU: the best of those in a tenth of a second."""
    a, b = (torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype) for _ in range(2))
    torch.mm(a, b)  # chooses and compiles the kernel
    best = float("inf")
    end = time.monotonic() + _GEMM_SECONDS
    while True:
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
        if time.monotonic() >= end:
            return 2.0 * _GEMM_SIZE**3 / best
