"""One rank's run, from the environment to the exit status."""

from __future__ import annotations

import logging

import torch

from torchtitan_npu.config import Config, RunArgs
from torchtitan_npu.launch import (
    Environment,
    choose_device,
    connect,
    disconnect,
    gather_rows,
    read_environment,
    read_npu_variables,
    read_timeouts,
    run_rank,
)
from torchtitan_npu.train.out_of_memory import explained_out_of_memory
from torchtitan_npu.train.trainer import Trainer

logger = logging.getLogger(__name__)


def run(cfg: Config, args: RunArgs) -> int:
    """Train as ``cfg`` says, in this process as one rank; return the exit status.

    A failure is reported through logging, with status 1. In a job with several ranks the process ends here, with that
    status: see ``run_rank``. A single process has neither a process group nor ``training.deterministic`` afterwards.

    Raises:
        LaunchError: torchrun's environment variables are incomplete or contradict each other.
    """
    env = read_environment()
    deterministic = torch.get_deterministic_debug_mode()
    try:
        return run_rank(lambda: _run(cfg, args, env), env)
    finally:
        torch.set_deterministic_debug_mode(deterministic)
        disconnect()


def _run(cfg: Config, args: RunArgs, env: Environment) -> int:
    timeouts = read_timeouts()
    if env.rank == 0:
        logger.info("%s", timeouts.describe())
        for warning in timeouts.warnings:
            logger.warning("%s", warning)
    device = choose_device(cfg.parallel.device, env)
    if device.type == "npu" and env.rank == 0:
        _log_npu_variables(cfg)
    connect(env, timeouts, device)
    trainer: Trainer | None = None

    def where() -> str:
        if trainer is None:
            return "before the first step"
        last = trainer.checkpoints.last
        kept = f"; the last checkpoint is {last}, and training continues from it" if last else ""
        return f"in step {trainer.step + 1}{kept}"

    with explained_out_of_memory(cfg, env, device, where):
        trainer = Trainer(cfg, args, env, device)
        status = trainer.train()
    trainer.close()
    if env.world_size > 1:
        gather_rows([0.0])  # no rank leaves while another may still need it
    return status


def _log_npu_variables(cfg: Config) -> None:
    variables = read_npu_variables()
    logger.info("%s", variables.describe())
    element_bytes = 4 if cfg.parallel.dtype == "fp32" else 2
    training, dim = cfg.training, cfg.model.dim
    logger.info("%s", variables.buffer_advice(training.batch_size, training.seq_len, dim, element_bytes))
    for warning in variables.warnings:
        logger.warning("%s", warning)
