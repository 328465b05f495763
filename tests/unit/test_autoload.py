"""When ``import torchtitan_npu`` switches torch's plug-ins off: torch_npu is there and CANN is not.

With a package in torch_npu's place that only raises; tests/ascend has the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
{before}
import torchtitan_npu
print(os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD"), "torch_npu" in sys.modules, "torch" in sys.modules)
"""


@pytest.fixture
def torch_npu(tmp_path: Path) -> Path:
    (tmp_path / "site" / "torch_npu").mkdir(parents=True)
    (tmp_path / "site" / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so')")
    return tmp_path / "site"


def run(site: Path | None, before: str = "", **more: str) -> list[str]:
    hidden = ("TORCH_DEVICE_BACKEND_AUTOLOAD", "LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    paths = [str(site)] if site else []
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        env=environment | more,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def has_cann() -> bool:
    return any(Path(root, "lib64", "libascendcl.so").exists() for root in Path("/usr/local/Ascend").glob("*"))


@pytest.mark.skipif(has_cann(), reason="this machine has CANN")
def test_without_cann_plug_ins_are_off(torch_npu: Path) -> None:
    """And neither torch_npu nor torch is imported to find that out."""
    assert run(torch_npu) == ["0", "False", "False"]


def test_without_torch_npu_nothing_is_changed() -> None:
    if run(None, before="import importlib.util as u; print(u.find_spec('torch_npu') is not None)")[0] == "True":
        pytest.skip("torch_npu is installed here")
    assert run(None) == ["None", "False", "False"]


@pytest.mark.parametrize("text", ["0", "1", ""])
def test_what_the_user_has_set_stays(torch_npu: Path, text: str) -> None:
    assert run(torch_npu, TORCH_DEVICE_BACKEND_AUTOLOAD=text)[:1] == ([text] if text else ["False"])


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
def test_with_cann_nothing_is_changed(torch_npu: Path, tmp_path: Path, variable: str) -> None:
    libraries = tmp_path / "cann" / "lib64"
    libraries.mkdir(parents=True)
    (libraries / "libascendcl.so").touch()
    folder = libraries if variable == "LD_LIBRARY_PATH" else libraries.parent
    assert run(torch_npu, **{variable: str(folder)}) == ["None", "False", "False"]


def test_where_torch_is_imported_already_nothing_is_changed(torch_npu: Path) -> None:
    """torch's plug-ins have been loaded by then."""
    before = "import types; sys.modules['torch'] = types.ModuleType('torch')"
    assert run(torch_npu, before=before) == ["None", "False", "True"]


@pytest.mark.skipif(has_cann(), reason="this machine has CANN")
def test_other_programs_get_the_users_environment(torch_npu: Path) -> None:
    program = """
from torchtitan_npu import _autoload
assert _autoload.switched_off and os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in _autoload.environment_of_the_user()
"""
    run(torch_npu, before=program)


def test_looking_at_the_environment_loads_no_torch() -> None:
    """``doctor`` must work where torch does not."""
    program = "import torchtitan_npu.launch.doctor; from torchtitan_npu.launch import read_timeouts, setup_logging"
    assert run(None, before=program, TORCH_DEVICE_BACKEND_AUTOLOAD="0")[-1] == "False"
