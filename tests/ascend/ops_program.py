"""Operators of torchtitan_npu on a simulated card beside the CPU; run as a program, see test_ops.py.

Argument: the name of a function below. A check compares values and gradients of the card, from inputs in fp32, fp16 and
bf16, with those of the CPU in fp64 from the same inputs. A count is for the simulator's statistics.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch_npu  # noqa: F401 - makes the device type "npu"
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_npu.config import ModelConfig
from torchtitan_npu.fsdp.activation_checkpointing import SelectivePolicy
from torchtitan_npu.models import build_model
from torchtitan_npu.ops import (
    Documents,
    apply_rotary,
    attention,
    cross_entropy,
    flash_npu,
    rms_norm,
    rotary_tables,
    swiglu,
)

# Numbers of order 1, sums of a few dozen terms; results and gradients are rounded once or twice to the dtype.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}

Function = Callable[..., Tensor]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(function: Function, inputs: list[Tensor], dtype: torch.dtype, reference: Function | None = None) -> Tensor:
    """``function`` of ``inputs`` in ``dtype`` on the card, and ``reference`` of the same numbers in fp64."""
    on_card = [x.to(dtype).npu().requires_grad_() for x in inputs]
    exact = [x.detach().cpu().double().requires_grad_() for x in on_card]
    out, expected = function(*on_card), (reference or function)(*exact)
    assert out.dtype == dtype and out.device.type == "npu"
    weight = random(*expected.shape, seed=9)
    out.backward(weight.to(dtype).npu())
    expected.backward(weight.to(dtype).double())
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(out.cpu().double(), expected, **tolerance)
    for x, other in zip(on_card, exact, strict=True):
        torch.testing.assert_close(x.grad.cpu().double(), other.grad, **tolerance)
    return out


def by_position(function: Function) -> Function:
    """``function`` of views of ``[B, T, H, D]``, as projections leave them."""
    return lambda *inputs: function(*(x.transpose(1, 2) for x in inputs))


def check_attention() -> None:
    for dtype in TOLERANCE:
        for heads, kv_heads in ((4, 4), (4, 2), (6, 1)):
            for flash in (True, False):
                heads_first = [random(2, n, 7, 8, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
                compare(lambda q, k, v, f=flash: attention(q, k, v, flash=f), heads_first, dtype)
                rows = [x.transpose(1, 2).contiguous() for x in heads_first]
                out = compare(by_position(lambda q, k, v, f=flash: attention(q, k, v, flash=f)), rows, dtype)
                assert not flash or out.transpose(1, 2).is_contiguous()


def check_refusals() -> None:
    q = random(1, 2, 3, 8, seed=0).npu()
    for bad, message in ((q, "no kernel of npu takes torch.float64"), (q.float().repeat(1, 1, 1, 97), "D is 776")):
        try:
            attention(bad, bad, bad, flash=True)
        except ValueError as error:
            assert message in str(error), error
        else:
            raise AssertionError(f"expected: {message}")


def check_documents() -> None:
    ids = torch.tensor([[0, 0, 0, 1, 2, 2, 2], [2, 3, 3, 3, 3, 3, 3], [0, 1, 2, 3, 4, 5, 6]])
    on_cpu, on_card = Documents.from_ids(ids), Documents.from_ids(ids, torch.device("npu"))
    for most in (2048, 3):  # documents of a launch
        flash_npu.MAX_SEQUENCES = most
        for dtype in TOLERANCE:
            for heads, kv_heads in ((4, 4), (4, 2)):
                rows = [random(3, 7, n, 8, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
                for flash in (True, False):

                    def inside(q: Tensor, k: Tensor, v: Tensor, flash: bool = flash) -> Tensor:
                        documents = on_cpu if q.device.type == "cpu" else on_card
                        return attention(q, k, v, flash=flash, documents=documents)

                    compare(by_position(inside), rows, dtype)
                    if flash:
                        compare(inside, [x.transpose(1, 2) for x in rows], dtype)


def check_others() -> None:
    tables = rotary_tables(8, 16, 100.0)
    on_card = [table.npu() for table in tables]

    def rotate(x: Tensor) -> Tensor:
        cos, sin = tables if x.device.type == "cpu" else on_card
        return apply_rotary(x, cos[:7], sin[:7])

    for dtype in TOLERANCE:
        compare(lambda x, w: rms_norm(x, w, 1e-5), [random(2, 7, 24, seed=0), random(24, seed=1)], dtype)
        compare(swiglu, [random(2, 7, 24, seed=0), random(2, 7, 24, seed=1)], dtype)
        compare(rotate, [random(2, 4, 7, 8, seed=0)], dtype)
        out = compare(by_position(rotate), [random(2, 7, 4, 8, seed=0)], dtype)
        assert out.transpose(1, 2).is_contiguous()

    def rotate_one(x: Tensor) -> Tensor:
        return apply_rotary(x, *((t if x.device.type == "cpu" else t.npu())[:1] for t in tables))

    compare(rotate_one, [random(3, 4, 1, 8, seed=0)], torch.float32)  # beyond a limit of the kernel: plain operators


def repeat(function: Function, inputs: list[Tensor], times: int = 3) -> None:
    """``times`` forwards and backwards in bf16, with nothing launched but what ``function`` launches."""
    on_card = [x.bfloat16().npu().requires_grad_() for x in inputs]
    grad = None
    for _ in range(times):
        out = function(*on_card)
        if grad is None:
            turned = out.ndim == 4 and out.transpose(1, 2).is_contiguous()
            shape = out.transpose(1, 2).shape if turned else out.shape
            grad = torch.ones(shape, dtype=out.dtype).npu()
            grad = grad.transpose(1, 2) if turned else grad
        torch.autograd.grad(out, on_card, grad)


def count_attention() -> None:
    rows = [random(2, 7, n, 8, seed=i) for i, n in enumerate((4, 2, 2))]
    repeat(by_position(lambda q, k, v: attention(q, k, v, flash=True)), rows)
    repeat(lambda q, k, v: attention(q, k, v, flash=True), [random(2, n, 7, 8, seed=n) for n in (4, 2, 2)])


def count_selective() -> None:
    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        return create_selective_checkpoint_contexts(SelectivePolicy())

    def recomputed(*qkv: Tensor) -> Tensor:
        return checkpoint(lambda *x: attention(*x, flash=True), *qkv, use_reentrant=False, context_fn=contexts)

    repeat(by_position(recomputed), [random(2, 7, n, 8, seed=i) for i, n in enumerate((4, 2, 2))])


def count_documents() -> None:
    documents = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 2, 2, 2], [2, 3, 3, 3, 3, 3, 3]]), torch.device("npu"))
    rows = [random(2, 7, n, 8, seed=i) for i, n in enumerate((4, 2, 2))]
    repeat(by_position(lambda q, k, v: attention(q, k, v, flash=True, documents=documents)), rows)


def count_others() -> None:
    cos, sin = (table.npu() for table in rotary_tables(8, 16, 100.0))
    repeat(lambda x, w: rms_norm(x, w, 1e-5), [random(2, 7, 24, seed=0), random(24, seed=1)])
    repeat(swiglu, [random(2, 7, 24, seed=0), random(2, 7, 24, seed=1)])
    repeat(by_position(lambda x: apply_rotary(x, cos[:7], sin[:7])), [random(2, 7, 4, 8, seed=0)])


def losses(device: str, flash: bool, documents: bool, dtype: torch.dtype) -> tuple[list[float], list[Tensor]]:
    """Losses of four steps of a small Llama, and the gradients of the first."""
    cfg = ModelConfig(
        name="llama3_debug", dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=None, ffn_dim=48, vocab_size=61,
        max_seq_len=16, rope_theta=1e4, norm_eps=1e-5, use_flash_attention=flash, tie_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = build_model(cfg)
    model.init_weights()
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    generator = torch.Generator().manual_seed(2)
    kept, gradients = [], []
    for _ in range(4):
        tokens_BT = torch.randint(61, (3, 15), generator=generator)
        ids_BT = torch.randint(2, (3, 14), generator=generator).cumsum(1)
        inside = Documents.from_ids(ids_BT, torch.device(device)) if documents else None
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(tokens_BT[:, :-1].to(device), inside)
        loss = cross_entropy(logits, tokens_BT[:, 1:].to(device)) / (3 * 14)
        loss.backward()
        gradients = gradients or [parameter.grad.cpu() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())
    return [loss.item() for loss in kept], gradients


def check_llama() -> None:
    for flash in (True, False):
        for documents in (True, False):
            for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
                on_cpu, wanted = losses("cpu", flash, documents, dtype)
                on_card, found = losses("npu", flash, documents, dtype)
                torch.testing.assert_close(on_card, on_cpu, rtol=tolerance, atol=tolerance)
                for ours, theirs in zip(found, wanted, strict=True):
                    difference = (ours - theirs).norm() / theirs.norm()
                    assert difference < tolerance, difference


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    torch.npu.synchronize()
