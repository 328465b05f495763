"""From a configuration to a model on this rank, by ``parallel.strategy``."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from torchtitan_npu.config import Config, ConfigError, Degrees, Problem, match_parameter_groups, validate_world
from torchtitan_npu.launch import data_parallel_mesh, tensor_parallel_mesh
from torchtitan_npu.models import build_model, parallelize_tensors
from torchtitan_npu.ops import Documents
from torchtitan_npu.planning import fsdp_options
from torchtitan_npu.train.optimizer import decayed_names

if TYPE_CHECKING:
    from torchtitan_npu.fsdp import GradScaler

logger = logging.getLogger(__name__)

INITIAL_LOSS_SCALE = 2.0**16
"""Of fp16; halved whenever a gradient overflows, doubled after 2,000 steps without."""

_AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


Head = Callable[[Tensor, Tensor], Any]
"""Takes the hidden states ``[B, T, M]`` and the output matrix ``[V, M]``, in the model's forward."""


class ParallelModel(Protocol):
    """A model whose gradients, after backward, are the average over the ranks."""

    module: nn.Module
    """Names the parameters; its ``parameters()`` are what the optimizer updates."""
    sharded: bool
    """Whether each rank holds only its pieces."""
    decayed: frozenset[str]
    """Names of the parameters that weight decay applies to."""
    num_parameters: int
    """Of the whole model."""

    def forward(self, tokens_BT: Tensor, documents: Documents | None, head: Head | None = None) -> Any:
        """Logits ``[B, T, V]``, or what ``head`` makes of their factors; under tensor parallelism both are DTensors.
        With ``documents``, attention stays inside them.
        """
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        """Surrounds forward, loss and, in training, backward of one micro-batch; ``last``: of its optimizer step."""
        ...

    def clip_grad_norm(self, max_norm: float | None) -> float:
        """Scale the gradients down to a global 2-norm of ``max_norm``; return the norm before. Collective.

        A norm that is not finite leaves them as they are, so that one can see which ones are to blame.
        """
        ...

    def communication_seconds(self) -> float | None:
        """Time spent blocked on other ranks so far, or None where it is not measured."""
        ...


def parallelize(cfg: Config, device: torch.device) -> ParallelModel:
    """Build and initialise the model that ``cfg`` describes, on ``device``. Collective.

    It is built without memory first; FSDP shards it and then fills the shards, so no rank ever holds the whole model.

    Raises:
        ConfigError: an item of ``training.parameter_groups`` has no parameters.
    """
    with torch.device("meta"):
        model: nn.Module = build_model(cfg.model)
    match_parameter_groups(cfg, [name for name, _ in model.named_parameters()])  # before anything that takes time
    if cfg.parallel.strategy == "ddp":
        return ReplicatedModel(model, cfg, device)
    return ShardedModel(model, cfg, device)


def refuse_device(cfg: Config, device: torch.device) -> None:
    """Early, and with the configuration's names, what would fail when the model is sharded.

    Raises:
        ConfigError: ``device`` cannot train what ``cfg`` describes.
    """
    if cfg.parallel.tp_degree > 1 and device.type not in ("cpu", "npu"):
        problem = Problem(
            "parallel.tp_degree",
            f"{cfg.parallel.tp_degree} is not supported yet on {device.type.upper()}s; set it to 1, or "
            "parallel.device to cpu or npu",
        )
        raise ConfigError(cfg.source, [problem])
    if cfg.training.optimizer_state_offload and device.type == "cpu":
        problem = Problem(
            "training.optimizer_state_offload",
            "true has nothing to move where ranks train on the CPU; set it to false, or "
            "training.optimizer_state_dtype to bf16 to halve that memory",
        )
        raise ConfigError(cfg.source, [problem])


