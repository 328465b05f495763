"""``torchtitan-npu simulate`` and ``doctor`` with torch_npu; torch_npu without CANN; numbers in its errors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from launch import NPU_PYTHON
from ports import free_port
from simulated import ROOT, Run, simulator_environment

CLI = ("-m", "torchtitan_npu.cli")


def run_cli(simulator: Path | None, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The command line, in an environment that knows nothing of a simulator unless ``simulator`` names it."""
    return subprocess.run(
        [NPU_PYTHON, *arguments],
        env=without_cann(**({} if simulator is None else {"TT_SIMULATOR_DIR": str(simulator)}), **more),
        capture_output=True,
        text=True,
        timeout=200,
    )


def without_cann(**more: str) -> dict[str, str]:
    environment = simulator_environment(Path("/nowhere"))
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH", "TT_SIMULATOR_DIR", "TT_SIM_MEMORY_MB"):
        environment.pop(name, None)
    environment.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    return environment | more


def test_import_survives_a_missing_cann() -> None:
    """And only that: ``import torch`` by itself raises there, as torch_npu wants it."""
    assert run_cli(None, "-c", "import torch").returncode != 0
    done = run_cli(
        None,
        "-c",
        """
import torchtitan_npu
import torch
assert not hasattr(torch, "npu") and torch.ones(2).sum() == 2
assert torchtitan_npu.FSDP is torchtitan_npu.FSDP
from torchtitan_npu.launch import Environment, LaunchError, choose_device
assert choose_device("auto", Environment()).type == "cpu"
try:
    choose_device("npu", Environment())
except LaunchError as error:
    print(error)
""",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: torch_npu is installed, but CANN's libascendcl.so cannot be found") == 1
    assert "parallel.device is auto and training is on the CPU: torch_npu is installed but not loaded" in done.stderr
    assert done.stdout.startswith(
        "parallel.device is npu, but torch_npu is installed but not loaded, because CANN was not found\n"
        "libascendcl.so was not found:"
    )
    assert "/usr/local/Ascend/ascend-toolkit/latest/lib64/libascendcl.so" in done.stdout


def test_what_the_user_says_about_plug_ins_counts() -> None:
    assert run_cli(None, "-c", "import torchtitan_npu, torch", TORCH_DEVICE_BACKEND_AUTOLOAD="1").returncode != 0


@pytest.mark.parametrize("variable", ["LD_LIBRARY_PATH", "ASCEND_HOME_PATH"])
def test_a_cann_that_is_there_is_left_alone(simulator: Path, variable: str) -> None:
    folder = simulator / "lib64" if variable == "LD_LIBRARY_PATH" else simulator
    program = "import os, torchtitan_npu; assert 'TORCH_DEVICE_BACKEND_AUTOLOAD' not in os.environ"
    done = run_cli(None, "-c", program, **{variable: str(folder)})
    assert done.returncode == 0, done.stderr


def test_simulate_gives_a_command_its_cards(simulator: Path) -> None:
    program = """
import torch
torch.npu.set_device(2)
print(torch.npu.device_count(), torch.npu.mem_get_info(2)[1] >> 20, torch.ones(3, device="npu").sum().item())
from torchtitan_npu.launch.simulated import is_simulated
assert is_simulated()
"""
    done = run_cli(simulator, *CLI, "simulate", "--npus", "3", "--memory_mb", "256", "--", "python", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "256", "3.0"]
    assert done.stderr.count("simulation: python runs on 3 simulated Ascend cards") == 1


def test_simulate_ends_as_its_command_does(simulator: Path) -> None:
    assert run_cli(simulator, *CLI, "simulate", "--", "sh", "-c", "exit 7").returncode == 7


def test_the_doctor_on_simulated_cards(simulator: Path) -> None:
    done = run_cli(simulator, *CLI, "simulate", "--npus", "2", "--", "python", *CLI, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["torch_npu", "2.13.0,", "belongs", "to", "torch", "2.13.0"] in lines
    assert any(line[:3] == ["card", "1", "simulated"] for line in lines)
    assert done.stdout.splitlines()[-1] == "2 simulated Ascend cards can be used"


def test_the_doctor_without_cann() -> None:
    done = run_cli(None, *CLI, "doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM: CANN: libascendcl.so was not found:" in done.stdout
    assert done.stdout.endswith("1 problem\n")
    assert "RuntimeWarning" not in done.stderr


def test_the_doctor_with_a_broken_cann(tmp_path: Path, simulator: Path) -> None:
    """Libraries that load and lack what torch_npu needs: the doctor survives its crash or error, and shows it."""
    (tmp_path / "lib64").mkdir()
    for library in (simulator / "lib64").glob("*.so"):
        # libgraph is an empty library; libascendcl, libhccl and libopapi stay, for the core.
        broken = "libgraph.so" if "op_compiler" in library.name else library.name
        (tmp_path / "lib64" / library.name).symlink_to(simulator / "lib64" / broken)
    (tmp_path / "lib64" / "libge_runner.so").unlink()
    done = run_cli(None, *CLI, "doctor", LD_LIBRARY_PATH=str(tmp_path / "lib64"))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "PROBLEM: torch_npu: " in done.stdout and "libge_runner.so" in done.stdout


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "1"}, "ASCEND_RT_VISIBLE_DEVICES=1 names 1 card(s), and 3 ranks"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0-1"}, "CANN reads numbers and commas only"),
        ({}, "3 ranks were started on this machine, which has 2 NPU(s); start torchrun with --nproc_per_node=2"),
    ],
)
def test_more_ranks_than_cards(run: Run, environment: dict[str, str], message: str) -> None:
    program = """
        import torch
        from torchtitan_npu.launch import Environment, choose_device
        choose_device("npu", Environment(rank=5, local_rank=2, world_size=6, local_world_size=3))
    """
    # CANN and the simulator end with errors of their own where the variable is wrong, if they come first.
    done = run(program, TT_SIM_NPUS="2", **environment)
    assert done.returncode != 0
    assert message in done.stderr, done.stderr


