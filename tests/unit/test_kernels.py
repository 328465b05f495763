"""Casts and sums of the host backend against torch, for every instruction set of this processor."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchtitan_npu import _C

DTYPES = {
    torch.float32: _C.DType.float32,
    torch.float16: _C.DType.float16,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float64: _C.DType.float64,
}
ISAS = _C.HostDevice.available_isas()
DEVICES: dict[str, _C.Device] = {isa: _C.HostDevice(isa) for isa in ISAS}
# What any other device computes with, here on the CPU.
DEVICES["torch"] = _C.TorchDevice(torch.device("cpu"))
ANY_DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
PAIRS = list(itertools.product(DTYPES, DTYPES))
# Sizes around whole vectors (2 .. 16 lanes) and whole blocks of four vectors.
SIZES = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 257)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def special_values(dtype: torch.dtype) -> Tensor:
    """All 2**16 values of a 16-bit type; edges, ties and random bit patterns of a wider one. 1-D."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(1)
    every_half = torch.cat([special_values(torch.float16).to(dtype), special_values(torch.bfloat16).to(dtype)])
    finite = every_half[torch.isfinite(every_half)].sort().values
    ties = (finite[1:] + finite[:-1]) / 2  # half-way between 16-bit neighbours (or close to it): ties to even
    near = torch.cat([torch.nextafter(ties, ties + torch.inf), torch.nextafter(ties, ties - torch.inf)])
    edges = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.996, 65520.0, 3.4e38, 1e-45], dtype=dtype
    )
    low, high = -(2**31), 2**31
    bits = torch.randint(low, high, (20000,), generator=generator).to(torch.int32)
    any_bits = (
        bits.view(dtype)
        if dtype == torch.float32
        else torch.cat([bits.view(torch.float32).double(), torch.randn(4096, generator=generator).double()])
    )
    return torch.cat([every_half, ties, near, edges, any_bits])


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit, except that one NaN is as good as another."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    integer = BITS[actual.dtype.itemsize]
    same = (actual.view(integer) == expected.view(integer)) | (actual.isnan() & expected.isnan())
    wrong = (~same).nonzero().flatten()
    assert wrong.numel() == 0, (
        f"{wrong.numel()} differ, first at {wrong[0]}: {actual[wrong[0]]} for {expected[wrong[0]]}"
    )


def misaligned(values: Tensor, offset_bytes: int) -> Tensor:
    """A copy that starts `offset_bytes` after an aligned address, not a multiple of the element size."""
    memory = torch.zeros(values.nbytes + 64, dtype=torch.uint8)
    memory[offset_bytes : offset_bytes + values.nbytes] = values.contiguous().view(torch.uint8)
    return memory[offset_bytes : offset_bytes + values.nbytes]


def cast(device: _C.Device, values: Tensor, dtype: torch.dtype) -> Tensor:
    result = torch.full((values.numel() + 1,), -1.0, dtype=dtype)
    device.cast(result.data_ptr(), DTYPES[dtype], values.data_ptr(), DTYPES[values.dtype], values.numel())
    assert result[-1] == -1, "wrote past the end"
    return result[:-1]


@ANY_DEVICE
@pytest.mark.parametrize("src,dst", PAIRS, ids=str)
def test_cast_equals_torch(device: _C.Device, src: torch.dtype, dst: torch.dtype) -> None:
    values = special_values(src)
    assert_same_bits(cast(device, values, dst), values.to(dst))


@pytest.mark.parametrize("isa", ISAS)
def test_cast_rounds_ties_to_even_and_keeps_nan(isa: str) -> None:
    device = _C.HostDevice(isa)
    # bfloat16 has 8 significant bits: neighbours of 1 are 2**-7 apart, so 1 + 2**-8 is a tie.
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8])
    assert cast(device, ties, torch.bfloat16).tolist() == [1, 1 + 2**-6, 1 + 2**-7, -1]
    # A NaN whose payload is all in the bits that are cut off; rounding up its bits would give infinity or wrap around.
    nans = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, 0xFF800001 - 2**32], dtype=torch.int32).view(torch.float32)
    for dtype in (torch.bfloat16, torch.float16):
        assert cast(device, nans, dtype).isnan().all()
    # float16: the largest is 65504, ties from 65520 on go to infinity; the smallest is 2**-24, half of it goes to 0.
    edges = torch.tensor([65519.996, 65520.0, 2**-24, 2**-25, 2**-25 * 1.0001, -(2**-26)])
    assert cast(device, edges, torch.float16).tolist() == [65504, torch.inf, 2**-24, 0, 2**-24, -0.0]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("src,dst", PAIRS, ids=str)
def test_any_length_and_alignment(isa: str, src: torch.dtype, dst: torch.dtype) -> None:
    device = _C.HostDevice(isa)
    for numel, offset in zip(SIZES, itertools.cycle((1, 3, 8, 31)), strict=False):
        values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(src)
        source = misaligned(values, offset)
        memory = misaligned(torch.full((numel + 1,), 7.0, dtype=dst), 33 - offset)
        device.cast(memory.data_ptr(), DTYPES[dst], source.data_ptr(), DTYPES[src], numel)
        result = memory.clone().view(dst)
        assert_same_bits(result[:-1], values.to(dst))
        assert result[-1] == 7, "wrote past the end"