def make_scaler(cfg: Config, model: ParallelModel) -> GradScaler:
    """The loss scaling of ``parallel.dtype: fp16``; for other dtypes one that passes everything through."""
    from torchtitan_npu.fsdp import GradScaler

    return GradScaler(model.module, init_scale=INITIAL_LOSS_SCALE, enabled=cfg.parallel.dtype == "fp16")


class ShardedModel:
    """``strategy: fsdp`` and ``hsdp``. Gradients are reduced after every micro-batch: the least memory."""

    sharded = True

    def __init__(self, model: nn.Module, cfg: Config, device: torch.device) -> None:
        from torchtitan_npu.fsdp import FSDP

        self.decayed = decayed_names(model)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        degrees = validate_world(cfg, dist.get_world_size())
        if degrees.tp > 1:
            parallelize_tensors(model, tensor_parallel_mesh(degrees, device.type))
        # FSDP returns the module that it was given, extended.
        self._model: Any = FSDP(  # type: ignore[call-arg]
            model,
            device=device,
            device_mesh=_data_parallel_ranks(degrees, device),
            init_seed=cfg.training.seed,
            activation_checkpointing=cfg.training.activation_checkpointing,
            **fsdp_options(cfg.parallel),
        )
        self.module = cast(nn.Module, self._model)

    def forward(self, tokens_BT: Tensor, documents: Documents | None, head: Head | None = None) -> Any:
        return self._model(tokens_BT, documents, head)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        from torchtitan_npu.fsdp.clip import grad_norm, scale_gradients

        norm = grad_norm(self._model)
        if max_norm is not None and math.isfinite(norm):
            scale_gradients(self._model, max_norm, norm)
        return float(norm)

    def communication_seconds(self) -> float | None:
        return self._model.communication_seconds()


def _data_parallel_ranks(degrees: Degrees, device: torch.device) -> Any:
    """Those that have the same part of each layer as this one, as FSDP takes them. Collective over all ranks."""
    if degrees.replicate > 1:
        first = degrees.tp_rank(dist.get_rank())
        return torch.arange(first, degrees.dp * degrees.tp, degrees.tp).view(degrees.replicate, degrees.shard)
    return data_parallel_mesh(degrees, device.type) if degrees.tp > 1 else None


class ReplicatedModel:
    """``strategy: ddp``: torch's DistributedDataParallel, with autocast for bf16 and fp16."""

    sharded = False

    def __init__(self, model: nn.Module, cfg: Config, device: torch.device) -> None:
        if cfg.parallel.reshard_after_forward is not None:
            logger.warning("parallel.reshard_after_forward has no effect with parallel.strategy=ddp")
        self.decayed = decayed_names(model)
        self.num_parameters = sum(p.numel() for p in model.parameters())
        from torchtitan_npu.fsdp import materialize, recompute_activations

        self.module = materialize(model, cfg.training.seed).to(device)  # the values that strategy: fsdp starts from
        recompute_activations(self.module, cfg.training.activation_checkpointing)
        self._device_type = device.type
        self._autocast_dtype = _AUTOCAST[cfg.parallel.dtype]
        self._ddp = DistributedDataParallel(
            self.module,
            bucket_cap_mb=cfg.parallel.bucket_cap_mb,
            gradient_as_bucket_view=True,
            forward_sync_buffers=False,
        )
        if cfg.parallel.reduce_dtype == "bf16":
            self._ddp.register_comm_hook(dist.group.WORLD, bf16_compress_hook)

    def forward(self, tokens_BT: Tensor, documents: Documents | None, head: Head | None = None) -> Any:
        dtype = self._autocast_dtype
        with torch.autocast(self._device_type, dtype=dtype, enabled=dtype is not None):
            return self._ddp(tokens_BT, documents, head)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self._ddp.no_sync()

    def clip_grad_norm(self, max_norm: float | None) -> float:
        parameters = list(self.module.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        if max_norm is not None and math.isfinite(norm):
            clip_grads_with_norm_(parameters, max_norm, norm)
        return float(norm)

    def communication_seconds(self) -> float | None:
        return None
