"""Which ``bucket_cap_mb`` suits a configuration, this machine and this fabric: measures each with real steps."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan_npu.config import Config, validate_world
from torchtitan_npu.launch import (
    Environment,
    connect,
    data_parallel_mesh,
    disconnect,
    gather_rows,
    read_environment,
    read_timeouts,
    run_rank,
    together,
)
from torchtitan_npu.planning.fabric import Fabric, measure_fabric, probe_sizes
from torchtitan_npu.planning.measured_caps import remember
from torchtitan_npu.planning.memory import estimate_memory, format_bytes, optimizer_state_bytes, plan_fsdp
from torchtitan_npu.planning.options import fsdp_options
from torchtitan_npu.planning.process_memory import available_bytes
from torchtitan_npu.planning.traffic import planned_traffic
from torchtitan_npu.planning.tune_measure import Trial, measure_in_turns
from torchtitan_npu.planning.tune_report import Candidate, Prediction, cap_name, predict, recommend, report

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import FSDPPlan

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.8
"""Of what is available; the rest is for the program itself and for what the estimate leaves out."""
MIB = 1024**2


class TuneError(RuntimeError):
    """Tuning cannot start or go on; the message says what to do."""


@dataclass(frozen=True)
class TuneArgs:
    """What the command line asks for beside the configuration."""

    caps: tuple[float | None, ...]
    """MiB, each once; None is one bucket per unit."""
    steps: int
    """Timed steps of each cap."""
    predict_ranks: tuple[int, ...]
    output_dir: Path


MakeTrial = Callable[[Config, Environment], Trial]


def run(cfg: Config, args: TuneArgs, make_trial: MakeTrial) -> int:
    """Tune in this process as one rank; return the exit status. Failures are reported as those of training.

    ``make_trial``: builds what is timed, of a configuration with as many layers as fit and one of the caps.
    """
    env = read_environment()
    try:
        return run_rank(lambda: _run(cfg, args, env, make_trial), env)
    finally:
        disconnect()


def _run(cfg: Config, args: TuneArgs, env: Environment, make_trial: MakeTrial) -> int:
    connect(env, read_timeouts(), torch.device("cpu"))
    tp = cfg.parallel.tp_degree
    if args.predict_ranks and env.world_size < 2 * tp:
        several = f", and so do the {tp} of parallel.tp_degree" if tp > 1 else ""
        raise TuneError(
            f"--predict_ranks needs a measured fabric, and one rank sends nothing{several}: start {2 * tp} or more "
            "through torchrun"
        )
    together(lambda: args.output_dir.mkdir(parents=True, exist_ok=True) if env.rank == 0 else None)
    configured = cfg
    cfg, layers_note = _fit(cfg, env)
    logger.info(
        "tuning %s on %d rank(s): %s; %d caps x %d timed steps of %d micro-batch(es) of %d x %d tokens",
        cfg.model.name,
        env.world_size,
        layers_note,
        len(args.caps),
        args.steps,
        cfg.training.gradient_accumulation_steps,
        cfg.training.batch_size,
        cfg.training.seq_len,
    )
    by_name = {cap_name(cap): cap for cap in args.caps}
    configs = {name: _with_cap(cfg, cap) for name, cap in by_name.items()}
    plans = {name: plan_fsdp(config, env.world_size) for name, config in configs.items()}
    logging.getLogger("torchtitan_npu.fsdp").setLevel(logging.WARNING)  # one line per model; there are many here
    fabric = _measure_fabric(cfg, list(plans.values()), env)

    makers = {name: partial(make_trial, config, env) for name, config in configs.items()}
    measured = measure_in_turns(makers, args.steps, cfg.training.seed)
    micro_batches = cfg.training.gradient_accumulation_steps
    candidates = [
        Candidate(
            by_name[name],
            plan,
            planned_traffic(plan, micro_batches),
            measured[name],
            optimizer_state_bytes(cfg, plan.parameter_bytes),
        )
        for name, plan in plans.items()
    ]
    predictions: list[Prediction] = []
    for ranks in args.predict_ranks:
        for candidate in candidates:
            assert fabric is not None
            plan = plan_fsdp(_with_cap(cfg, candidate.cap_mb, dp_degree=-1), ranks)
            predictions.append(predict(candidate, fabric, plan, planned_traffic(plan, micro_batches), ranks))
    if env.rank == 0:
        recommendation = recommend(candidates)
        _keep(configured, env.world_size, candidates, recommendation.candidate)
        report(cfg, candidates, recommendation, fabric, predictions, layers_note, args.output_dir)
    gather_rows([0.0])  # no rank leaves while another may still need it
    return 0


def _keep(cfg: Config, world_size: int, candidates: list[Candidate], best: Candidate) -> None:
    """For the hints of runs of ``cfg``; a single cap has nothing to be compared with."""
    if len(candidates) == 1:
        return
    slowdowns = {c.cap_mb: statistics.median(c.measured.ratios_to(best.measured)) for c in candidates}
    try:
        path = remember(cfg, world_size, "cpu", best.cap_mb, slowdowns)
    except OSError as error:
        logger.warning("later runs cannot hint at these caps, which could not be kept: %s", error)
        return
    logger.info("kept in %s for the hints of later runs of this model on as many ranks of this machine", path)


def _with_cap(cfg: Config, cap_mb: float | None, **parallel: Any) -> Config:
    return dataclasses.replace(cfg, parallel=dataclasses.replace(cfg.parallel, bucket_cap_mb=cap_mb, **parallel))


def _fit(cfg: Config, env: Environment) -> tuple[Config, str]:
    """The configuration with as many of its layers as this machine's memory holds, and what that was, in words."""
    here = int(min(row[0] for row in gather_rows([float(available_bytes())])))
    share = int(MEMORY_SHARE * here) // env.local_world_size
    share = int(min(row[0] for row in gather_rows([float(share)])))
    all_layers = cfg.model.n_layers
    for layers in range(all_layers, 0, -1):
        fitted = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, n_layers=layers))
        needed = estimate_memory(fitted, env.world_size).total
        if needed <= share:
            if layers == all_layers:
                return fitted, f"all {layers} layers"
            return fitted, f"{layers} of {all_layers} layers, which is what {format_bytes(share)} per rank hold"
    raise TuneError(
        f"even one layer of {cfg.model.name} needs about {format_bytes(needed)} per rank, and {format_bytes(share)} "
        f"({MEMORY_SHARE:.0%} of what is available, over {env.local_world_size} rank(s) of a machine) are there: lower "
        "training.batch_size or training.seq_len, or start more ranks"
    )


def _measure_fabric(cfg: Config, plans: list[FSDPPlan], env: Environment) -> Fabric | None:
    """Among the ranks that share parameters; those of other tensor-parallel ranks measure at the same time."""
    degrees = validate_world(cfg, env.world_size)
    if degrees.dp < 2:
        return None
    largest = max(max(planned_traffic(plan).gathers) for plan in plans)
    largest = min(largest, 64 * MIB)
    mesh = data_parallel_mesh(degrees, "cpu") if degrees.tp > 1 else None
    return measure_fabric(probe_sizes(largest), device_mesh=mesh, **fsdp_options(cfg.parallel))
