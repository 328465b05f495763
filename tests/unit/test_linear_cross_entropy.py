"""The chunked output projection and loss against the plain ones: values, gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from allocations import peak_bytes
from torch import Tensor

from torchtitan_npu.config import preset
from torchtitan_npu.models import build_model
from torchtitan_npu.ops import IGNORE_INDEX, cross_entropy, linear_cross_entropy, z_loss

# Relative to the largest gradient. fp32: order of sums. 16 bits: products are rounded to 8 or 11 bits, once per chunk.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def inputs(dtype: torch.dtype, tokens: int = 21, dim: int = 24, vocab: int = 67) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, tokens // 3, dim, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(vocab, dim, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (3, tokens // 3), generator=generator)
    labels[0, 2:5] = labels[2, -1] = IGNORE_INDEX
    return hidden, weight, labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, z_loss_weight: float) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)
    total = cross_entropy(logits, labels)
    return total + z_loss_weight * z_loss(logits, labels), total


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    assert actual.dtype == expected.dtype
    assert (actual.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("chunk_tokens", [1, 4, 7, 21, 1000])
@pytest.mark.parametrize("z_loss_weight", [0.0, 1e-2])
def test_equals_the_plain_loss(dtype: torch.dtype, chunk_tokens: int, z_loss_weight: float) -> None:
    scale = 512.0 / 17
    want_hidden, want_weight, labels = inputs(dtype)
    want, want_total = plain(want_hidden, want_weight, labels, z_loss_weight)
    (scale * want).backward()
    hidden, weight, _ = inputs(dtype)
    objective, total = linear_cross_entropy(
        hidden, weight, labels, chunk_tokens=chunk_tokens, z_loss_weight=z_loss_weight, gradient_scale=scale
    )
    (scale * objective).backward()
    assert objective.dtype == total.dtype == torch.float32 and not total.requires_grad
    assert float(objective.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    assert float(total) == pytest.approx(float(want_total.detach()), rel=1e-6)
    for got, expected in ((hidden, want_hidden), (weight, want_weight)):
        assert got.grad is not None and expected.grad is not None
        assert_close(got.grad, expected.grad, TOLERANCE[dtype])


def test_gradient_scale_is_only_a_hint() -> None:
    """Another factor than was announced still gives the gradient of what was called backward on."""
    gradients = []
    for announced in (1.0, 8.0):
        hidden, weight, labels = inputs(torch.float32)
        objective, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=5, gradient_scale=announced)
        (3.0 * objective).backward()
        gradients.append((hidden.grad, weight.grad))
    for a, b in zip(*gradients, strict=True):
        assert_close(a, b, 1e-6)


def test_small_float16_gradients_survive_loss_scaling() -> None:
    """With V = 65,536 a softmax is about 1.5e-5, where float16 has 8 bits left; times 64 it has 11, as without chunks.

    In rows of the weight that are no label: there the gradient is only the softmax's, which in fp32 may differ in the
    last bit, so that one in some hundred elements rounds to the neighbour in float16.
    """
    factor, scale = 2.0**-10, 2.0**16
    gradients = []
    for announced in (1.0, factor * scale):
        hidden, weight, labels = inputs(torch.float16, dim=8, vocab=65_536)
        objective, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=21, gradient_scale=announced)
        (factor * scale * objective).backward()
        gradients.append(weight.grad.double() / (factor * scale))
    hidden, weight, labels = inputs(torch.float16, dim=8, vocab=65_536)
    (factor * scale * plain(hidden, weight, labels, 0.0)[0]).backward()
    expected = weight.grad.double() / (factor * scale)
    others = torch.ones(65_536, dtype=torch.bool).index_fill(0, labels[labels >= 0], False)
    errors = [float((g - expected)[others].norm() / expected[others].norm()) for g in gradients]
    assert errors[1] < 5e-5 and errors[0] > 4e-4, errors


def test_all_labels_ignored() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    objective, total = linear_cross_entropy(
        hidden, weight, labels.fill_(IGNORE_INDEX), chunk_tokens=4, z_loss_weight=1.0
    )
    objective.backward()
    assert float(objective.detach()) == float(total) == 0
    assert not hidden.grad.any() and not weight.grad.any()


def test_frozen_parts_get_no_gradient() -> None:
    for frozen in (0, 1):
        tensors = inputs(torch.float32)
        tensors[frozen].requires_grad_(False)
        linear_cross_entropy(*tensors, chunk_tokens=4)[0].backward()
        assert tensors[frozen].grad is None and tensors[1 - frozen].grad is not None


def test_autocast_multiplies_in_its_dtype_and_keeps_the_weights_gradient_in_fp32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        linear_cross_entropy(hidden, weight, labels, chunk_tokens=100)[0].backward()
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    linear_cross_entropy(low[0], low[1], labels, chunk_tokens=100)[0].backward()
    assert weight.grad.dtype == torch.float32
    assert torch.equal(hidden.grad.bfloat16(), low[0].grad) and torch.equal(weight.grad.bfloat16(), low[1].grad)


def test_second_backward_is_refused() -> None:
    objective, _ = linear_cross_entropy(*inputs(torch.float32), chunk_tokens=4)
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="a second backward through linear_cross_entropy"):
        objective.backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h, w, y: (h[..., 1:], w, y), r"hidden \(3, 7, 23\), weight \(67, 24\) and labels \(3, 7\) do not fit"),
        (lambda h, w, y: (h, w, y[:, 1:]), "do not fit"),
        (lambda h, w, y: (h, w[0], y), "do not fit"),
    ],
)
def test_bad_shapes(change: Callable[..., tuple[Tensor, Tensor, Tensor]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(*change(*inputs(torch.float32)), chunk_tokens=4)


def test_bad_chunk() -> None:
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        linear_cross_entropy(*inputs(torch.float32), chunk_tokens=0)


@pytest.mark.parametrize("tied", [False, True])
def test_as_the_models_head(tied: bool) -> None:
    """``Llama.forward(…, head=…)``: every parameter's gradient is that of the loss of the logits."""
    shape = {
        "dim": 32,
        "n_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "ffn_dim": 48,
        "vocab_size": 50,
        "max_seq_len": 16,
    }
    model = build_model(preset("llama3_debug", **shape, tie_embeddings=tied))
    torch.manual_seed(0)
    model.init_weights()
    tokens, labels = torch.randint(0, 50, (2, 2, 16))
    cross_entropy(model(tokens), labels).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(tokens, None, partial(linear_cross_entropy, labels=labels, chunk_tokens=5))[0].backward()
    for name, p in model.named_parameters():
        assert_close(p.grad, expected[name], 2e-6)


