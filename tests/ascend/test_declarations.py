"""Our own declarations agree with the headers of the torch_npu wheel: functions' types, values, sizes, offsets.

Two programs are compiled from one text, one with our header and one with the wheel's, and what they print is compared.
What is printed is taken from our header: everything in it must be known to the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from simulated import ROOT
from test_load import torch_npu_folder

# Our header -> the wheel's
HEADERS = {
    "acl.h": ["acl/acl.h", "acl/acl_op_compiler.h"],
    "hccl.h": ["hccl/hccl.h"],
    "profiling.h": ["profiling/aprof_pub.h", "torch_npu/csrc/inductor/mlir/hacl_rt.h"],
}
# The wheel has one field without names for these.
NOT_IN_THE_WHEEL = {"hccl.h": {f"HcclCommConfig.{field}" for field in ("size", "magic", "version", "reserved")}}

PROGRAM = r"""
@INCLUDES@
#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>
#include <typeinfo>

template <typename T> constexpr const char* known = nullptr;
@NAMES@

template <typename T> struct Describe {
  static std::string text() {
    if constexpr (known<T> != nullptr) return known<T>;
    else if constexpr (std::is_enum_v<T>) return "enum";
    else if constexpr (std::is_class_v<T>) return "class";
    else return typeid(T).name();
  }
};
template <typename T> struct Describe<const T> { static std::string text() { return "const " + Describe<T>::text(); } };
template <typename T> struct Describe<T*> { static std::string text() { return Describe<T>::text() + "*"; } };
template <typename R, typename... A> struct Describe<R(A...)> {
  static std::string text() { return Describe<R>::text() + "(" + ((Describe<A>::text() + ", ") + ... + "") + ")"; }
};
template <typename R, typename... A> struct Describe<R(A..., ...)> {
  static std::string text() { return Describe<R>::text() + "(" + ((Describe<A>::text() + ", ") + ... + "...)"); }
};

int main() {
@BODY@
}
"""


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*", "", text)


def questions(header: Path) -> tuple[str, str, int]:
    """Specialisations of `known`, statements that print, and how many there are."""
    text = without_comments(header.read_text())
    left_out = NOT_IN_THE_WHEEL.get(header.name, set())
    types = re.findall(r"^(?:enum|struct) (\w+)", text, flags=re.M)
    names = [f'template <> constexpr const char* known<{name}> = "{name}";' for name in dict.fromkeys(types)]
    body = []
    for name, values in re.findall(r"^enum (\w+)[^{;]*\{(.*?)\};", text, flags=re.M | re.S):
        body.append(f'std::printf("sizeof {name} %zu\\n", sizeof({name}));')
        body += [
            f'std::printf("{value} %lld\\n", static_cast<long long>({value}));'
            for value in re.findall(r"(\w+)\s*=", values)
        ]
    for name, fields in re.findall(r"^struct (\w+) \{(.*?)^\};", text, flags=re.M | re.S):
        body.append(f'std::printf("sizeof {name} %zu\\n", sizeof({name}));')
        for field in re.findall(r"(\w+)(?:\[[^\]]*\])*(?:\s*=\s*[^;]*)?;", fields):
            body.append(f'std::printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
    body += [
        f'std::printf("{name} %lld\\n", static_cast<long long>({name}));'
        for name in re.findall(r"^constexpr \w+ (\w+) =", text, flags=re.M)
    ]
    functions = re.findall(r"^\w[\w ]*[ *]+(\w+)\([^;{]*\);", text[text.index('extern "C"') :], flags=re.M)
    body += [f'std::printf("{name} %s\\n", Describe<decltype({name})>::text().c_str());' for name in functions]
    body = [line for line in body if not any(f'"{name} ' in line for name in left_out)]
    return "\n".join(names), "\n".join(body), len(functions)


def output(program: str, folder: Path, name: str, include: list[Path]) -> list[str]:
    source, binary = folder / f"{name}.cpp", folder / name
    source.write_text(program)
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-w", *(f"-isystem{path}" for path in include)]
    compiled = subprocess.run([*command, str(source), "-o", str(binary)], capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[:5000]
    return subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("header", HEADERS)
def test_declarations_agree_with_the_wheel(tmp_path: Path, header: str) -> None:
    ours = ROOT / "simulator" / "abi" / header
    names, body, functions = questions(ours)
    assert functions > 5 and body.count("\n") >= functions
    program = PROGRAM.replace("@NAMES@", names).replace("@BODY@", body)
    theirs = torch_npu_folder() / "include"
    include = [theirs, theirs / "third_party" / "acl" / "inc", theirs / "third_party" / "hccl" / "inc"]
    includes = "\n".join(f'#include "{name}"' for name in HEADERS[header])
    wheel = output(program.replace("@INCLUDES@", includes), tmp_path, "wheel", include)
    own = output(program.replace("@INCLUDES@", f'#include "abi/{header}"'), tmp_path, "own", [ROOT / "simulator"])
    assert own == wheel, [pair for pair in zip(own, wheel, strict=True) if pair[0] != pair[1]]


def test_a_wrong_declaration_is_seen(tmp_path: Path) -> None:
    """The comparison itself: one argument type, one value and one field of a copy are changed."""
    text = (ROOT / "simulator" / "abi" / "acl.h").read_text()
    wrong = text
    for right, other in [
        ("aclError aclrtFree(void* devPtr)", "aclError aclrtFree(const void* devPtr)"),
        ("ACL_BF16 = 27", "ACL_BF16 = 28"),
        ("uint32_t pageSize;", "uint64_t pageSize;"),
    ]:
        assert right in wrong
        wrong = wrong.replace(right, other)
    names, body, _ = questions(ROOT / "simulator" / "abi" / "acl.h")
    program = PROGRAM.replace("@NAMES@", names).replace("@BODY@", body).replace("@INCLUDES@", '#include "acl.h"')
    results = []
    for name, content in (("right", text), ("wrong", wrong)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "acl.h").write_text(content)
        results.append(output(program, tmp_path / name, name, [tmp_path / name]))
    changed = {one.split(" ")[0] for one, two in zip(*results, strict=True) if one != two}
    assert {"aclrtFree", "ACL_BF16", "aclrtPtrAttributes.rsv"} <= changed, changed
