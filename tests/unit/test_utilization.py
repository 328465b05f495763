"""Operations per token, peaks of devices, and MFU."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchtitan_npu.config import Config, config_from_dict
from torchtitan_npu.launch import Environment
from torchtitan_npu.models import build_model
from torchtitan_npu.planning.device_peaks import peak_flops
from torchtitan_npu.planning.flops import flops_per_token
from torchtitan_npu.train import utilization
from torchtitan_npu.train.utilization import Utilization, gemm_flops


def _config(**model: Any) -> Config:
    shape = {"name": "llama3_debug", "dim": 48, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 88}
    return config_from_dict(
        {
            "model": {**shape, "vocab_size": 61, "max_seq_len": 32, **model},
            "training": {"learning_rate": 1e-3, "max_steps": 1},
            "parallel": {"dtype": "bf16"},
        }
    )


@pytest.mark.parametrize("shape", [{}, {"tie_embeddings": True}, {"head_dim": 20}])
def test_operations_are_those_of_the_matrix_products(shape: dict[str, Any]) -> None:
    """Against torch's own count of a forward: 2 per parameter and token, and 4 L H Q T for plain attention."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = _config(**shape).model
    model = build_model(cfg)
    tokens = torch.zeros(3, 32, dtype=torch.int64)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(tokens)
    num_parameters = sum(p.numel() for p in model.parameters())
    norms = sum(p.numel() for name, p in model.named_parameters() if "norm" in name)  # multiply, but not as matrices
    expected = 3 * (counter.get_total_flops() / tokens.numel() + 2 * norms)
    assert flops_per_token(cfg, 32, num_parameters) == pytest.approx(expected, rel=1e-12)


def test_the_articles_seven_billion() -> None:
    cfg = _config(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008, vocab_size=128256, max_seq_len=8192)
    # 6 (7,526,944,768 - 128,256 x 4,096) + 12 x 32 x 4,096 x 8,192
    assert flops_per_token(cfg.model, 8192, 7_526_944_768) == 6 * 7_001_608_192 + 12_884_901_888


@pytest.mark.parametrize(
    ("name", "number_format", "tera"),
    [
        ("Ascend910B1", "bf16", 378.88),
        ("Ascend910B2", "fp16", 353.8944),
        ("Ascend910B2C", "fp16", 353.8944),
        ("Ascend910B3", "bf16", 294.912),
        ("Ascend910B4", "bf16", 245.76),
        ("Ascend910B4", "fp32", 61.44),
        ("Ascend910_9392", "bf16", 353.8944),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA GB200", "bf16", 2500.0),
    ],
)
def test_peaks_by_the_name_that_torch_gives(name: str, number_format: Any, tera: float) -> None:
    assert peak_flops(name, number_format) == pytest.approx(tera * 1e12, rel=1e-12)


@pytest.mark.parametrize(("name", "number_format"), [("Tesla V100-SXM2-32GB", "bf16"), ("Abacus 3", "fp32")])
def test_what_is_not_known_has_no_peak(name: str, number_format: Any) -> None:
    assert peak_flops(name, number_format) is None


def test_gemm_peak_is_positive_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert gemm_flops(torch.float32) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_on_the_cpu_the_ranks_peaks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utilization, "gemm_flops", lambda dtype: 2e9)
    monkeypatch.setattr(utilization, "gather_rows", lambda row: [row, [3e9]])
    cfg = _config()
    used = Utilization(cfg, Environment(0, 0, 2, 2), torch.device("cpu"), 100_000)
    # 6 (100,000 - 61 x 48) + 12 x 2 x 48 x 32 = 619,296 operations; 1,000 tokens/s of 5 GFLOP/s
    assert used.mfu(1000.0) == pytest.approx(619_296 * 1000 / 5e9)


def test_an_unknown_accelerator_is_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = SimpleNamespace(get_device_name=lambda device: "Abacus 3")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(logging.getLogger("torchtitan_npu"), "propagate", True)
    for rank in (0, 1):
        used = Utilization(_config(), Environment(rank, rank, 2, 2), torch.device("cuda", 0), 100_000)
        assert used.mfu(1000.0) is None
    once = {id(record): record.getMessage() for record in caplog.records}  # two handlers may have seen it
    assert [message for message in once.values() if "Abacus 3" in message] == [
        "the peak of Abacus 3 in bf16 is not known, so there is no MFU in the metrics: add the device to "
        "planning/device_peaks.py"
    ]
