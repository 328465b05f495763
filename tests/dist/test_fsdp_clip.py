"""Clipping by the global norm."""

from __future__ import annotations

import copy
import io
import math
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import nn
from twin import DIM, SmallModel, Twin, floats_for, part_of, squared_loss

from torchtitan_npu.fsdp import FSDP, clip_grad_norm_


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.5, math.inf])
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
    with pytest.raises(ValueError, match="norm_type must be > 0 or inf, got 0"):
        twin.model.clip_grad_norm_(1.0, 0)
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        twin.model.clip_grad_norm_(-1)
    with pytest.raises(ValueError, match="SmallModel is not wrapped"):
        clip_grad_norm_(twin.plain, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@on_ranks(2)
def test_error_if_nonfinite(value: float) -> None:
    """On all ranks alike, before anything is scaled; as torch does it."""
    twin = Twin(SmallModel)
    twin.backward(0)
    if twin.rank == 1:
        next(p for p in twin.model.parameters() if p.numel()).grad.view(-1)[0] = value
    before = [p.grad.clone() for p in twin.model.parameters()]
    with pytest.raises(RuntimeError, match=f"of the gradients is {value}, so they cannot be clipped"):
        twin.model.clip_grad_norm_(1e-3, error_if_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"non-finite, so it cannot be clipped"):
        nn.utils.clip_grad_norm_(twin.model.parameters(), 1e-3, error_if_nonfinite=True)
    for p, gradient in zip(twin.model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad.detach(), gradient, rtol=0, atol=0, equal_nan=True)


class Mixed(nn.Module):
    """Parameters of several dtypes, a scalar, one of a single row, a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM).to(torch.float16)
        self.second = nn.Linear(DIM, DIM).to(torch.bfloat16)
        self.third = nn.Linear(DIM, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x.half()).bfloat16()).float()
        return self.third(x * self.frozen) * self.scale


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("by_torch", [False, True])
@on_ranks(1, 3)
def test_mixed_dtypes_and_ranks_without_a_piece(by_torch: bool, norm_type: float) -> None:
    """Against the norm in float64 over all elements; clipped gradients keep their dtypes."""
    torch.manual_seed(0)
    model: Any = FSDP(Mixed())
    loss = squared_loss(model, floats_for(0, dist.get_rank())) * 100
    loss.backward()
    assert model.unused.grad is None and model.frozen.grad is None
    state = model._fsdp_state
    parts = [
        torch.cat([p.sharded.grad.detach().double().flatten() for p in state.params if p.sharded.grad is not None])
    ]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, parts[0])
    whole = torch.cat(everywhere)
    want = torch.linalg.vector_norm(whole, norm_type)
    dtypes = [p.grad.dtype for p in model.parameters() if p.grad is not None]
    if by_torch:
        got = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
    else:
        got = model.clip_grad_norm_(0.5, norm_type)
    assert type(got) is torch.Tensor and got.shape == () and got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0)
    assert [p.grad.dtype for p in model.parameters() if p.grad is not None] == dtypes
    after: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(after, [p.grad.detach().double() for p in model.parameters() if p.grad is not None])
    clipped = torch.linalg.vector_norm(torch.cat([g.flatten() for rank in after for g in rank]), norm_type)
    torch.testing.assert_close(clipped, torch.tensor(0.5, dtype=torch.float64), rtol=5e-3, atol=0)  # 16-bit gradients


# ---- torch's own functions ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@on_ranks(1, 4)
def test_torchs_clipping_takes_the_global_norm(norm_type: float, foreach: bool | None) -> None:
    """Of ``model.parameters()``, of a list, of a part of the model; the same scaled gradients as the plain model's."""
    twin = Twin(SmallModel)
    plain = dict(twin.plain.named_parameters())
    for select in (
        lambda m: m.parameters(),
        lambda m: list(m.parameters()),
        lambda m: [p for n, p in m.named_parameters() if n.startswith("layers.1.")],
        lambda m: m.head.parameters(),
    ):
        twin.model.zero_grad()
        twin.backward(0)
        ours = nn.utils.clip_grad_norm_(select(twin.model), 0.01, norm_type, foreach=foreach)
        theirs = nn.utils.clip_grad_norm_(select(twin.plain), 0.01, norm_type)
        assert theirs > 0.01, "the test would not clip otherwise"
        assert type(ours) is torch.Tensor and ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        for param in twin.state.params:
            want = part_of(param, plain[param.name].grad)
            torch.testing.assert_close(param.sharded.grad.detach(), want, rtol=2e-5, atol=1e-12)


@on_ranks(3)
def test_total_norm_and_clipping_by_it() -> None:
    """The two halves of torch's clipping; and a part that every rank holds whole counts once."""
    twin = Twin(SmallModel)
    twin.backward(0)
    extra = torch.arange(5.0)
    ours = [p.grad for p in twin.model.parameters()]
    theirs = [p.grad for p in twin.plain.parameters()]
    total = nn.utils.get_total_norm([extra, *ours])
    torch.testing.assert_close(total, nn.utils.get_total_norm([extra, *theirs]), rtol=1e-5, atol=0)
    nn.utils.clip_grads_with_norm_(twin.model.parameters(), 0.01, total)
    nn.utils.clip_grads_with_norm_(twin.plain.parameters(), 0.01, total)
    for param in twin.state.params:
        want = part_of(param, dict(twin.plain.named_parameters())[param.name].grad)
        assert torch.equal(param.sharded.grad, want)


@pytest.mark.parametrize("foreach", [None, True, False])
@on_ranks(1, 2)
def test_clipping_by_value_is_element_by_element(foreach: bool | None) -> None:
    twin = Twin(SmallModel)
    twin.backward(0)
    for model in (twin.model, twin.plain):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach)
    twin.check_gradients()


