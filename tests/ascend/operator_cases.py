"""Compares torch functions on a simulated card with the CPU: `operator_cases.py [name …]`, a program.

Prints one line for each difference; the exit code says whether there were any.
"""

from __future__ import annotations

import sys
from typing import Any

import cases_elementwise  # noqa: F401, they register themselves
import cases_tensors  # noqa: F401
import cases_training  # noqa: F401
import torch
import torch_npu
from operator_maker import CASES, Case, Maker


def flat(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def compare(name: str, dtype: torch.dtype, function: Case) -> str | None:
    expected = flat(function(Maker("cpu", dtype)))
    try:
        got = flat(function(Maker("npu", dtype)))
        got = [t.cpu() for t in got]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {tuple(a.shape)} {a.dtype}, on the CPU {tuple(b.shape)} {b.dtype}"
        # Halves: the CPU rounds in places where a card, and the simulated one, keeps fp32.
        tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}.get(dtype, 2e-5)
        a, b = (t.to(torch.float64) if not t.is_complex() else t for t in (a, b))
        if not torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"result {i}: differs by {(a - b).abs().max().item():.3g}"
    return None


def main() -> int:
    assert torch_npu.npu.is_available()
    selected = sys.argv[1:]
    failures = 0
    compared = 0
    for name, (function, dtypes) in CASES.items():
        if selected and name not in selected:
            continue
        for dtype in dtypes:
            compared += 1
            problem = compare(name, dtype, function)
            if problem is not None:
                failures += 1
                print(f"{name} ({dtype}): {problem}", flush=True)
    print(f"{compared} compared, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
