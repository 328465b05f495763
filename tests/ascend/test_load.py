"""The unmodified torch_npu loads with the simulator's libraries: no symbol is missing, and the first calls work."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest
from simulated import Run

LIBRARIES = ["lib/libtorch_npu.so", "lib/libtensorpipe.so", "lib/libnpu_profiler.so", "_C.*.so"]
# What CANN provides, and nothing that torch_npu's own libraries, torch or the C++ library could.
PREFIXES = ("acl", "rt", "Msprof", "Hccl", "ge::", "_ZN2ge", "_ZNK2ge", "tdt")


def torch_npu_folder() -> Path:
    spec = importlib.util.find_spec("torch_npu")
    assert spec is not None and spec.submodule_search_locations, "torch_npu is not installed in this environment"
    return Path(spec.submodule_search_locations[0])


def symbols(library: Path, *options: str) -> set[str]:
    listing = subprocess.run(
        ["nm", "-D", "--format=posix", *options, str(library)], check=True, capture_output=True, text=True
    )
    return {line.split()[0].split("@")[0] for line in listing.stdout.splitlines() if line}


def test_no_symbol_is_missing(simulator: Path) -> None:
    provided = set().union(*(symbols(library, "--defined-only") for library in (simulator / "lib64").glob("*.so")))
    folder = torch_npu_folder()
    needed: dict[str, str] = {}
    for pattern in LIBRARIES:
        found = list(folder.glob(pattern))
        assert found, f"{pattern} is not in {folder}"
        for library in found:
            undefined = symbols(library, "--undefined-only")
            needed |= {name: library.name for name in undefined if name.startswith(PREFIXES)}
    own = set().union(*(symbols(library, "--defined-only") for library in (folder / "lib").glob("*.so")))
    missing = {name: library for name, library in needed.items() if name not in provided | own}
    assert not missing, missing
    assert len(needed) >= 83, len(needed)


def test_every_library_that_is_named_exists(simulator: Path) -> None:
    for name in ("ascendcl", "hccl", "opapi", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel"):
        assert (simulator / "lib64" / f"lib{name}.so").exists(), name


@pytest.mark.parametrize("name", ["aclGetCompileopt", "aclSetCompileopt", "aclrtCtxSetSysParamOpt"])
def test_names_that_are_looked_up_in_the_compiler_library(run_well: Run, name: str) -> None:
    run_well(f"import ctypes, os\nctypes.CDLL(os.environ['ASCEND_HOME_PATH'] + '/lib64/libacl_op_compiler.so').{name}")


def test_torch_npu_imports_allocates_and_copies(run_well: Run) -> None:
    run_well(
        """
        import torch, torch_npu
        assert torch.npu.is_available() and torch.npu.device_count() == 2
        x = torch.empty(4, device="npu:1")
        x.copy_(torch.arange(4.0))
        y = torch.empty_like(x)
        y.copy_(x)
        assert y.cpu().tolist() == [0, 1, 2, 3]
        pinned = torch.empty(4).pin_memory()
        pinned.copy_(y, non_blocking=True)
        torch.npu.synchronize(1)
        assert pinned.tolist() == [0, 1, 2, 3]
        """,
        TT_SIM_NPUS="2",
    )


def test_a_card_that_is_full_is_an_out_of_memory_error(run_well: Run) -> None:
    run_well(
        """
        import torch, torch_npu
        held = torch.empty(40 << 20, dtype=torch.uint8, device="npu")
        try:
            torch.empty(40 << 20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as error:
            assert "64.00 MiB total capacity" in str(error), error
        else:
            raise AssertionError("no error")
        del held
        torch.empty(40 << 20, dtype=torch.uint8, device="npu")
        """,
        TT_SIM_MEMORY_MB="64",
    )