@ANY_DEVICE
@pytest.mark.parametrize("src,dst", PAIRS, ids=str)
def test_add_equals_torch(device: _C.Device, src: torch.dtype, dst: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    values, old = torch.randn(1003, generator=generator).to(src), torch.randn(1003, generator=generator).to(dst)
    compute = torch.float64 if dst == torch.float64 else torch.float32
    expected = (old.to(compute) + values.to(compute)).to(dst)
    device.add(old.data_ptr(), DTYPES[dst], values.data_ptr(), DTYPES[src], values.numel())
    assert_same_bits(old, expected)


def reference_sum(
    sources: list[Tensor | None], old: Tensor, *, round_to: torch.dtype, divisor: float, accumulate: bool
) -> Tensor:
    """sum() in torch's own arithmetic: sequential adds, one division, one rounding to `round_to`, then store or add."""
    wire = next(source.dtype for source in sources if source is not None)
    compute = torch.float64 if wire == torch.float64 else torch.float32
    terms = [torch.zeros(old.shape, dtype=compute) if s is None else s.to(compute) for s in sources]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    rounded = (total / divisor).to(round_to)
    if accumulate:
        wide = torch.float64 if old.dtype == torch.float64 else torch.float32
        return (old.to(wide) + rounded.to(compute).to(wide)).to(old.dtype)
    return rounded.to(compute).to(old.dtype)


@st.composite
def sums(draw: st.DrawFn) -> tuple[list[Tensor | None], Tensor, torch.dtype, float, bool]:
    wire = draw(st.sampled_from(list(DTYPES)))
    results = set(DTYPES) if wire.itemsize > 2 else {wire, torch.float32, torch.float64}
    result = draw(st.sampled_from(sorted(results, key=str)))
    round_to = draw(st.sampled_from(sorted({result, torch.bfloat16, torch.float16, torch.float32}, key=str)))
    numel = draw(st.sampled_from(SIZES[1:]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1.0, 1e-6, 1e4]))
    ranks = draw(st.integers(1, 9))
    missing = draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1))
    sources = [
        None if r in missing else (torch.randn(numel, generator=generator) * scale).to(wire) for r in range(ranks)
    ]
    old = torch.randn(numel, generator=generator).to(result)
    return sources, old, round_to, float(draw(st.integers(1, 9))), draw(st.booleans())


@settings(max_examples=150, deadline=None)
@given(case=sums())
def test_sum_equals_torch(case: tuple[list[Tensor | None], Tensor, torch.dtype, float, bool]) -> None:
    sources, old, round_to, divisor, accumulate = case
    wire = next(source.dtype for source in sources if source is not None)
    expected = reference_sum(sources, old, round_to=round_to, divisor=divisor, accumulate=accumulate)
    for name, device in DEVICES.items():
        offset = 1 if name != "torch" else 0  # tensors are aligned
        held = [
            None if source is None else misaligned(source, offset + 2 * offset * r) for r, source in enumerate(sources)
        ]
        result = old.clone()
        device.sum(
            result.data_ptr(),
            [0 if source is None else source.data_ptr() for source in held],
            old.numel(),
            wire=DTYPES[wire],
            result=DTYPES[old.dtype],
            round_to=DTYPES[round_to],
            divisor=divisor,
            accumulate=accumulate,
        )
        assert_same_bits(result, expected)


@ANY_DEVICE
def test_sum_of_bfloat16_has_the_error_of_float32(device: _C.Device) -> None:
    # 1 + 255 * 2**-9: in bfloat16 every single addition of 2**-9 to 1 would be rounded away.
    sources = [torch.tensor([1.0], dtype=torch.bfloat16)] + [torch.tensor([2**-9], dtype=torch.bfloat16)] * 255
    result = torch.zeros(1)
    device.sum(
        result.data_ptr(),
        [source.data_ptr() for source in sources],
        1,
        wire=_C.DType.bfloat16,
        result=_C.DType.float32,
        round_to=_C.DType.float32,
    )
    assert result.item() == 1 + 255 * 2**-9


@ANY_DEVICE
def test_missing_sources_are_zeros(device: _C.Device) -> None:
    # -0 + 0 is +0, as with a tensor of zeros; without a missing source -0 stays.
    minus_zero, result = torch.tensor([-0.0]), torch.tensor([5.0])
    arguments = dict(wire=_C.DType.float32, result=_C.DType.float32, round_to=_C.DType.float32)
    for sources, sign in (
        ([minus_zero.data_ptr(), 0], False),
        ([0, minus_zero.data_ptr()], False),
        ([minus_zero.data_ptr()], True),
    ):
        device.sum(result.data_ptr(), sources, 1, **arguments)
        assert result.item() == 0 and torch.signbit(result).item() is sign
    result.fill_(5)
    device.sum(result.data_ptr(), [0, 0], 1, **arguments, accumulate=True)
    assert result.item() == 5


@ANY_DEVICE
def test_squares_are_summed_in_float64(device: _C.Device) -> None:
    values = torch.randn(1003, generator=torch.Generator().manual_seed(3))
    got = device.sum_squares(values.data_ptr(), _C.DType.float32, values.numel())
    assert got == pytest.approx(values.double().square().sum().item(), rel=1e-14)


def test_bytes_are_only_copied() -> None:
    device, source, result = _C.HostDevice(), torch.arange(9, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    device.cast(result.data_ptr(), _C.DType.bytes, source.data_ptr(), _C.DType.bytes, 9)
    assert result.tolist() == list(range(9))
    device.zero(result.data_ptr() + 1, 7)
    assert result.tolist() == [0] * 8 + [8]
    with pytest.raises(RuntimeError, match="bytes is not defined"):
        device.cast(result.data_ptr(), _C.DType.float32, source.data_ptr(), _C.DType.bytes, 1)
    with pytest.raises(RuntimeError, match="bytes is not defined"):
        device.add(result.data_ptr(), _C.DType.bytes, source.data_ptr(), _C.DType.bytes, 1)


def test_default_is_the_best_of_this_processor() -> None:
    assert _C.HostDevice().isa == ISAS[-1]
    assert ISAS[0] == "portable"
    with pytest.raises(ValueError, match="isa 'avx1024' is not available"):
        _C.HostDevice("avx1024")
