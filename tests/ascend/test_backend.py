"""The Ascend backend below the engine, on a simulated card beside the unmodified torch_npu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from in_process import use_simulator
from simulated import HERE, ROOT, Run, simulator_environment

use_simulator()
import torch  # noqa: E402, F401  (the native core needs its libraries)

from torchtitan_npu import _C  # noqa: E402

QUEUES = ["0", "1", "2"]  # TASK_QUEUE_ENABLE


def run_program(simulator: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(HERE / "backend_programs.py"), *arguments],
        env=simulator_environment(simulator, **environment),
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("ordering", ["queue", "drain"])
def test_submissions_keep_the_order_of_torch(simulator: Path, queue: str, ordering: str) -> None:
    done = run_program(simulator, "order", ordering, TASK_QUEUE_ENABLE=queue, TT_SIM_DELAY="5")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("queue", ["1", "2"])
def test_a_raw_submission_would_be_seen(simulator: Path, queue: str) -> None:
    """The danger is real, and these tests would notice it: the same program with a raw call gives wrong numbers."""
    done = run_program(simulator, "raw", TASK_QUEUE_ENABLE=queue, TT_SIM_CHECKS="report")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"overtaken (\d+)", done.stdout)
    assert found and int(found[1]) > 0, done.stdout


def test_numbers_are_the_hosts(simulator: Path) -> None:
    done = run_program(simulator, "numbers")
    assert done.returncode == 0, done.stdout + done.stderr


def test_codes_have_the_names_of_the_headers() -> None:
    import importlib.util

    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "include" / "third_party"
    named: dict[int, set[str]] = {}
    for header in [*(include / "acl" / "inc" / "acl").rglob("*.h")]:
        text = header.read_text(errors="replace")
        for name, code in re.findall(r"(ACL_ERROR_\w+)\s*=?\s*(\d+)", text):
            named.setdefault(int(code), set()).add(name)
    checked = 0
    for code, names in named.items():
        said = _C.explain_acl(code)
        if "not known here" not in said:
            assert said.split(" ")[0] in names, (said, names)
            checked += 1
    assert checked >= 15
    text = (include / "hccl" / "inc" / "hccl" / "hccl_types.h").read_text(errors="replace")
    for name, code in re.findall(r"(HCCL_E_\w+)\s*=\s*(\d+)", text):
        said = _C.explain_hccl(int(code))
        assert "not known here" in said or said.startswith(f"{name} ("), said


def test_our_declarations_are_the_wheels(tmp_path: Path) -> None:
    """Types and constants of csrc/ascend/abi.h against the wheel's headers; aclnn's are not in the wheel."""
    import importlib.util

    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.submodule_search_locations
    include = Path(spec.submodule_search_locations[0]) / "include" / "third_party"
    source = tmp_path / "declarations.cpp"
    source.write_text(
        """
#include <type_traits>
#include <acl/acl.h>
#include <hccl/hccl.h>
#define HcclRootInfo OurRootInfo
#define HcclDataType OurHcclDataType
#define HcclReduceOp OurHcclReduceOp
#define HcclComm OurComm
#include "ascend/abi.h"
#undef HcclRootInfo
#undef HcclDataType
#undef HcclReduceOp
#undef HcclComm
namespace ours = tt::ascend;
static_assert(sizeof(ours::OurRootInfo) == sizeof(HcclRootInfo));
static_assert(ours::kAclFloat == ACL_FLOAT && ours::kAclFloat16 == ACL_FLOAT16 && ours::kAclUInt8 == ACL_UINT8);
static_assert(ours::kAclDouble == ACL_DOUBLE && ours::kAclBFloat16 == ACL_BF16 && ours::kAclFormatNd == ACL_FORMAT_ND);
static_assert(ours::kHcclInt8 == HCCL_DATA_TYPE_INT8 && ours::kHcclFloat16 == HCCL_DATA_TYPE_FP16);
static_assert(ours::kHcclFloat32 == HCCL_DATA_TYPE_FP32 && ours::kHcclInt64 == HCCL_DATA_TYPE_INT64);
static_assert(ours::kHcclFloat64 == HCCL_DATA_TYPE_FP64 && ours::kHcclBFloat16 == HCCL_DATA_TYPE_BFP16);
static_assert(ours::kHcclSum == HCCL_REDUCE_SUM && sizeof(HcclResult) == sizeof(ours::HcclStatus));
// An argument is passed alike: the same size, and both pointers, both integers or enumerations.
template <typename A, typename B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>;
template <typename A, typename B>
struct Same : std::false_type {};
template <typename R, typename... A, typename S, typename... B>
struct Same<R(A...), S(B...)>
    : std::bool_constant<sizeof...(A) == sizeof...(B) && alike<R, S> && (alike<A, B> && ...)> {};
#define CHECK(result, name, arguments) static_assert(Same<decltype(::name), result arguments>::value, #name);
namespace tt::ascend {
#define HcclRootInfo OurRootInfo
#define HcclDataType OurHcclDataType
#define HcclReduceOp OurHcclReduceOp
#define HcclComm OurComm
TT_ASCENDCL_FUNCTIONS(CHECK)
TT_HCCL_FUNCTIONS(CHECK)
}
int main() {}
"""
    )
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}"]
    command += [f"-I{folder}" for folder in (include.parent, include / "acl" / "inc", include / "hccl" / "inc")]
    command.append(str(source))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def test_aclnn_declarations_are_the_tables() -> None:
    table = {}
    for line in (ROOT / "simulator" / "opapi" / "aclnn_signatures.tsv").read_text().splitlines():
        if not line.startswith("#"):
            name, _, types = line.partition("\t")
            table[name] = types.split()
    text = (ROOT / "csrc" / "ascend" / "abi.h").read_text()
    letters = {"AclTensor*": "T", "AclScalar*": "S", "AclIntArray*": "IA", "bool": "bool", "AclDataType": "dtype"}
    found = re.findall(r"X\(AclStatus, (aclnn\w+)GetWorkspaceSize,\s*\(([^)]*)\)\)", text.replace("\\\n", " "))
    assert len(found) >= 3
    for name, arguments in found:
        types = [re.sub(r"\bconst\b|\w+$", "", part.strip()).replace(" ", "") for part in arguments.split(",")]
        assert [letters[t] for t in types[:-2]] == table[name], name


def test_without_cann_the_message_says_what_is_missing(run: Run) -> None:
    program = """
        import torch
        from torchtitan_npu import _C
        from torchtitan_npu.launch import Environment, choose_device
        missing = _C.missing_from_cann()
        assert "libascendcl.so" in missing and "libhccl.so" in missing and "libopapi.so" in missing, missing
        assert "/somewhere/lib64" in missing, missing
        assert choose_device("auto", Environment()).type == "cpu"
        try:
            choose_device("npu", Environment())
        except RuntimeError as error:
            assert "libascendcl.so" in str(error) and "/somewhere/lib64" in str(error), error
        else:
            raise AssertionError("no error")
    """
    done = run(program, TORCH_DEVICE_BACKEND_AUTOLOAD="0", LD_LIBRARY_PATH="", ASCEND_HOME_PATH="/somewhere")
    assert done.returncode == 0, done.stdout + done.stderr
