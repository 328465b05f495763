"""Operators of torchtitan_npu on a simulated card: numbers beside the CPU's, and what they launch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from simulated import HERE, Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")

PROGRAM = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("check", ["attention", "refusals", "documents", "others", "llama"])
def test_numbers_are_the_cpus(run_well: Run, check: str) -> None:
    run_well(PROGRAM, str(HERE / "ops_program.py"), f"check_{check}", TT_SIM_DELAY="1")


# Three forwards and backwards of each operator, in bf16. The mask of attention is made once.
MASK = {"aclnnInplaceOne": 1, "aclnnTriu": 1}
LAUNCHES = {
    # by position and by head
    "attention": MASK | {"aclnnFlashAttentionScore": 6, "aclnnFlashAttentionScoreGrad": 6},
    # recomputed in backward, but for the attention
    "selective": MASK | {"aclnnFlashAttentionScore": 3, "aclnnFlashAttentionScoreGrad": 3},
    "documents": MASK | {"aclnnFlashAttentionVarLenScore": 3, "aclnnFlashAttentionUnpaddingScoreGrad": 3},
    "others": {
        "aclnnRmsNorm": 3,
        "aclnnRmsNormGrad": 3,
        "aclnnCat": 3,
        "aclnnSwiGlu": 3,
        "aclnnSwiGluGrad": 3,
        "aclnnRotaryPositionEmbedding": 6,
        "aclnnNeg": 3,
        # To fp32 and back around each rotation; the gradient of RMSNorm's weight from fp32.
        "aclnnInplaceCopy": 6 * 2 + 3,
    },
}


@pytest.mark.parametrize("count", LAUNCHES)
def test_nothing_else_is_launched(run_well: Run, count: str, tmp_path: Path) -> None:
    statistics = tmp_path / "statistics.json"
    run_well(PROGRAM, str(HERE / "ops_program.py"), f"count_{count}", TT_SIM_STATS=str(statistics))
    found = json.loads(statistics.read_text())
    assert {name: row["launches"] for name, row in found["operators"].items()} == LAUNCHES[count]
    assert "d2d" not in found["copies"]
