"""MixedPrecisionPolicy, and tensors inside inputs and outputs."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import FrozenInstanceError, dataclass
from typing import Any, NamedTuple

import pytest
import torch

from torchtitan_npu.fsdp import MixedPrecisionPolicy
from torchtitan_npu.fsdp.tensors import cast_floating, tensors_in


def test_every_field_is_optional_and_frozen() -> None:
    policy = MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.buffer_dtype, policy.output_dtype) == (None,) * 4
    assert policy.cast_forward_inputs is True
    with pytest.raises(FrozenInstanceError):
        policy.param_dtype = torch.float16  # type: ignore[misc]
    articles = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    assert articles == MixedPrecisionPolicy(torch.float16, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "param_dtype",
            "bf16",
            "MixedPrecisionPolicy.param_dtype must be a floating-point torch.dtype or None, got 'bf16'",
        ),
        ("reduce_dtype", torch.int32, "reduce_dtype must be a floating-point torch.dtype or None, got torch.int32"),
        (
            "param_dtype",
            torch.float8_e4m3fn,
            "param_dtype=torch.float8_e4m3fn is not supported: use float16, bfloat16 or float32",
        ),
        ("buffer_dtype", 16, "buffer_dtype must be"),
        ("output_dtype", torch.bool, "output_dtype must be"),
        ("cast_forward_inputs", None, "cast_forward_inputs must be True or False, got None"),
    ],
)
def test_errors_name_the_field(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MixedPrecisionPolicy(**{field: value})


@dataclass
class Data:
    x: torch.Tensor
    name: str = "n"


class Pair(NamedTuple):
    x: torch.Tensor
    n: int


def nested() -> Any:
    t = torch.ones(2)
    return [t, (t, None, 3), {"a": t, "b": [torch.arange(2)]}, Data(t), Pair(t, 1), OrderedDict(z=t), "text"]


def test_all_tensors_are_found() -> None:
    assert len(tensors_in(nested())) == 7
    assert tensors_in(None) == [] and tensors_in({1, 2}) == []


def test_casting_keeps_types_and_leaves_integers() -> None:
    value = nested()
    cast = cast_floating(value, torch.bfloat16)
    assert [type(item) for item in cast] == [type(item) for item in value]
    assert {t.dtype for t in tensors_in(cast)} == {torch.bfloat16, torch.int64}
    assert (cast[4].n, cast[3].name, cast[1][1:], cast[6]) == (1, "n", (None, 3), "text")
    assert value[0].dtype == torch.float32, "the original is left alone"


def test_what_needs_no_cast_stays_the_same_object() -> None:
    value = nested()
    assert cast_floating(value, torch.float32) is value
