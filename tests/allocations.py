"""How much memory torch's CPU allocator hands out."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.config import Config
from torchtitan_npu.fsdp import recompute_activations
from torchtitan_npu.ops import Documents
from torchtitan_npu.train.loss import StepLoss


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes allocated at any time during ``run`` beyond what was before, by the profiler's record of every
    allocation.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    live = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def peak_of_micro_batch(model: nn.Module, config: Config) -> int:
    """The most bytes allocated at any time by forward, loss and backward; a parameter's gradient is dropped when it is
    there, as the engine does. ``model`` has parameters already, on the CPU and in the dtype to compute in.
    """
    training = config.training
    recompute_activations(model, training.activation_checkpointing)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    plain: Any = SimpleNamespace(forward=model)  # all that a loss needs of a ParallelModel
    step_loss = StepLoss(config, valid_labels=256, dp_degree=1, loss_scale=1.0)
    tokens = torch.randint(0, config.model.vocab_size, (training.batch_size, training.seq_len))
    documents = Documents.from_ids(tokens // 64) if config.data.document_mask else None
    for _ in range(2):  # the first step fills caches
        peak = peak_bytes(lambda: step_loss(plain, tokens, tokens, documents)[0].backward())
    return peak
