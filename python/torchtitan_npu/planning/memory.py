"""Memory per card before anything is allocated."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchtitan_npu.config import Config, ModelConfig, TrainingConfig, validate_world
from torchtitan_npu.models import build_model, cut_for_planning, run_for_planning
from torchtitan_npu.ops import Documents, cross_entropy, linear_cross_entropy, z_loss
from torchtitan_npu.ops.flash_npu import MASK_BYTES
from torchtitan_npu.ops.npu_shapes import npu_shapes
from torchtitan_npu.planning.activations import peak_of_micro_batch
from torchtitan_npu.planning.options import fsdp_options

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import FSDPPlan

MIB = 1024**2
GIB = 1024**3

_COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the rank that holds most."""

    parameters: int
    """Master copy, fp32."""
    gradients: int
    """fp32, one per parameter."""
    optimizer: int
    """The optimizer's state: AdamW's two moments or SGD's momentum, without what is kept on the host."""
    buffers: int
    """Gathered parameters and communication buffers."""
    activations: int
    """What forward, loss and backward need beside the others; see ``activation_bytes``."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.activations

    def describe(self) -> str:
        """One line."""
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "communication": self.buffers,
            "activations": self.activations,
        }
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        return f"memory per card: about {format_bytes(self.total)} ({listed}), without the program itself"


def format_bytes(size: int) -> str:
    """``58.2 GB`` or ``310.4 MB``, in powers of 1024."""
    return f"{size / GIB:.1f} GB" if size >= GIB else f"{size / MIB:.1f} MB"


def estimate_memory(cfg: Config, world_size: int) -> MemoryEstimate:
    """Memory per card of a run of ``cfg`` on ``world_size`` ranks. Builds the model without memory.

    Parameters, gradients, optimizer and buffers are exact for ``fsdp`` and ``hsdp``.
    """
    activations = activation_bytes(cfg)
    if cfg.parallel.strategy != "ddp":
        plan = plan_fsdp(cfg, world_size)
        return MemoryEstimate(
            parameters=plan.parameter_bytes,
            gradients=plan.gradient_bytes,
            optimizer=optimizer_state_bytes(cfg, plan.parameter_bytes),
            buffers=plan.arena_bytes,
            activations=activations,
        )
    with torch.device("meta"):
        model = build_model(cfg.model)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    # DDP's gradients are views of its buckets; autocast keeps a 16-bit copy of every matrix during a step.
    copies = size // 2 if cfg.parallel.dtype != "fp32" else 0
    return MemoryEstimate(
        parameters=size,
        gradients=size,
        optimizer=optimizer_state_bytes(cfg, size),
        buffers=copies,
        activations=activations,
    )


def optimizer_state_bytes(cfg: Config, parameter_bytes: int) -> int:
    """What the optimizer keeps on the card for fp32 parameters of ``parameter_bytes``."""
    training = cfg.training
    if training.optimizer == "sgd":
        return parameter_bytes if training.momentum else 0
    if training.optimizer_state_offload:
        return 0
    return parameter_bytes if training.optimizer_state_dtype == "bf16" else 2 * parameter_bytes


def memory_kinds(cfg: Config, memory: MemoryEstimate) -> dict[str, int]:
    """``memory`` by kind, for tables; what the size of the vocabulary adds to the activations is ``logits``."""
    without = replace(cfg, model=replace(cfg.model, vocab_size=cfg.parallel.tp_degree))
    logits = min(memory.activations, activation_bytes(cfg) - activation_bytes(without))
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "arena": memory.buffers,
        "activations": memory.activations - logits,
        "logits": logits,
    }


def on_device(cfg: Config, device_type: Any) -> Config:
    """``cfg`` to plan with, for a device that is known by now: ``parallel.device: auto`` is planned as the CPU."""
    return replace(cfg, parallel=replace(cfg.parallel, device=device_type))


def plan_fsdp(cfg: Config, world_size: int) -> FSDPPlan:
    """The plan by which FSDP would shard the model of ``cfg``, without devices or memory.

    Under tensor parallelism, of the part of the model that each tensor-parallel rank has.
    """
    from torchtitan_npu.fsdp import plan_model

    with torch.device("meta"):
        model: nn.Module = build_model(cfg.model)
    degrees = validate_world(cfg, world_size)
    if degrees.tp > 1:
        model = cut_for_planning(model, degrees.tp)
    return plan_model(model, degrees.shard, replicas=degrees.replicate, **fsdp_options(cfg.parallel))


def activation_bytes(cfg: Config) -> int:
    """Most of what one micro-batch needs beside parameters, gradients and buffers at any time: every allocation of the
    step is followed (planning/activations.py), with ``parallel.device: npu`` those of the NPU's fused kernels. Under
    tensor parallelism, those of one rank and its collectives.
    """
    on_npu = cfg.parallel.device == "npu"
    dtype, masked = _COMPUTE[cfg.parallel.dtype], cfg.data.document_mask
    chunk, tp = cfg.loss_chunk_tokens, cfg.parallel.tp_degree
    peak = _traced_peak(cfg.model, cfg.training, dtype, chunk, tp, masked=masked, on_npu=on_npu)
    return peak + (MASK_BYTES if on_npu and cfg.model.use_flash_attention else 0)


@functools.lru_cache(maxsize=64)  # tables and hints ask again for what the plan has asked
def _traced_peak(
    model_cfg: ModelConfig,
    training: TrainingConfig,
    dtype: torch.dtype,
    chunk: int,
    tp_degree: int,
    *,
    masked: bool,
    on_npu: bool,
) -> int:
    def build(num_layers: int) -> nn.Module:
        with torch.device("meta"):
            model = build_model(replace(model_cfg, n_layers=num_layers))
        return run_for_planning(model, tp_degree) if tp_degree > 1 else model

    def loss_of(model: nn.Module) -> Tensor:
        tokens_BT = torch.empty(training.batch_size, training.seq_len, dtype=torch.int64, device="meta")
        # One document a row: their number changes what a mask holds on NPUs only, and little.
        ends_N = torch.empty(training.batch_size, dtype=torch.int64, device="meta")
        documents = Documents(tokens_BT, ends_N) if masked else None
        weight = training.z_loss_weight
        if chunk:
            head = partial(linear_cross_entropy, labels=tokens_BT, chunk_tokens=chunk, z_loss_weight=weight)
            objective: Tensor = model(tokens_BT, documents, head)[0]
            return objective
        logits_BTV = model(tokens_BT, documents)
        loss = cross_entropy(logits_BTV, tokens_BT)
        return loss + weight * z_loss(logits_BTV, tokens_BT) if weight else loss

    with npu_shapes() if on_npu else contextlib.nullcontext():
        return peak_of_micro_batch(
            build,
            loss_of,
            num_layers=model_cfg.n_layers,
            dtype=dtype,
            activation_checkpointing=training.activation_checkpointing,
        )
