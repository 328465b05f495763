"""AdamW with moments in bfloat16: unbiased rounding, the same training within it, an exact resume."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_npu.train import stored_moments
from torchtitan_npu.train.stored_moments import StoredMomentsAdamW, round_to_bfloat16

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "fused": True}


def make(parameters: list[Tensor], dtype: torch.dtype = torch.bfloat16, **other: Any) -> StoredMomentsAdamW:
    return StoredMomentsAdamW(parameters, dtype=dtype, on_host=False, **{"seed": 3} | SETTINGS | other)


def steps(optimizer: torch.optim.Optimizer, parameters: list[Tensor], first: int, last: int) -> None:
    """Gradients of steps [first, last), each from its own seed."""
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator) + 0.3 * parameter.detach()
        optimizer.step()


def parameters() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((37, 11), (5,), (), (0, 4))]


def test_rounding_is_up_or_down_and_keeps_the_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([torch.randn(500, generator=generator) * 10.0**power for power in (-30, -6, 0, 9)])
    values = torch.cat([values, torch.tensor([0.0, -0.0, 1.0, -2.5])])
    down = (values.view(torch.int32) & -65536).view(torch.float32)
    up = ((down.view(torch.int32)) + 65536).view(torch.float32)
    noise = torch.arange(0, 65536, 64, dtype=torch.int32)
    rounded = round_to_bfloat16(
        values.repeat(noise.numel(), 1), noise[:, None].expand(-1, values.numel()).contiguous()
    ).float()
    assert rounded.dtype == torch.float32
    assert bool(((rounded == down) | (rounded == up)).all())
    exact = values == values.bfloat16().float()
    assert bool((rounded[:, exact] == values[exact]).all())
    # 1,024 evenly spaced random numbers: the mean is right to 1/1,024 of the step between neighbours.
    step = (up.double() - down.double()).abs()
    error = (rounded.double().mean(0) - values.double()).abs()
    assert bool((error <= step / 1000 + 1e-300).all())


@pytest.mark.parametrize("fused", [True, False])
def test_fp32_moments_take_torchs_steps(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit by bit, also cut into chunks."""
    monkeypatch.setattr(stored_moments, "CHUNK_ELEMENTS", {"cpu": 64})
    ours, theirs = parameters(), parameters()
    optimizer = make(ours, torch.float32, fused=fused)
    steps(optimizer, ours, 0, 5)
    reference = torch.optim.AdamW(theirs, **SETTINGS | {"fused": fused}, foreach=False)
    steps(reference, theirs, 0, 5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0 if fused else 1e-7)
        assert optimizer.state[mine]["step"] == 5
        torch.testing.assert_close(optimizer.state[mine]["exp_avg_sq"], reference.state[other]["exp_avg_sq"])


def test_a_second_moment_follows_small_changes() -> None:
    """beta2 = 0.999: rounding to nearest would leave it where it is, 100 times too large."""
    value = torch.nn.Parameter(torch.zeros(1000))
    optimizer = make([value])
    value.grad = torch.full_like(value, 1.0)
    optimizer.step()
    optimizer.state[value]["exp_avg_sq"].fill_(1.0)
    for _ in range(1000):
        value.grad = torch.zeros_like(value)
        optimizer.step()
    assert float(optimizer.state[value]["exp_avg_sq"].float().mean()) == pytest.approx(0.999**1000, rel=0.02)


def test_moments_take_half_and_training_is_the_same_within_rounding() -> None:
    ours, theirs = parameters(), parameters()
    optimizer, reference = make(ours), torch.optim.AdamW(theirs, **SETTINGS)
    steps(optimizer, ours, 0, 200)
    steps(reference, theirs, 0, 200)
    state = optimizer.state[ours[0]]
    assert {name: state[name].dtype for name in ("step", "exp_avg", "exp_avg_sq")} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert state["exp_avg"].untyped_storage().nbytes() == 2 * ours[0].numel()
    moved = (theirs[0] - parameters()[0]).detach().norm()
    assert (ours[0] - theirs[0]).detach().norm() < 0.02 * moved


def test_a_copy_goes_on_with_the_same_numbers() -> None:
    """What was saved in one process and loaded into a new optimizer of another."""
    first = parameters()
    optimizer = make(first)
    steps(optimizer, first, 0, 3)
    saved = copy.deepcopy((first, optimizer.state_dict()))
    steps(optimizer, first, 3, 6)
    second = [torch.nn.Parameter(value.detach()) for value in saved[0]]
    resumed = make(second)
    resumed.load_state_dict(saved[1])
    assert resumed.state[second[0]]["exp_avg"].dtype == torch.bfloat16
    steps(resumed, second, 3, 6)
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine, other)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(optimizer.state[mine][name], resumed.state[other][name])


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch\.float16"):
        make(parameters(), torch.float16)
