"""For all tests: one thread per process, as there are more processes than cores."""

from __future__ import annotations

import os
import tempfile

import pytest

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Not the user's, where bucket caps of `tune` would be hints. Workers and ranks inherit it; it ends with this process.
_cache = tempfile.TemporaryDirectory(prefix="torchtitan-npu-cache-")
os.environ.setdefault("TORCHTITAN_NPU_CACHE", _cache.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write_golden", action="store_true", help="replace tests/e2e/golden_losses.json by what is computed now"
    )
