"""The learning-rate schedule, and the optimizer's groups."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_npu.config import Config, ConfigError, config_from_dict
from torchtitan_npu.train.optimizer import build_optimizer, decayed_names, set_learning_rate
from torchtitan_npu.train.schedule import learning_rate_at


def _rate(step: int, shape: str = "cosine", warmup_steps: int = 4, minimum: float = 0.1) -> float:
    return learning_rate_at(step, peak=1.0, minimum=minimum, warmup_steps=warmup_steps, max_steps=12, shape=shape)


def test_warm_up_is_linear_and_does_not_start_at_zero() -> None:
    assert [_rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize(
    ("shape", "middle", "end"),
    [
        # Step 8 is half-way between 4 and 12: 0.1 + 0.9 / 2.
        ("cosine", 0.55, 0.1),
        ("linear", 0.55, 0.1),
        ("constant", 1.0, 1.0),
    ],
)
def test_decay(shape: str, middle: float, end: float) -> None:
    assert _rate(8, shape) == pytest.approx(middle)
    assert _rate(12, shape) == pytest.approx(end)
    assert _rate(13, shape) == pytest.approx(end)


def test_cosine_is_above_linear_in_the_first_half() -> None:
    # A quarter of the way: (1 + cos 45°) / 2 = 0.854 against 0.75.
    assert _rate(6, minimum=0.0) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert _rate(6, "linear", minimum=0.0) == pytest.approx(0.75)


def _config(**training: object) -> Config:
    training = {"learning_rate": 0.5, "max_steps": 1, "weight_decay": 0.1} | training
    return config_from_dict({"model": {"name": "llama3_debug"}, "training": training})


def _wsd(step: int, warmup_steps: int = 2, max_steps: int = 12, decay_steps: int = 4) -> float:
    return learning_rate_at(
        step,
        peak=1.0,
        minimum=0.2,
        warmup_steps=warmup_steps,
        max_steps=max_steps,
        shape="wsd",
        decay_steps=decay_steps,
    )


def test_warm_up_stable_decay() -> None:
    """Up in 2 steps, level to step 8 = 12 - 4, then down by 0.8 / 4 a step."""
    rates = [0.5, *[1.0] * 7, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [_wsd(step) for step in range(1, 14)] == pytest.approx(rates)


def test_decay_that_does_not_fit_starts_after_the_warm_up() -> None:
    assert [_wsd(step, decay_steps=50) for step in (2, 7, 12)] == pytest.approx([1.0, 0.6, 0.2])
    assert [_wsd(step, decay_steps=0) for step in (2, 12, 13)] == [1.0, 1.0, 1.0]
    assert _wsd(12, warmup_steps=50) == 12 / 50


def test_no_warm_up_and_warm_up_over_the_whole_run() -> None:
    assert _rate(1, "constant", warmup_steps=0) == 1.0
    assert _rate(12, warmup_steps=12) == 1.0


def test_decay_is_on_matrices_only() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    model.register_parameter("bias", torch.nn.Parameter(torch.zeros(2, 2)))
    decayed = decayed_names(model)
    assert decayed == {"0.weight", "1.weight"}
    optimizer = build_optimizer(model.named_parameters(), decayed, _config())
    sizes = {group["weight_decay"]: len(group["params"]) for group in optimizer.param_groups}
    assert sizes == {0.1: 2, 0.0: 4}


def test_state_exists_before_the_first_step_and_changes_nothing() -> None:
    """A fresh AdamW and ours take the same step: m = 0.1 g, v = 0.05 g², and the same update, bit by bit."""
    cfg = _config()
    initial = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(initial.clone()), torch.nn.Parameter(initial.clone())
    optimizer = build_optimizer([("w", ours)], frozenset({"w"}), cfg)
    reference = torch.optim.AdamW([theirs], lr=0.5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    assert set(optimizer.state[ours]) == {"step", "exp_avg", "exp_avg_sq"}
    for rate in (0.5, 0.25):
        ours.grad, theirs.grad = initial.clone(), initial.clone()
        set_learning_rate(optimizer, rate)
        set_learning_rate(reference, rate)
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert torch.equal(optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"])


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_takes_torchs_steps(momentum: float, implementation: str) -> None:
    """Momentum that starts at zero instead of at the first gradient: the same three steps, bit by bit."""
    cfg = _config(optimizer="sgd", momentum=momentum, optimizer_impl=implementation)
    initial = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(initial.clone()), torch.nn.Parameter(initial.clone())
    optimizer = build_optimizer([("w", ours)], frozenset({"w"}), cfg)
    assert set(optimizer.state.get(ours, {})) == ({"momentum_buffer"} if momentum else set())
    reference = torch.optim.SGD([theirs], lr=0.5, momentum=momentum, weight_decay=0.1, **{implementation: True})
    for factor in (1.0, -0.5, 2.0):
        ours.grad, theirs.grad = factor * initial, factor * initial
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


def test_foreach_adamw_takes_torchs_steps() -> None:
    initial = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = torch.nn.Parameter(initial.clone()), torch.nn.Parameter(initial.clone())
    optimizer = build_optimizer([("w", ours)], frozenset({"w"}), _config(optimizer_impl="foreach"))
    reference = torch.optim.AdamW([theirs], lr=0.5, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    for _ in range(2):
        ours.grad, theirs.grad = initial.clone(), initial.clone()
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)


GROUPS = [
    {"match": "1.weight", "learning_rate_scale": 0.25},
    {"match": "*.weight", "weight_decay": 0.0},
    {"match": "2.bia[s]", "learning_rate_scale": 0, "weight_decay": 0.5},
]


def test_parameter_groups_are_by_name_and_the_first_counts() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(model.named_parameters(), decayed_names(model), _config(parameter_groups=GROUPS))
    set_learning_rate(optimizer, 0.5)
    settings = {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name, parameter in model.named_parameters()
        if any(parameter is member for member in group["params"])
    }
    assert settings == {
        "0.weight": (0.5, 0.0),
        "1.weight": (0.125, 0.1),
        "1.bias": (0.5, 0.0),
        "2.weight": (0.5, 0.0),
        "2.bias": (0.0, 0.5),
    }


def test_parameter_groups_without_parameters_are_named() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 3))
    groups = [{"match": "*.weight"}, {"match": "weight"}, {"match": "1.w*"}]
    with pytest.raises(ConfigError) as caught:
        build_optimizer(model.named_parameters(), decayed_names(model), _config(parameter_groups=groups))
    first, second = caught.value.problems
    assert first.where == second.where == "training.parameter_groups"
    assert first.what.startswith(
        "item 2: match: 'weight' matches no parameter of the model; they are called 0.weight, "
    )
    assert second.what.startswith("item 3: match: '1.w*' matches only parameters of the items before it")
