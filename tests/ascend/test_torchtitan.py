"""Someone else's trainer on simulated cards: torchtitan as it is on PyPI, with FSDP2, knows nothing of this project.

Its requirements are many and older than ours, so it lives in an environment of its own: TT_TITAN_PYTHON names the
interpreter, which `make test-titan` sets. Without torchtitan the test fails; it never skips.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from launch import run_ranks
from ports import free_port
from simulated import HERE, find_simulator, simulator_environment

TITAN_PYTHON = os.environ.get("TT_TITAN_PYTHON", sys.executable)
PROGRAM = str(HERE / "torchtitan_debug.py")
RANKS = 2
STEPS = 6


def run(*command: str) -> None:
    done = subprocess.run(
        [TITAN_PYTHON, *command],
        env=simulator_environment(find_simulator()),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_debug_model_trains_with_fsdp2(tmp_path: Path) -> None:
    found = subprocess.run(
        [TITAN_PYTHON, "-c", "import importlib.util as u; assert u.find_spec('torchtitan')"], capture_output=True
    )
    assert found.returncode == 0, (
        f"{TITAN_PYTHON} has no torchtitan: `make test-npu` makes an environment that has, or set TT_TITAN_PYTHON to "
        "the interpreter of one"
    )
    run(PROGRAM, "assets", str(tmp_path))
    options = {
        "--module": "llama3",
        "--config": "llama3_debugmodel",
        "--hf-assets-path": str(tmp_path / "tokenizer"),
        "--dataloader.dataset-path": str(tmp_path / "text"),
        "--parallelism.spmd-backend": "partial_dtensor",  # the default needs an FSDP2 newer than torch 2.13's
        "--training.steps": str(STEPS),
        "--training.seq-len": "64",
        "--training.local-batch-size": "2",
        "--dump-folder": str(tmp_path / "out"),
    }
    results = run_ranks(
        [PROGRAM, "train", *(word for option in options.items() for word in option)],
        RANKS,
        timeout=280,
        python=TITAN_PYTHON,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        TORCHDYNAMO_DISABLE="1",  # its attention is compiled otherwise, for which simulated cards have no compiler
        HF_HUB_OFFLINE="1",
        HF_DATASETS_CACHE=str(tmp_path / "cache"),
        NO_COLOR="1",
        TT_SIM_STATS=str(tmp_path / "statistics%r.json"),
    )
    output = re.sub(r"\x1b\[[0-9;]*m", "", results[0].output)
    losses = [float(loss) for loss in re.findall(r"step: +\d+ +loss: +([0-9.]+)", output)]
    assert len(losses) == STEPS, output
    assert 6 < losses[0] < 9 and losses[-1] < losses[0] - 0.5, losses
    assert "Applied FSDP to the model" in output
    for rank in range(RANKS):
        counted = json.loads((tmp_path / f"statistics{rank}.json").read_text())
        assert counted["violations"] == {}
        assert counted["collectives"]["HcclReduceScatter"]["calls"] >= STEPS * 7, counted["collectives"]
