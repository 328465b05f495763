"""The installed package: what an import costs, what it exposes, and which files came with it."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torchtitan_npu

PACKAGE = Path(torchtitan_npu.__file__).parent
SOURCES = Path(__file__).resolve().parents[2] / "python" / "torchtitan_npu"
DISTRIBUTION = importlib.metadata.distribution("torchtitan-npu")


def run_python(source: str) -> str:
    """Output of ``source`` in a fresh interpreter."""
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def is_editable() -> bool:
    return bool(json.loads(DISTRIBUTION.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"))


def test_import_loads_one_module() -> None:
    """The cost of the import is one small module besides the standard library's: no torch, no core, nothing else."""
    out = run_python(
        """
import json, sys
before = set(sys.modules)
import torchtitan_npu
new = {name for name in set(sys.modules) - before if name.partition(".")[0] not in sys.stdlib_module_names}
print(json.dumps(sorted(new)))
"""
    )
    assert json.loads(out) == ["torchtitan_npu"]


def test_fsdp_needs_no_npu_library_and_patches_nothing() -> None:
    """None in sys.modules makes an import of that name fail, as on a machine without it."""
    out = run_python(
        """
import sys
sys.modules["torch_npu"] = sys.modules["transformers"] = None
import torch
owners = (torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.distributed.ProcessGroup)
before = [dict(vars(owner)) for owner in owners]
from torchtitan_npu import FSDP, MixedPrecisionPolicy, StateDictType
import torchtitan_npu.checkpoint, torchtitan_npu.models, torchtitan_npu.train
for owner, old in zip(owners, before):
    new = vars(owner)
    changed = sorted(key for key in {*old, *new} if old.get(key) is not new.get(key))
    assert not changed, (owner, changed)
print("torchtitan_npu._C" in sys.modules, hasattr(torch, "npu"))
"""
    )
    assert out.split() == ["True", "False"]


def test_version_is_the_distributions() -> None:
    assert torchtitan_npu.__version__ == DISTRIBUTION.version


def test_public_names() -> None:
    assert {"FSDP", "MixedPrecisionPolicy", "StateDictType", "fully_shard"} <= set(torchtitan_npu.__all__)
    for name in torchtitan_npu.__all__:
        assert getattr(torchtitan_npu, name) is not None
        assert name in dir(torchtitan_npu)
    with pytest.raises(AttributeError, match="torchtitan_npu.*'FSPD'"):
        torchtitan_npu.FSPD  # noqa: B018


def test_console_script() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="torchtitan-npu")
    from torchtitan_npu.cli import main

    assert script.load() is main


def test_type_information_is_installed() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_C.pyi").is_file()
    assert (PACKAGE / "_data.pyi").is_file()


Signatures = dict[str, dict[str, "list[str] | None"]]
"""Per class ("" is the module): each public member; of functions, the names of the arguments."""


def signatures_of_stub(name: str) -> Signatures:
    def members(body: list[ast.stmt]) -> dict[str, list[str] | None]:
        found: dict[str, list[str] | None] = {}
        for node in body:
            if isinstance(node, ast.ClassDef):
                found[node.name] = None
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = None
            elif isinstance(node, ast.FunctionDef):
                is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
                names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs) if a.arg != "self"]
                found[node.name] = None if is_property else names
        return {name: arguments for name, arguments in found.items() if not name.startswith("_")}

    module = ast.parse((PACKAGE / f"{name}.pyi").read_text(encoding="utf-8"))
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return {"": members(module.body)} | {node.name: members(node.body) for node in classes}


def signatures_of_module(name: str) -> Signatures:
    """From the first line of pybind11's docstrings: ``name(self: Type, first: int, second: bool = True) -> None``."""
    module = importlib.import_module(f"torchtitan_npu.{name}")

    def members(owner: object) -> dict[str, list[str] | None]:
        found: dict[str, list[str] | None] = {}
        for name, value in vars(owner).items():
            if not name.startswith("_"):
                value = value.__func__ if isinstance(value, staticmethod) else value
                line = (getattr(value, "__doc__", None) or "").strip().partition("\n")[0]
                is_function = callable(value) and not isinstance(value, type) and line.startswith(f"{name}(")
                names = re.findall(r"[(,] ?(\w+): ", line) if is_function else None
                found[name] = names if names is None else [n for n in names if n != "self"]
        return found

    classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
    return {"": members(module)} | {name: members(value) for name, value in classes.items()}


@pytest.mark.parametrize("module", ["_C", "_data"])
def test_stub_says_what_the_module_has(module: str) -> None:
    native, stub = signatures_of_module(module), signatures_of_stub(module)
    if module == "_C":
        assert native["Engine"]["hook_outputs"] == ["unit", "outputs"]
        assert native["HostDevice"]["available_isas"] == []
    else:
        assert native[""]["jsonl_rows"] == ["tokens", "lengths"]
    assert set(stub) == set(native)
    for name in native:
        assert stub[name] == native[name], name


def test_preparing_and_indexing_need_no_torch(tmp_path: Path) -> None:
    """None in sys.modules makes the import of that name fail."""
    (tmp_path / "in.txt").write_text("hello\n")
    out = run_python(
        f"""
import sys
sys.modules["torch"] = None
from torchtitan_npu.cli_prepare import main
from torchtitan_npu.data import open_dataset
for name in ("out.jsonl", "out.bin"):
    out = {str(tmp_path)!r} + "/" + name
    assert main(["--input", {str(tmp_path / "in.txt")!r}, "--output", out, "--tokenizer", "byte"]) == 0
    print(open_dataset(out, 259).read(0).tolist())
print([name for name in sys.modules if name.endswith("._C")])
"""
    )
    assert out.split("\n")[:3] == ["[256, 104, 101, 108, 108, 111]"] * 2 + ["[]"]


@pytest.mark.skipif(is_editable(), reason="editable installation: the files are the source tree's")
def test_wheel_contents() -> None:
    """The wheel holds the package, the core and the metadata, and nothing of the C++ sources, tests and tools; nor the
    simulator, which only `-C cmake.define.TT_SIMULATOR=ON` puts into torchtitan_npu/_simulator.
    """
    files = [str(file) for file in DISTRIBUTION.files or [] if "__pycache__" not in str(file)]
    assert {file.partition("/")[0] for file in files} - {".."} == {
        "torchtitan_npu",
        f"torchtitan_npu-{torchtitan_npu.__version__}.dist-info",
    }
    package = {file for file in files if file.startswith("torchtitan_npu/")}
    cores = {file for file in package if file.endswith(".so")}
    assert sorted(Path(core).name.partition(".")[0] for core in cores) == ["_C", "_data"]
    wanted = {
        f"torchtitan_npu/{path.relative_to(SOURCES)}"
        for path in SOURCES.rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert {file for file in package if not file.endswith(".so")} == wanted
    assert not any("_simulator" in file for file in files)
    assert any(file.endswith("/LICENSE") for file in files)
