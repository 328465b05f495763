"""torch.compile: of blocks, before and after FSDP, and of the whole model."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.fsdp import FSDP, MixedPrecisionPolicy

LAYERS = 10  # more than the 8 variants that Dynamo makes of one function before it gives up
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make(layers: int) -> SmallModel:
    torch.manual_seed(0)
    return SmallModel(layers)


def compiled(how: str, backend: Any, layers: int, **options: Any) -> Any:
    """The FSDP model of ``make(layers)``, compiled in one of the ways that users know."""
    compilation = {"backend": backend, "fullgraph": how.startswith("blocks")}
    model: Any = make(layers)
    if how == "whole model, before":
        model.compile(**compilation)
    if how == "blocks, before":
        for block in model.layers:
            block.compile(**compilation)
    if how == "blocks replaced, before":
        for i, block in enumerate(model.layers):
            model.layers[i] = torch.compile(block, **compilation)
    model = FSDP(model, **options)
    if how == "blocks, after":
        for block in model.layers:
            block.compile(**compilation)
    if how == "whole model, wrapped":
        return torch.compile(model, **compilation)
    return model


def compare(how: str, backend: Any, *, layers: int = LAYERS, tolerance: float = 0.0, **options: Any) -> None:
    """Four training steps with an evaluation in between, beside the same FSDP model without compilation; after the
    second step nothing is compiled any more."""
    torch._dynamo.reset()
    counters.clear()
    model, plain = compiled(how, backend, layers, **options), FSDP(make(layers), **options)
    inner = getattr(model, "_orig_mod", model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=1e-2) for m in (inner, plain))
    for step in range(4):
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            losses = [next_token_loss(m, tokens_for(step, dist.get_rank())) for m in (model, plain)]
            for loss in losses:
                loss.backward()
            torch.testing.assert_close(*losses, rtol=tolerance, atol=tolerance)
            for got, want in zip(inner._fsdp_state.params, plain._fsdp_state.params, strict=True):
                torch.testing.assert_close(
                    got.sharded.grad, want.sharded.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=got.name: n + m
                )
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                results = [m(tokens_for(9, 0)) for m in (model, plain)]
            torch.testing.assert_close(*results, rtol=10 * tolerance, atol=10 * tolerance)
    assert not counters["recompile_limit"], counters["recompile_limit"]


WAYS = [
    "blocks, before",
    "blocks, after",
    "blocks replaced, before",
    "whole model, before",
    "whole model, wrapped",
]


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_the_same_numbers_without_recompilation(how: str) -> None:
    """All blocks share two graphs: with gradients, and without in the evaluation. Blocks have no graph break: what
    gathers them is outside."""
    backend = CompileCounterWithBackend("aot_eager")
    compare(how, backend)
    assert backend.frame_count == 2, "one graph for all blocks, with and without gradients"
    if how.startswith("blocks"):
        assert not counters["graph_break"], counters["graph_break"]


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("blocks, before", {"activation_checkpointing": True}),
        ("blocks replaced, before", {"activation_checkpointing": True, "mixed_precision": BF16}),
        ("whole model, wrapped", {"activation_checkpointing": True, "bucket_cap_mb": 0.0005}),
        ("whole model, wrapped", {"activation_checkpointing": "selective"}),
        ("blocks, before", {"mixed_precision": BF16, "communicator": "c10d", "reshard_after_forward": False}),
    ],
)
@on_ranks(2)
def test_together_with_other_options(how: str, options: dict[str, Any]) -> None:
    compare(how, "aot_eager", layers=3, **options)


@pytest.mark.parametrize("how", ["blocks, before", "blocks replaced, before"])
@on_ranks(2)
def test_selective_checkpointing_of_compiled_blocks_is_refused(how: str) -> None:
    model = compiled(how, "inductor", 2, activation_checkpointing="selective")
    with pytest.raises(RuntimeError, match="not supported: activation_checkpointing='selective' with a .* compiled by"):
        model(tokens_for(0, 0))


@on_ranks(2, timeout=120)
def test_inductor() -> None:
    """Generated C++: its sums have another order, 1e-5 of values near 1."""
    compare("blocks, before", "inductor", layers=2, tolerance=1e-5, activation_checkpointing=True)


if shutil.which("g++") is None and shutil.which("clang++") is None:
    test_inductor = pytest.mark.skip(reason="inductor needs a C++ compiler: neither g++ nor clang++ is here")(
        test_inductor
    )
