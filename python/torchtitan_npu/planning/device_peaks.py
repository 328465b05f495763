"""The most that an accelerator can compute, by its name.

Dense matrix products in FLOP/s, without the vendor's factor of 2 for structured sparsity; fp32 is full fp32 (no TF32,
no HF32), as torch computes by default.

Ascend: the cube units alone, which is what matrix products run on; data sheets add the vector units' (376 instead of
353.9 for the 910B2). One cube multiplies 16 x 16 x 16 fp16 or bf16 numbers in a cycle, which is 8,192 operations, and a
quarter of that in fp32; times cores and clock: 910B1 25 x 1.85 GHz, 910B2 24 x 1.8, 910B3 20 x 1.8, 910B4 20 x 1.5. The
910C has two dies, each of which is a device of its own for torch (named Ascend910_93xx) with a 910B2's cores. The
Ascend integrations of torchtitan use the same figures for B2, B3, B4 and the 910C, and 373.9 TFLOP/s for the B1.

NVIDIA: data sheets of the SXM modules A100 and A800 (312 TFLOP/s in bf16), H100, H800 and H200 (989.4), B200 (2,250),
GB200 (2,500 per GPU), and of H100 PCIe (756), H100 NVL (835), A30 (165), L40S (362), L4 (121) and V100 (125, no bf16).
AMD: data sheets of MI250X (191.5 per die, which is a device of its own), MI300X and MI325X (1,307.4).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Format = Literal["fp32", "bf16", "fp16"]


class Peak(NamedTuple):
    """FLOP/s of dense matrix products; None where the device has none."""

    bf16: float | None
    fp16: float
    fp32: float


def _cube(cores: int, clock_ghz: float) -> Peak:
    half = cores * 8192 * clock_ghz * 1e9
    return Peak(half, half, half / 4)


def _tera(bf16: float | None, fp16: float, fp32: float) -> Peak:
    return Peak(None if bf16 is None else bf16 * 1e12, fp16 * 1e12, fp32 * 1e12)


PEAKS: tuple[tuple[str, Peak], ...] = (
    ("Ascend910B1", _cube(25, 1.85)),
    ("Ascend910B2", _cube(24, 1.8)),
    ("Ascend910B3", _cube(20, 1.8)),
    ("Ascend910B4", _cube(20, 1.5)),
    ("Ascend910_93", _cube(24, 1.8)),
    ("GB200", _tera(2500, 2500, 80)),
    ("B200", _tera(2250, 2250, 75)),
    ("H200", _tera(989.4, 989.4, 66.9)),
    ("H100 NVL", _tera(835, 835, 60)),
    ("H100 PCIe", _tera(756, 756, 51)),
    ("H100", _tera(989.4, 989.4, 66.9)),
    ("H800 PCIe", _tera(756, 756, 51)),
    ("H800", _tera(989.4, 989.4, 66.9)),
    ("A100", _tera(312, 312, 19.5)),
    ("A800", _tera(312, 312, 19.5)),
    ("L40S", _tera(362, 362, 91.6)),
    ("A30", _tera(165, 165, 10.3)),
    ("NVIDIA L4", _tera(121, 121, 30.3)),
    ("V100", _tera(None, 125, 15.7)),
    ("MI250X", _tera(191.5, 191.5, 47.9)),
    ("MI300X", _tera(1307.4, 1307.4, 163.4)),
    ("MI325X", _tera(1307.4, 1307.4, 163.4)),
)
"""By a part of the name that torch gives; the first that fits counts."""


def peak_flops(device_name: str, number_format: Format) -> float | None:
    """FLOP/s of the device that torch calls ``device_name``, or None for one that the table does not have."""
    for part, peak in PEAKS:
        if part.lower() in device_name.lower():
            return getattr(peak, number_format)
    return None