@pytest.mark.parametrize("queue", ["0", "1", "2"])
def test_an_operator_that_fails_on_the_card_is_explained(run: Run, queue: str) -> None:
    done = run(
        """
        import sys
        import torch
        from torchtitan_npu.launch import Environment, run_rank, setup_logging

        def main() -> int:
            x = torch.ones(8, 8, device="npu")
            (x @ x).cpu()
            return 0

        setup_logging(0, 1)
        sys.exit(run_rank(main, Environment()))
        """,
        TT_SIM_FAULT="operator:aclnnMatmul:1",
        TASK_QUEUE_ENABLE=queue,
    )
    assert done.returncode == 1, done.stderr
    assert "ERROR: unexpected RuntimeError: " in done.stderr
    assert "ERROR: ACL_ERROR_RT_AICORE_EXCEPTION (507015): an operator failed on the card" in done.stderr


def test_a_collective_that_notices_a_failed_card_first_does_not_blame_another_rank(run: Run) -> None:
    """What the engine raises then says nothing of the card: "current working operator name is HcclReduceScatter"."""
    done = run(
        """
        import sys
        import torch
        from torchtitan_npu import _C
        from torchtitan_npu.launch import Environment, run_rank, setup_logging

        def main() -> int:
            x = torch.ones(8, 8, device="npu")
            try:
                (x @ x).cpu()
            except RuntimeError:
                raise _C.PeerError("rank 0: the reduction of bucket 1 failed: a peer died, failed, or did not arrive")
            return 0

        setup_logging(0, 1)
        sys.exit(run_rank(main, Environment()))
        """,
        TT_SIM_FAULT="operator:aclnnMatmul:1",
    )
    assert done.returncode == 1, done.stderr
    assert "ERROR: this rank's card failed, which a collective noticed first: rank 0: the reduction" in done.stderr
    assert "ACL_ERROR_RT_AICORE_EXCEPTION (507015): an operator failed on the card" in done.stderr


CONFIG = """
model:
  {name: llama3_debug, dim: 48, n_layers: 2, n_heads: 4, n_kv_heads: 2, ffn_dim: 88, vocab_size: 61, max_seq_len: 32}
training: {batch_size: 2, seq_len: 32, learning_rate: 2e-3, max_steps: 2, log_interval: 1}
parallel: {dtype: fp32, device: npu}
"""


def train(simulator: Path, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Two ranks on two simulated cards, as a user starts them."""
    with open(folder / "data.jsonl", "w") as file:
        for document in range(20):
            tokens = [(document * 7 + position * 3) % 61 for position in range(40)]
            file.write(json.dumps({"tokens": tokens, "length": len(tokens)}) + "\n")
    (folder / "tiny.yaml").write_text(CONFIG)
    launch = ["torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), str(ROOT / "train.py")]
    paths = ["--config", folder / "tiny.yaml", "--data_dir", folder / "data.jsonl"]
    paths += ["--checkpoint_dir", folder / "checkpoints", "--log_dir", folder / "logs"]
    return run_cli(simulator, *CLI, "simulate", "--npus", "2", "--", *launch, *map(str, paths), **more)


def test_training_says_what_it_runs_on(simulator: Path, tmp_path: Path) -> None:
    """R51: the effective values, once. 2 x 32 x 48 x 4 bytes are less than one MiB."""
    done = train(simulator, tmp_path, HCCL_BUFFSIZE="16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("HCCL: 2 x 16 MiB of the card for each communicator (HCCL_BUFFSIZE)") == 1
    advice = "CANN's advice for HCCL_BUFFSIZE here: batch_size 2 x seq_len 32 x dim 48 x 4 bytes = 1 MiB; in effect: 16"
    assert done.stdout.count(advice) == 1
    assert "data-parallel degree 2, on simulated Ascend910B2 each" in done.stdout
    assert "[Step 2] loss=" in done.stdout


def test_a_variable_that_is_wrong_stops_training(simulator: Path, tmp_path: Path) -> None:
    done = train(simulator, tmp_path, HCCL_BUFFSIZE="200M")
    assert done.returncode != 0
    assert "ERROR: HCCL_BUFFSIZE=200M must be a whole number of MiB" in done.stderr
    assert "unexpected" not in done.stderr


def test_a_rank_that_does_not_come_is_named(simulator: Path, tmp_path: Path) -> None:
    """torch_npu's own message has no number there: "ACL stream synchronize failed."."""
    fault = "hccl_timeout:HcclAllGather:3:rank1"
    done = train(simulator, tmp_path, TT_SIM_FAULT=fault, HCCL_EXEC_TIMEOUT="4")
    assert done.returncode != 0
    assert "ERROR: stopped, because another rank is gone or did not come: " in done.stderr
    assert "ACL_ERROR_RT_FFTS_PLUS_TIMEOUT (507048)" in done.stderr
    assert "ERROR: unexpected" not in done.stderr


def test_the_console_script_is_this_package() -> None:
    """In the environment of `make test-npu`; a core that was compiled in place has none."""
    script = Path(NPU_PYTHON).parent / "torchtitan-npu"
    if not script.exists():
        pytest.skip("the package is not installed")
    done = subprocess.run([script], env=without_cann(), cwd="/", capture_output=True, text=True, timeout=60)
    assert "simulate  run a command on simulated Ascend cards" in done.stderr
