"""Clipping by the global norm."""

from __future__ import annotations

import math

import pytest
import torch
from pool import on_ranks
from torch import nn
from twin import SmallModel, Twin, part_of

from torchtitan_npu.fsdp import clip_grad_norm_


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@on_ranks(1, 2, 3, 4)
def test_norm_and_clipped_gradients_are_torchs(norm_type: float) -> None:
    """Ours is added up in float64, torch's in float32 over ~8,700 elements: within 1e-5 relative."""
    twin = Twin(SmallModel, bucket_cap_mb=0.01)
    twin.backward(0)
    ours = twin.model.clip_grad_norm_(0.01, norm_type)
    theirs = nn.utils.clip_grad_norm_(twin.plain.parameters(), 0.01, norm_type)
    assert theirs > 0.01, "the test would not clip otherwise"
    assert ours.shape == () and ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    plain = dict(twin.plain.named_parameters())
    for param in twin.state.params:
        torch.testing.assert_close(param.sharded.grad, part_of(param, plain[param.name].grad), rtol=2e-5, atol=1e-12)


@on_ranks(1, 2, 3)
def test_the_norm_is_the_same_on_all_ranks_and_small_gradients_stay() -> None:
    import torch.distributed as dist

    twin = Twin(SmallModel)
    twin.backward(0)
    before = [p.grad.clone() for p in twin.model.parameters()]
    norm = clip_grad_norm_(twin.model, 1e6)
    norms: list[float] = [0.0] * twin.size
    dist.all_gather_object(norms, norm.item())
    assert len(set(norms)) == 1 and norms[0] > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(twin.model.parameters(), before, strict=True))


@on_ranks(2)
def test_without_gradients_the_norm_is_zero() -> None:
    twin = Twin(SmallModel)
    assert twin.model.clip_grad_norm_(1.0).item() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(2)
def test_a_bad_gradient_on_one_rank_shows_in_the_norm_everywhere(value: float) -> None:
    twin = Twin(SmallModel)
    twin.backward(0)
    if twin.rank == 1:
        next(p for p in twin.model.parameters() if p.numel()).grad.view(-1)[0] = value
    for norm_type in (1.0, 2.0, math.inf):
        assert not twin.model.clip_grad_norm_(1e6, norm_type).isfinite()


@on_ranks(1)
def test_bad_arguments() -> None:
    twin = Twin(SmallModel)
    with pytest.raises(ValueError, match="norm_type must be >= 1 or inf, got 0.5"):
        twin.model.clip_grad_norm_(1.0, 0.5)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        twin.model.clip_grad_norm_(-1)
    with pytest.raises(ValueError, match="SmallModel is not wrapped"):
        clip_grad_norm_(twin.plain, 1.0)
