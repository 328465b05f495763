"""What the engine asks of a card beyond the plain model, beside FSDP2: counts, the same in every run."""

from __future__ import annotations

import csv
import subprocess

import pytest
from launch import NPU_PYTHON
from simulated import ROOT, find_simulator, simulator_environment

Counts = dict[str, dict[str, float]]


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    """Rows of npu_counts.py --quick (2 ranks, 9 units), by engine. The script itself compares the losses."""
    path = tmp_path_factory.mktemp("counts") / "counts.csv"
    folder = find_simulator()
    environment = simulator_environment(folder, TT_SIMULATOR_DIR=str(folder), TT_SIM_MEMORY_MB="4096")
    done = subprocess.run(
        [NPU_PYTHON, str(ROOT / "benchmarks" / "npu_counts.py"), "--quick", "--csv", str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "simulated Ascend" in done.stdout.splitlines()[0]
    with path.open() as file:
        rows = list(csv.DictReader(file))
    numbers = ("launches", "added_launches", "added_copied", "collectives", "gradients_sent", "parameters_sent")
    return {row["engine"]: {key: float(row[key]) for key in numbers} for row in rows}


def test_fsdp2_is_what_it_was(counts: Counts) -> None:
    """The reference, so that a ratio is not met by a change on the other side."""
    assert counts["fsdp2"]["added_launches"] == 345
    assert counts["fsdp2"]["collectives"] == 26


@pytest.mark.parametrize(
    ("of", "most"),
    [("added_launches", 0.4), ("added_copied", 0.45), ("gradients_sent", 0.55), ("parameters_sent", 1.01)],
)
@pytest.mark.parametrize("engine", ["ours", "ours_cap25"])
def test_ratio_to_fsdp2(counts: Counts, engine: str, of: str, most: float) -> None:
    assert 0 < counts[engine][of] <= most * counts["fsdp2"][of]


def test_launches_of_each_unit(counts: Counts) -> None:
    """Of the 59, nine are sums of buckets; the others cast shards for gathers or bring gradients into their buckets."""
    assert counts["ours"]["added_launches"] == 59
    assert counts["ours_cap25"]["collectives"] == 4
