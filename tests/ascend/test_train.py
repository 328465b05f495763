"""The trainer and the example on simulated cards: the CPU's losses, and checkpoints that move between the two."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launch import report, run_ranks
from ports import free_port
from simulated import HERE, ROOT, Run, simulator_environment

# Relative difference of a step's loss. fp32 differs in the order of sums; the others round at other places.
TOLERANCE = {"fp32": 2e-5, "bf16": 1e-2, "fp16": 2e-3}
MEMORY = "8192"  # MiB; every communicator takes 400


def torchrun(
    simulator: Path, ranks: int, *command: str, timeout: float = 280, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *command],
        env=simulator_environment(simulator, TT_SIM_MEMORY_MB=MEMORY, **environment),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_data(folder: Path) -> Path:
    """A text that can be learnt: words in a random order."""
    words = [list(f"word{i} ".encode()) for i in range(20)]
    choose = random.Random(0)
    documents = [sum((choose.choice(words) for _ in range(60)), []) for _ in range(30)]
    lines = [json.dumps({"tokens": tokens, "length": len(tokens)}) for tokens in documents]
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("ranks", "cases", "delay"),
    [
        (1, "fsdp:fp32,ddp:bf16", "1"),
        (2, "fsdp:fp32,fsdp:bf16,fsdp:fp16,ddp:fp32,ddp:bf16,ddp:fp16", "2"),
        (4, "fsdp:bf16,hsdp:bf16", "3"),
        (4, "fsdp:fp32:2,hsdp:bf16:2", "4"),
    ],
)
def test_losses_are_the_cpus(simulator: Path, tmp_path: Path, ranks: int, cases: str, delay: str) -> None:
    write_data(tmp_path)
    done = torchrun(
        simulator,
        ranks,
        str(HERE / "train_programs.py"),
        str(tmp_path),
        cases,
        TT_SIM_DELAY=delay,
        PYTHONWARNINGS="ignore",
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "simulated Ascend: rank" not in done.stderr, done.stderr[-4000:]
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [result["case"] for result in results] == cases.split(",")
    for result in results:
        cpu = result["cpu"]
        assert len(cpu) == 4 and cpu[3] < cpu[0], result
        for where in ("npu", "cpu then npu", "npu then cpu"):
            if where in result:
                limit = TOLERANCE[result["case"].split(":")[1]]
                assert result[where] == pytest.approx(cpu, rel=limit), (where, result)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_example_for_npus(simulator: Path, tmp_path: Path, ranks: int) -> None:
    """The walkthrough with its real names: init_process_group("hccl"), torch.npu.set_device, .npu(), 100 steps."""
    done = torchrun(
        simulator,
        ranks,
        str(ROOT / "examples" / "fsdp_on_npus.py"),
        "--small",
        "--checkpoint",
        str(tmp_path / "model.pt"),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    assert "simulated Ascend: rank" not in done.stderr, done.stderr[-4000:]
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 10 and losses[0] > 4 and losses[-1] < 0.3, done.stdout
    assert "loaded back: equal" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("model", "training", "dtype", "tp"),
    [
        ({}, {"batch_size": 6, "activation_checkpointing": "selective"}, "bf16", 1),
        ({"use_flash_attention": False, "n_layers": 4}, {"batch_size": 4}, "bf16", 1),
        (
            {"dim": 512, "ffn_dim": 1376, "n_layers": 3, "vocab_size": 8000},
            {"activation_checkpointing": True},
            "fp32",
            1,
        ),
        ({}, {"optimizer_state_offload": True, "optimizer_state_dtype": "bf16"}, "bf16", 1),
        ({"vocab_size": 8000}, {"batch_size": 6, "activation_checkpointing": "selective"}, "bf16", 2),
    ],
)
def test_planned_memory_is_what_tensors_take(
    simulator: Path, tmp_path: Path, model: dict[str, Any], training: dict[str, Any], dtype: str, tp: int
) -> None:
    """Within 5 %, on two cards: parameters, gradients, optimizer, arena and activations, against the most allocated."""
    write_data(tmp_path)
    config = {
        "model": {"name": "llama3_debug", "use_flash_attention": True} | model,
        "training": {"seq_len": 256, "learning_rate": 1e-3, "max_steps": 2, "batch_size": 2} | training,
        "parallel": {"dtype": dtype, "device": "npu", "tp_degree": tp},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # which is YAML, too
    paths = {"config": "config.yaml", "data_dir": "data.jsonl", "checkpoint_dir": "checkpoints", "log_dir": "logs"}
    flags = [word for flag, name in paths.items() for word in (f"--{flag}", str(tmp_path / name))]
    done = torchrun(simulator, 2, str(ROOT / "train.py"), *flags)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    planned = json.loads((tmp_path / "logs" / "plan.json").read_text())["memory_bytes"]["total"]
    last = json.loads((tmp_path / "logs" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["mem_allocated_bytes"] == pytest.approx(planned, rel=0.05)


def test_moments_on_the_host_stay_page_locked_through_a_load(run_well: Run) -> None:
    """With pageable ones every copy to the card would be waited for."""
    run_well(
        """
        import torch, torch_npu, torch.distributed as dist
        from torchtitan_npu import FSDP
        from torchtitan_npu.checkpoint.tensors import collect, distribute, initialize_optimizer_state
        from torchtitan_npu.train.stored_moments import StoredMomentsAdamW

        torch.npu.set_device(0)
        dist.init_process_group("cpu:gloo,npu:hccl", store=dist.HashStore(), rank=0, world_size=1)
        model = FSDP(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).npu())
        optimizer = StoredMomentsAdamW(
            model.parameters(), dtype=torch.float32, on_host=True, seed=0, lr=0.1, betas=(0.9, 0.99), fused=True
        )
        initialize_optimizer_state(optimizer)
        model(torch.ones(2, 8, device="npu")).sum().backward()
        optimizer.step()
        before = [state["exp_avg"].clone() for state in optimizer.state.values()]
        tensors = collect(model, optimizer, sharded=True)
        distribute(tensors, model, optimizer, sharded=True)
        states = list(optimizer.state.values())
        assert len(states) == 4
        for state, moment in zip(states, before):
            assert torch.equal(state["exp_avg"], moment) and moment.abs().sum() > 0
            moments = [state["exp_avg"], state["exp_avg_sq"]]
            assert all(moment.device.type == "cpu" and moment.is_pinned() for moment in moments)
        """
    )


# What goes wrong on rank 1 in the middle of training; what its own log must say, and what rank 0's.
FAULTS = {
    "operator": ("operator:aclnnSwiGlu:30:rank1", "ACL_ERROR_RT_AICORE_EXCEPTION", "rank 1"),
    "out of memory": ("oom:4:rank1", "the card has no memory left", "HCCL_E_REMOTE"),
    # Whichever notices first: the engine, or the exchange of losses, where Gloo does not say which rank it was.
    "dead peer": ("peer_death:900:rank1", "", "rank 1 died|another rank is gone"),
    "collective": ("hccl_timeout:20:rank1", "", "TIMEOUT"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_fault_ends_all_ranks_with_its_cause(simulator: Path, tmp_path: Path, fault: str) -> None:
    setting, cause, seen_by_peer = FAULTS[fault]
    write_data(tmp_path)
    command = [str(ROOT / "train.py"), "--config", str(ROOT / "examples" / "llama3_debug.yaml")]
    command += ["--data_dir", str(tmp_path / "data.jsonl"), "--checkpoint_dir", str(tmp_path / "checkpoints")]
    command += ["--log_dir", str(tmp_path / "logs"), "--parallel.device", "npu", "--model.n_layers", "2"]
    command += ["--training.batch_size", "1", "--training.seq_len", "64", "--training.max_steps", "1000"]
    # Without torchrun, which would end the other rank itself. What still runs after the timeout is killed (-9).
    ranks = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    first, second = run_ranks(
        command,
        2,
        timeout=120,
        fail=False,
        TT_SIM_FAULT=setting,
        HCCL_EXEC_TIMEOUT="8",
        TT_SIM_MEMORY_MB=MEMORY,
        **ranks,
    )
    both = report([first, second])
    assert first.returncode == 1, both
    assert second.returncode == (-9 if fault == "dead peer" else 1), both
    assert second.seconds < 120, both  # it ended by itself
    assert cause.lower() in second.output.lower(), both
    assert "ERROR" in first.output and re.search(seen_by_peer, first.output), both