@on_ranks(2)
def test_models_over_different_groups_are_clipped_one_by_one() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    groups = [dist.new_group([0, 1]), alone]
    models = [FSDP(nn.Linear(DIM, DIM)) for _ in groups]
    for model, group in zip(models, groups, strict=True):
        model._fsdp_state.gradients.process_groups = (group,)
        model(floats_for(0, 0)).sum().backward()
    parameters = [p for model in models for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match="not supported: one norm over gradients of FSDP models that are sharded over"
    ):
        nn.utils.clip_grad_norm_(parameters, 1.0)


@on_ranks(2)
def test_gradients_are_tensors_like_any_other() -> None:
    """The user's own norm is that of the part; copies, pickles and results are plain tensors."""
    twin = Twin(SmallModel)
    twin.backward(0)
    gradient = twin.model.head.weight.grad
    plain = gradient.detach()
    assert isinstance(gradient, torch.Tensor) and type(plain) is torch.Tensor
    assert gradient.data_ptr() == plain.data_ptr()
    for norm in (gradient.norm(), torch.linalg.vector_norm(gradient, 2.0), torch._foreach_norm([gradient], 2.0)[0]):
        assert type(norm) is torch.Tensor and torch.equal(norm, plain.norm())
    buffer = io.BytesIO()
    torch.save({"gradient": gradient}, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(gradient), gradient.clone(), gradient * 1, torch.load(buffer)["gradient"]):
        assert type(copied) is torch.Tensor and torch.equal(copied, plain)
    first = twin.model.head.weight.grad
    twin.model.zero_grad(set_to_none=False)
    twin.backward(1)
    assert twin.model.head.weight.grad is first, "the object, like its memory, stays"
    twin.check_gradients()


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="inductor needs a C++ compiler: neither g++ nor clang++ is here",
)
@on_ranks(2, timeout=120)
def test_a_compiled_optimizer() -> None:
    """Generated C++ rounds otherwise: 1e-6 of weights near 1, which then start the next step alike."""
    twin = Twin(lambda: SmallModel(layers=1))
    ours = torch.optim.SGD(twin.model.parameters(), lr=1e-2, momentum=0.9)
    theirs = torch.optim.SGD(twin.plain.parameters(), lr=1e-2, momentum=0.9)
    update = torch.compile(ours.step, backend="inductor")
    for step in range(2):
        twin.backward(step)
        twin.check_gradients()
        update()
        theirs.step()
        ours.zero_grad()
        for param in twin.state.params:
            want = part_of(param, dict(twin.plain.named_parameters())[param.name])
            torch.testing.assert_close(param.sharded.detach(), want, rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for param in twin.state.params:
                param.sharded.copy_(part_of(param, dict(twin.plain.named_parameters())[param.name]))
