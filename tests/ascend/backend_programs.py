"""What test_backend.py runs in processes of their own: the backend's device beside torch_npu's operators."""

from __future__ import annotations

import ctypes
import sys

import torch
import torch_npu

from torchtitan_npu import _C

F32, BF16, F16, BYTES = _C.DType.float32, _C.DType.bfloat16, _C.DType.float16, _C.DType.bytes
CARD = torch.device("npu", 0)
N = 4096


def busy(start: float) -> torch.Tensor:
    """A value that torch_npu's queue writes late: behind many products."""
    a = torch.eye(64, device=CARD)
    b = torch.full((64, 64), start, device=CARD)
    for _ in range(20):
        b = a @ b
    x = torch.empty(N, device=CARD)
    x.fill_(0.0)
    x.add_(b.flatten()[0])
    return x


def in_order(ordering: str) -> None:
    """Work of ours and torch's, alternating on one stream: each sees what the other did before."""
    queue = _C.NpuQueue(CARD, ordering)
    assert queue.ordering == ("drain" if ordering == "drain" else "queue")
    device = _C.AclDevice(CARD, queue)
    for repeat in range(20):
        x = busy(float(repeat))
        half = torch.empty(N, dtype=torch.bfloat16, device=CARD)
        device.cast(half.data_ptr(), BF16, x.data_ptr(), F32, N)
        doubled = half * 2
        device.add(x.data_ptr(), F32, doubled.data_ptr(), BF16, N)
        y = x + 1
        assert torch.equal(y.cpu(), torch.full((N,), 3.0 * repeat + 1)), (ordering, repeat, y)
        z = busy(1.0)
        device.zero(z.data_ptr(), z.nbytes)
        assert torch.equal((z + 5).cpu(), torch.full((N,), 5.0)), (ordering, repeat)


def raw() -> None:
    """Prints how often a call on the raw handle overtakes what torch has only queued."""
    acl = ctypes.CDLL("libascendcl.so")
    memset = acl.aclrtMemsetAsync
    memset.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int32, ctypes.c_size_t, ctypes.c_void_p]
    overtaken = 0
    for _ in range(20):
        z = busy(1.0)
        handle = torch_npu._C._npu_getCurrentRawStreamNoWait(0)
        assert memset(z.data_ptr(), z.nbytes, 0, z.nbytes, handle) == 0
        overtaken += int(not torch.equal((z + 5).cpu(), torch.full((N,), 5.0)))
    print(f"overtaken {overtaken}")


def numbers() -> None:
    """Casts, sums and zeros have the values that the host's own kernels have."""
    device, host = _C.AclDevice(CARD, _C.NpuQueue(CARD)), _C.HostDevice()
    types = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16}
    generator = torch.Generator().manual_seed(0)
    for src, src_type in types.items():
        for dst, dst_type in types.items():
            values = torch.randn(1001, generator=generator).to(src_type)
            got, want = torch.empty(1001, dtype=dst_type, device=CARD), torch.empty(1001, dtype=dst_type)
            device.cast(got.data_ptr(), dst, values.to(CARD).data_ptr(), src, 1001)
            host.cast(want.data_ptr(), dst, values.data_ptr(), src, 1001)
            assert torch.equal(got.cpu(), want), ("cast", src_type, dst_type)
    for wire, wire_type in types.items():
        for ranks in (1, 2, 3, 4, 7):
            for accumulate in (False, True):
                for missing in (None, 0):
                    for round_to in (F32, BF16):
                        parts = torch.randn(ranks, 501, generator=generator).to(wire_type)
                        before = torch.randn(501, generator=generator)
                        got, want = before.to(CARD), before.clone()
                        on_card = parts.to(CARD)
                        step = parts[0].nbytes

                        there = [r != missing for r in range(ranks)]
                        of_card = [on_card.data_ptr() + r * step if there[r] else 0 for r in range(ranks)]
                        of_host = [parts.data_ptr() + r * step if there[r] else 0 for r in range(ranks)]
                        more = {"wire": wire, "result": F32, "round_to": round_to}
                        more |= {"divisor": float(ranks), "accumulate": accumulate}
                        device.sum(got.data_ptr(), of_card, 501, **more)
                        host.sum(want.data_ptr(), of_host, 501, **more)
                        same = torch.allclose(got.cpu(), want, rtol=1e-6 if round_to == F32 else 1e-2, atol=1e-6)
                        assert same, (wire_type, ranks, accumulate, missing, round_to)
    packed = torch.arange(7, dtype=torch.uint8)
    got = torch.zeros(7, dtype=torch.uint8, device=CARD)
    device.cast(got.data_ptr(), BYTES, packed.to(CARD).data_ptr(), BYTES, 7)
    assert torch.equal(got.cpu(), packed)


if __name__ == "__main__":
    torch.npu.set_device(0)
    {"order": lambda: in_order(sys.argv[2]), "raw": raw, "numbers": numbers}[sys.argv[1]]()
    print("done")
