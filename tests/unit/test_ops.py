"""Operators against formulas written out in fp64, and flash against plain attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_npu.fsdp.activation_checkpointing import SelectivePolicy
from torchtitan_npu.ops import (
    IGNORE_INDEX,
    Documents,
    RotaryScaling,
    apply_rotary,
    attention,
    cross_entropy,
    flash_attention,
    flash_cpu,
    rms_norm,
    rotary_tables,
    swiglu,
)

# Two rows of 7: documents of 3, 1, 3 tokens and of 1, 6; the last id of the first row comes again in the second.
DOCUMENT_IDS = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [2, 3, 3, 3, 3, 3, 3]])
SPANS = [(0, 0, 3), (0, 3, 4), (0, 4, 7), (1, 0, 1), (1, 1, 7)]


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_flash_on_the_cpu_is_scaled_dot_product_attention_bit_for_bit(dtype: torch.dtype, transposed: bool) -> None:
    results = []
    for own in (True, False):
        q, k, v = (x.detach().requires_grad_() for x in _qkv(4, 2, dtype))
        views = [x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x for x in (q, k, v)]
        if own:
            out = flash_attention(*views)
        else:
            out = F.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)
        out.backward(torch.ones_like(out).cumsum(-1))
        results.append((out, out.stride(), q.grad, k.grad, v.grad))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@pytest.mark.parametrize("documents", [None, Documents.from_ids(DOCUMENT_IDS)], ids=["rows", "documents"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_operator_keeps_to_torchs_rules(documents: Documents | None, dtype: torch.dtype) -> None:
    """Schema, autograd registration, fake results and dynamic shapes."""
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in _qkv(4, 2, dtype))
    ends = None if documents is None else documents.ends_N
    operators = torch.ops.torchtitan_npu
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    torch.library.opcheck(operators.flash_attention.default, (q, k, v, ends, "BSND"), **tolerance)
    out, high, total = (x.detach() for x in operators.flash_attention(q, k, v, ends, "BSND"))
    inputs = [x.detach() for x in (torch.ones_like(out), q, k, v)]
    torch.library.opcheck(
        operators.flash_attention_backward.default, (*inputs, out, high, total, ends, "BSND"), **tolerance
    )


@pytest.mark.parametrize("flash", [False, True])
def test_attention_compiles_whole(flash: bool) -> None:
    """Also with documents, whose number is free."""
    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for ids in (None, DOCUMENT_IDS, torch.zeros(2, 7, dtype=torch.int64)):
        documents = None if ids is None else Documents.from_ids(ids)
        gradients = []
        for function in (attention, compiled):
            q, k, v = _qkv(4, 2)
            out = function(q, k, v, flash=flash, documents=documents)
            out.square().sum().backward()
            gradients.append([out, q.grad, k.grad, v.grad])
        for eager, other in zip(*gradients, strict=True):
            torch.testing.assert_close(eager, other)


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_attention_stays_inside_documents(heads: int, kv_heads: int, flash: bool) -> None:
    """Values and gradients are those of each document alone."""
    documents = Documents.from_ids(DOCUMENT_IDS)
    assert documents.ends_N.tolist() == [3, 4, 7, 8, 14]
    weight = torch.randn(2, heads, 7, 6, generator=torch.Generator().manual_seed(1))
    q, k, v = _qkv(heads, kv_heads)
    out = attention(q, k, v, flash=flash, documents=documents)
    (out * weight).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    for row, start, end in SPANS:
        part = F.scaled_dot_product_attention(
            *(x[row : row + 1, :, start:end] for x in exact), is_causal=True, enable_gqa=True
        )
        torch.testing.assert_close(out[row : row + 1, :, start:end].double(), part, rtol=1e-5, atol=1e-6)
        (part * weight[row : row + 1, :, start:end]).sum().backward()
    for ours, theirs in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_an_id_that_comes_again_is_another_document() -> None:
    documents = Documents.from_ids(torch.tensor([[5, 5, 1, 5]]))
    assert documents.ends_N.tolist() == [2, 3, 4]
    assert documents.hidden[0, 0].tolist() == [
        [False, True, True, True],
        [False, False, True, True],
        [True, True, False, True],
        [True, True, True, False],
    ]


def test_documents_are_checked() -> None:
    with pytest.raises(ValueError, match=r"integers \[B, T\] on the CPU, got torch.float32"):
        Documents.from_ids(torch.zeros(2, 7))
    q, k, v = _qkv(4, 2)
    for flash in (False, True):
        with pytest.raises(ValueError, match=r"documents of a batch \(2, 6\) do not fit q \(2, 4, 7, 6\)"):
            attention(q, k, v, flash=flash, documents=Documents.from_ids(DOCUMENT_IDS[:, 1:]))


def test_selective_checkpointing_keeps_the_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    kernel = flash_cpu.forward
    monkeypatch.setattr(flash_cpu, "forward", lambda *args: calls.append(1) or kernel(*args))

    def contexts():
        return create_selective_checkpoint_contexts(SelectivePolicy())

    for options, expected in (({}, 2), ({"context_fn": contexts}, 1)):
        calls.clear()
        q, k, v = _qkv(4, 2)
        checkpoint(
            lambda q, k, v: flash_attention(q.sin(), k, v).cos(), q, k, v, use_reentrant=False, **options
        ).sum().backward()
        assert len(calls) == expected


def test_flash_refuses_dtypes_without_a_kernel() -> None:
    q, k, v = _qkv(4, 2)
    with pytest.raises(ValueError, match="q is torch.float32, k torch.float64 and v torch.float32"):
        flash_attention(q, k.double(), v)
    with pytest.raises(ValueError, match="no kernel of cpu takes torch.int64; cast q, k and v to float32, float16"):
        flash_attention(*(x.detach().long() for x in (q, k, v)))


def test_flash_casts_under_autocast_as_torch_does() -> None:
    q, k, v = _qkv(4, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = flash_attention(q, k, v)
        theirs = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


def test_swiglu_is_the_formula() -> None:
    gate, up = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 5.0]])
    # 1 / (1 + e^-1) * 3 and -2 / (1 + e^2) * 5
    expected = torch.tensor([[3.0 / (1 + math.exp(-1)), -10.0 / (1 + math.exp(2))]])
    torch.testing.assert_close(swiglu(gate, up), expected)
    with pytest.raises(ValueError, match="must be alike"):
        swiglu(gate, up[:, :1])
    with pytest.raises(ValueError, match="must be alike"):
        swiglu(gate, up.double())


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


def test_rotary_scaling_of_llama_3_1() -> None:
    """At 100 positions: frequencies of 5, 2.5 and 0.5 turns; 4 turns and more are kept, 1 and less are divided by 8."""
    frequencies = torch.tensor([5.0, 2.5, 0.5], dtype=torch.float64) * 2 * math.pi / 100
    scaled = RotaryScaling(8.0, 100, 1.0, 4.0).apply(frequencies)
    # Half way from 1 to 4 turns: half of it kept, half divided.
    expected = frequencies * torch.tensor([1.0, 0.5 + 0.5 / 8, 1 / 8], dtype=torch.float64)
    torch.testing.assert_close(scaled, expected)


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
