"""The engine's own test programs on simulated cards, with random delays: no race, no use after free, right numbers.

They are the tests of tests/dist with models on a card, bit for bit like on the CPU: the plain model that they compare
with is on the card, too, and the simulated HCCL adds in rank order.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from simulated import ROOT, simulator_environment

DIST = ROOT / "tests" / "dist"


def run_on_cards(simulator: Path, *command: str, **environment: str) -> str:
    more = {"TT_TEST_DEVICE": "npu", "TT_SIM_MEMORY_MB": "16384", "PYTHONWARNINGS": "ignore", **environment}
    done = subprocess.run(
        [sys.executable, *command],
        env=simulator_environment(simulator, **more),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    ("files", "tests", "delay"),
    [
        ("step memory", "gradients_and_weights or between_steps", "1"),
        ("mixed_precision", "summed_in_float32", "2"),
        ("hybrid", "two_of_two or not_on_one_rank or leaves_replicas_in_step", "3"),
    ],
)
def test_numbers_are_those_of_a_plain_model(simulator: Path, files: str, tests: str, delay: str) -> None:
    paths = [str(DIST / f"test_fsdp_{file}.py") for file in files.split()]
    said = run_on_cards(simulator, "-m", "pytest", "-q", *paths, "-k", tests, TT_SIM_DELAY=delay)
    assert " passed" in said and "failed" not in said, said


def test_random_programs(simulator: Path) -> None:
    run_on_cards(simulator, str(DIST / "fuzz.py"), "--programs", "8", "--seed", "7", TT_SIM_DELAY="3")
