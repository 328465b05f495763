"""Numbers in errors of torch_npu (R56), and how a rank that meets one ends. The texts were made on simulated cards."""

from __future__ import annotations

import logging

import pytest

from torchtitan_npu.launch import Environment, run_rank
from torchtitan_npu.launch.npu_errors import explain_codes, is_collective_failure

OPERATOR = """\
operator():../third_party/op-plugin/op_plugin/ops/opapi/AddKernelNpuOpApi.cpp:70 NPU function error: call aclnnAdd \
failed, error code is 507015
[ERROR] 2026-11-30-03:14:48 (PID:28706, Device:0, RankID:-1) ERR00100 PTA call acl api failed
[Error]: The aicore execution is abnormal.
        Rectify the fault based on the error information in the ascend log."""
DEVICE = """\
ExchangeDevice:../torch_npu/csrc/core/npu/sys_ctrl/npu_sys_ctrl.cpp:337 NPU function error: \
c10_npu::SetDevice(device), error code is 107001
[ERROR] 2026-11-30-03:15:34 (PID:29355, Device:0, RankID:-1) ERR00100 PTA call acl api failed"""
PEER = """\
npuSynchronizeDevice:../torch_npu/csrc/core/npu/NPUStream.cpp:748 NPU function error: \
AclrtSynchronizeDeviceWithTimeout, error code is 507048
[ERROR] 2026-11-30-03:16:26 (PID:30036, Device:0, RankID:0) ERR00100 PTA call acl api failed"""
HCCL = "HCCL function error: HcclCommInitRootInfo(numRanks, &rootInfo, rank, &comm), error code is 9"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (OPERATOR, ["ACL_ERROR_RT_AICORE_EXCEPTION (507015)"]),
        (DEVICE, ["ACL_ERROR_RT_INVALID_DEVICEID (107001)"]),
        (HCCL, ["HCCL_E_TIMEOUT (9)"]),
        ("NPU error,NPU error code is:507046", ["ACL_ERROR_RT_STREAM_SYNC_TIMEOUT (507046)"]),
        ("HCCL watchdog: errorCode = [21]", ["HCCL_E_REMOTE (21)"]),
        (f"{OPERATOR}\n{HCCL}\n{OPERATOR}", ["ACL_ERROR_RT_AICORE_EXCEPTION (507015)", "HCCL_E_TIMEOUT (9)"]),
        ("error code is 999999", ["code 999999 of AscendCL, which is not known here"]),
        # Not of any table that we have, and numbers that are no codes.
        ("cuDNN error code is 9", []),
        ("error code is 0", []),
        ("507015 files, barcode is 507015", []),
        ("", []),
    ],
)
def test_codes_are_explained(message: str, expected: list[str]) -> None:
    lines = explain_codes(message).splitlines()
    assert len(lines) == len(expected)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)


def test_what_is_explained_already_is_not_explained_again() -> None:
    """Our own errors carry the explanation."""
    assert explain_codes(f"{OPERATOR}\n{explain_codes(OPERATOR)}") == ""


@pytest.mark.parametrize(("message", "expected"), [(PEER, True), (HCCL, True), (OPERATOR, False), ("gloo", False)])
def test_failures_that_another_rank_caused(message: str, expected: bool) -> None:
    assert is_collective_failure(message) is expected


def test_a_rank_that_meets_a_code_says_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    def main() -> int:
        raise RuntimeError(OPERATOR)

    logger = logging.getLogger("torchtitan_npu")
    propagate, logger.propagate = logger.propagate, True
    try:
        assert run_rank(main, Environment()) == 1
    finally:
        logger.propagate = propagate
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith("unexpected RuntimeError: operator()")
    assert last.startswith("ACL_ERROR_RT_AICORE_EXCEPTION (507015)") and "ASCEND_LAUNCH_BLOCKING=1" in last