def test_no_gradients_are_made_without_need() -> None:
    """Under no_grad the most that is held is a chunk's softmax; the weight's gradient alone would be more."""
    C, M, V = 4, 64, 500
    hidden, weight, labels = inputs(torch.float32, dim=M, vocab=V)

    def evaluate() -> None:
        with torch.no_grad():
            objective, _ = linear_cross_entropy(hidden, weight, labels, chunk_tokens=C)
        assert not objective.requires_grad

    assert peak_bytes(evaluate) < 1.5 * 4 * C * V < 4 * V * M


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(dtype: torch.dtype) -> None:
    """1/32 of the vocabulary and width of an 8B model's head: 4008 x 128, 2 x 1024 tokens in chunks of 128.

    Peak: the gradients (hidden N M, weight V M in fp32) and of one chunk the softmax in fp32, in 16 bits with what it
    is made of or becomes, or the weight gradient's product. The plain loss has ten or twelve bytes per logit of all
    tokens.
    """
    N, C, M, V = 2048, 128, 128, 4008
    hidden, weight = torch.randn(N, M).to(dtype).requires_grad_(), torch.randn(V, M).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,))
    width = dtype.itemsize
    peaks = [
        peak_bytes(lambda: linear_cross_entropy(hidden, weight, labels, chunk_tokens=C)[0].backward()),
        peak_bytes(lambda: cross_entropy(F.linear(hidden, weight), labels).backward()),
    ]
    gradients = width * N * M + 4 * V * M
    bound = gradients + (4 * C * V if width == 4 else max((4 + width) * C * V, width * (C * V + V * M)))
    assert peaks[0] <= 1.05 * bound + (width * V * M if width < 4 else 0), (peaks, bound)
    assert peaks[1] >= N * V * (8 if width == 4 else 10) and peaks[0] < peaks[1] / 5, peaks
