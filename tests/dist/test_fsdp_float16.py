"""float16: the gradient scaler, steps that all ranks skip together, what travels and is added up."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from twin import DIM, SmallModel, next_token_loss, part_of, tokens_for

from torchtitan_npu.fsdp import FSDP, GradScaler, MixedPrecisionPolicy

FLOAT16 = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)


def agree(value: Any) -> bool:
    """Whether all ranks have the same."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(v == values[0] for v in values)


@pytest.mark.parametrize(("communicator", "optimizer"), [("auto", "foreach"), ("c10d", "fused"), ("auto", "sgd")])
@on_ranks(1, 3)
def test_training_follows_the_plain_model(communicator: str, optimizer: str) -> None:
    """The plain model: float32 masters, rounded to float16; each rank's float16 gradients of the scaled loss, added in
    float32, divided, unscaled; torch's own scaler. Bit for bit, for scales are powers of two."""
    torch.manual_seed(0)
    model: Any = FSDP(SmallModel(), mixed_precision=FLOAT16, communicator=communicator)
    torch.manual_seed(0)
    master, half = SmallModel(), SmallModel().half()
    make: Any = {
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    }[optimizer]
    ours, theirs = make(model.parameters()), make(master.parameters())
    # 2^22 overflows float16 at first; growth after two good steps brings it back to overflow.
    scaler = GradScaler(model, init_scale=2.0**22, growth_interval=2)
    reference = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=2)
    skipped = 0
    for step in range(12):
        scaler.scale(next_token_loss(model, tokens_for(step, dist.get_rank()))).backward()
        total: list[torch.Tensor] = []
        with torch.no_grad():
            for p, q in zip(half.parameters(), master.parameters(), strict=True):
                p.copy_(q)
        for rank in range(dist.get_world_size()):
            half.zero_grad()
            reference.scale(next_token_loss(half, tokens_for(step, rank))).backward()
            gradients = [p.grad.float() for p in half.parameters()]
            total = [a + b for a, b in zip(total, gradients, strict=True)] if total else gradients
        for q, gradient in zip(master.parameters(), total, strict=True):
            q.grad = gradient / dist.get_world_size()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(ours)
        reference.step(theirs)
        overflow = not all(g.isfinite().all() for g in total)
        if overflow:
            skipped += 1
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        scaler.update()
        reference.update()
        assert scaler.skipped_steps == skipped and scaler.get_scale() == reference.get_scale()
        whole = dict(master.named_parameters())
        for param in model._fsdp_state.params:
            assert torch.equal(param.sharded.detach(), part_of(param, whole[param.name])), (step, param.name)
        ours.zero_grad()
    assert 2 <= skipped < 10, "the test must see both kinds of steps"
    assert agree(scaler.state_dict())


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("unscale_first", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@on_ranks(3)
def test_an_overflow_on_one_rank_skips_the_step_on_all(fused: bool, unscale_first: bool, by_torch: bool) -> None:
    """An infinity in an element that one rank holds: no other rank sees it in its own pieces. torch's scaler, too."""
    model: Any = FSDP(SmallModel(), mixed_precision=FLOAT16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler: Any = GradScaler(model, init_scale=1024.0)
    if by_torch:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    last = dist.get_world_size() - 1
    for step in range(3):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(next_token_loss(model, tokens_for(step, dist.get_rank()))).backward()
        if step == 1 and dist.get_rank() == last:
            next(p for p in model.parameters() if p.numel()).grad.view(-1)[-1] = float("inf")
        if unscale_first:
            scaler.unscale_(optimizer)
            assert model.clip_grad_norm_(1.0).isfinite() == (step != 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert moved == (step != 1)
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
        assert by_torch or scaler.skipped_steps == (step >= 1)


class OneRow(nn.Module):
    """Rank 0 holds the only row; every other rank holds nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1, DIM), 1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum()


@on_ranks(3)
def test_ranks_without_a_piece_take_part() -> None:
    model: Any = FSDP(OneRow(), mixed_precision=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler(model, init_scale=2.0**10)
    held = [p.numel() for p in model.parameters()]
    assert held == [DIM if dist.get_rank() == 0 else 0]
    for value, skipped in ((1e6, 1), (0.5, 1)):
        x = torch.full((1, DIM), value, dtype=torch.float32)
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.skipped_steps == skipped and scaler.get_scale() == 2.0**9
    assert all(torch.equal(p, torch.full_like(p, 0.5)) for p in model.parameters())


@on_ranks(2)
def test_gradients_that_the_user_has_replaced() -> None:
    """By plain tensors: the scaler that knows the model agrees all the same."""
    model: Any = FSDP(SmallModel(), mixed_precision=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler(model, init_scale=1024.0)
    scaler.scale(next_token_loss(model, tokens_for(0, 0))).backward()
    for p in model.parameters():
        p.grad = p.grad * 0.5
    if dist.get_rank() == 1:
        next(p for p in model.parameters() if p.numel()).grad.view(-1)[0] = float("nan")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.skipped_steps == 1 and scaler.get_scale() == 512.0


@on_ranks(2)
def test_without_gradients_torchs_assertion_is_raised_on_all_ranks() -> None:
    model: Any = FSDP(SmallModel(), mixed_precision=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = GradScaler(model)
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.step(optimizer)


@on_ranks(2)
def test_state_dict_continues() -> None:
    model: Any = FSDP(SmallModel(), mixed_precision=FLOAT16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first = GradScaler(model, init_scale=2.0**24, growth_interval=3)
    for step in range(4):
        first.scale(next_token_loss(model, tokens_for(step, dist.get_rank()))).backward()
        first.step(optimizer)
        first.update()
        optimizer.zero_grad()
    assert first.skipped_steps > 0
    second = GradScaler(model)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    other = torch.amp.GradScaler("cpu")
    other.scale(torch.ones(()))
    second.load_state_dict(other.state_dict())
    assert second.skipped_steps == 0 and second.get_scale() == 2.0**16
    assert GradScaler(model, enabled=False).state_dict() == {}


@on_ranks(2)
def test_parameters_that_are_float16_themselves() -> None:
    """Their gradients are float16: unscaled like the others."""
    model: Any = FSDP(SmallModel().half())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = GradScaler(model, init_scale=256.0)
    scaler.scale(next_token_loss(model, tokens_for(0, 0))).backward()
    before = [p.grad.clone() for p in model.parameters()]
    scaler.unscale_(optimizer)
    for p, scaled in zip(model.parameters(), before, strict=True):
        assert p.grad.dtype == torch.float16 and torch.equal(p.grad, scaled / 256)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "float16" in record.getMessage():
            self.messages.append(record.getMessage())


@pytest.mark.parametrize("scaling", ["none", "ours", "torch's", "disabled", "not float16"])
@on_ranks(2)
def test_training_without_a_scaler_is_said_once(scaling: str) -> None:
    """When the weights have changed: evaluation and accumulation need no scaler."""
    records = Records()
    logger = logging.getLogger("torchtitan_npu")
    logger.addHandler(records)
    try:
        model: Any = FSDP(SmallModel(), mixed_precision=None if scaling == "not float16" else FLOAT16)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=scaling == "torch's")
        if scaling in ("ours", "disabled"):
            scaler = GradScaler(model, enabled=scaling == "ours")
        with torch.no_grad():
            model(tokens_for(0, 0))
        for step in range(4):
            for micro_batch in range(2):
                scaler.scale(next_token_loss(model, tokens_for(2 * step + micro_batch, 0))).backward()
                assert step > 0 or not records.messages
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        logger.removeHandler(records)
    expected = 1 if scaling in ("none", "disabled") and dist.get_rank() == 0 else 0
    assert len(records.messages) == expected, records.messages
    if expected:
        assert "scaler = torchtitan_npu.fsdp.GradScaler(model)" in records.messages[0]


@on_ranks(1)
def test_bad_arguments() -> None:
    model = FSDP(SmallModel())
    with pytest.raises(ValueError, match="needs the model whose gradients it scales, got str"):
        GradScaler("cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_scale must be > 0, got 0"):
        GradScaler(model, init_scale=0)
    with pytest.raises(ValueError, match="backoff_factor between 0 and 1"):
        GradScaler(model, backoff_factor=2.0)
