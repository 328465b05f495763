"""The parameters that are named when a gradient is not finite."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from pool import on_ranks
from twin import SmallModel, Twin

from torchtitan_npu.fsdp.clip import grad_norm
from torchtitan_npu.train.nonfinite import describe_nonfinite_gradients


@on_ranks(1, 2, 3)
def test_names_and_ranks() -> None:
    twin = Twin(SmallModel)
    twin.backward(0)
    named = [(name, p) for name, p in twin.model.named_parameters() if p.grad is not None and p.grad.numel()]
    last = dist.get_world_size() - 1
    name, parameter = named[0]
    if dist.get_rank() == last:
        parameter.grad.view(-1)[-1] = -math.inf
    names: list[str] = [""] * (last + 1)
    dist.all_gather_object(names, name)
    before = [p.grad.clone() for _, p in named]
    assert not grad_norm(twin.model).isfinite()
    where = f" on rank {last}" if last else ""
    assert describe_nonfinite_gradients(twin.model) == f"{names[last]} (infinite){where}"
    assert all(torch.equal(p.grad, g) for (_, p), g in zip(named, before, strict=True)), "only looked at"

    for _, p in named[:5]:
        p.grad.fill_(math.nan)
    assert "(NaN) and 2 more parameters" in describe_nonfinite_gradients(twin.model)


@on_ranks(2)
def test_a_norm_that_overflows_by_itself() -> None:
    twin = Twin(SmallModel)
    twin.backward(0)
    assert describe_nonfinite_gradients(twin.model) == "none by itself: their norm overflows"
