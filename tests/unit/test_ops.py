"""Operators against formulas written out in fp64, and flash against plain attention."""

from __future__ import annotations

import math

import pytest
import torch

from torchtitan_npu.ops import IGNORE_INDEX, apply_rotary, attention, cross_entropy, rms_norm, rotary_tables


def _qkv(heads: int, kv_heads: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    B, T, D = 2, 7, 6
    return tuple(
        torch.randn(B, n, T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )


def _attention_by_loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    B, H, T, D = q.shape
    group = H // k.shape[1]
    out = torch.empty_like(q)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                scores = k[b, h // group, : t + 1] @ q[b, h, t] / math.sqrt(D)
                out[b, h, t] = scores.softmax(0) @ v[b, h // group, : t + 1]
    return out


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_is_the_formula(heads: int, kv_heads: int, flash: bool) -> None:
    q, k, v = (t.detach() for t in _qkv(heads, kv_heads))
    expected = _attention_by_loops(q.double(), k.double(), v.double())
    actual = attention(q, k, v, flash=flash)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_flash_and_plain_agree() -> None:
    gradients = []
    for flash in (False, True):
        q, k, v = _qkv(4, 2)
        attention(q, k, v, flash=flash).square().sum().backward()
        gradients.append([q.grad, k.grad, v.grad])
    for plain, flash_gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, flash_gradient, rtol=1e-4, atol=1e-5)


def test_attention_in_bf16_keeps_the_dtype_and_softmax_precision() -> None:
    q, k, v = (t.detach() for t in _qkv(4, 2, torch.bfloat16))
    exact = _attention_by_loops(q.double(), k.double(), v.double())
    plain = attention(q, k, v, flash=False)
    assert plain.dtype == torch.bfloat16
    # Three roundings to 8 bits (scaled q, scores, output) of values of order 1: 3 * 2^-8 = 0.012, with some room.
    assert (plain.double() - exact).abs().max() < 0.03


def test_attention_refuses_heads_that_do_not_divide() -> None:
    q, k, v = _qkv(4, 3)
    with pytest.raises(ValueError, match="3 must divide 4"):
        attention(q, k, v, flash=False)


def test_attention_refuses_other_lengths() -> None:
    q, k, v = _qkv(4, 2)
    with pytest.raises(ValueError, match="do not belong together"):
        attention(q, k[:, :, :-1], v, flash=True)


def test_rms_norm_is_the_formula() -> None:
    x = torch.tensor([[3.0, 4.0]])
    # mean square 12.5, plus eps 0.5: 13; 3 / sqrt(13) * 2 and 4 / sqrt(13) * 10
    expected = torch.tensor([[6.0, 40.0]]) / math.sqrt(13.0)
    torch.testing.assert_close(rms_norm(x, torch.tensor([2.0, 10.0]), 0.5), expected)
    with pytest.raises(ValueError, match="does not fit"):
        rms_norm(x, torch.ones(3), 0.5)


def test_rotary_is_a_complex_rotation() -> None:
    head_dim, theta = 6, 100.0
    cos, sin = rotary_tables(head_dim, 5, theta)
    x = torch.randn(1, 1, 5, head_dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    as_complex = torch.complex(x[..., :3], x[..., 3:])
    frequencies = torch.tensor([theta ** (-2 * i / head_dim) for i in range(3)], dtype=torch.float64)
    angle = torch.arange(5, dtype=torch.float64)[:, None] * frequencies
    expected = as_complex * torch.polar(torch.ones_like(angle), angle)
    actual = apply_rotary(x, cos, sin)
    torch.testing.assert_close(actual[..., :3], expected.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(actual[..., 3:], expected.imag, rtol=0, atol=1e-6)


def test_rotary_scores_depend_on_the_distance_alone() -> None:
    cos, sin = rotary_tables(8, 64, 10000.0)
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(8, generator=generator).expand(1, 1, 64, 8) for _ in range(2))
    scores = (apply_rotary(q, cos, sin) @ apply_rotary(k, cos, sin).transpose(-1, -2))[0, 0]
    for distance in (0, 5, 40):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_rotary_needs_an_even_head() -> None:
    with pytest.raises(ValueError, match="must be even"):
        rotary_tables(5, 4, 10000.0)


def test_cross_entropy_sums_over_valid_labels() -> None:
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = math.log(5.0)
    labels = torch.tensor([[0, 2, IGNORE_INDEX]])
    # Uniform over 4: ln 4. Weights 1, 1, 5, 1: ln(8 / 5). The last counts for nothing.
    assert cross_entropy(logits, labels).item() == pytest.approx(math.log(4) + math.log(8 / 5), rel=1e-6)
    assert cross_entropy(logits.bfloat16(), labels).dtype == torch.float32
    assert cross_entropy(logits, torch.full((1, 3), IGNORE_INDEX)).item() == 0.0
