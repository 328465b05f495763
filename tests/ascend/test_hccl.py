"""The simulated HCCL against numpy, and what it says when a program or a peer goes wrong."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from launch import NPU_PYTHON, report, run_ranks
from ports import free_port

PROGRAMS = str(Path(__file__).with_name("hccl_programs.py"))


def run(tmp_path: Path, ranks: int, *arguments: str, **more):
    more.setdefault("HCCL_BUFFSIZE", "1")
    return run_ranks([PROGRAMS, *arguments], ranks, TT_TEST_DIR=str(tmp_path), **more)


def seconds_of(output: str) -> float:
    found = re.search(r"seconds: ([\d.]+)", output)
    assert found, output
    return float(found[1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("program", ["reductions", "moves"])
def test_collectives(tmp_path, ranks, program):
    run(tmp_path, ranks, program)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_point_to_point(tmp_path, ranks):
    run(tmp_path, ranks, "point_to_point")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_subgroups(tmp_path, ranks):
    run(tmp_path, ranks, "subgroups")


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("program", ["moves", "point_to_point", "streams", "two_communicators"])
def test_random_delays(tmp_path, program, seed):
    run(tmp_path, 3, program, TT_SIM_DELAY=str(seed), timeout=120)


def test_operations_of_two_streams_run_in_their_order(tmp_path):
    run(tmp_path, 4, "streams")


def test_two_communicators_at_the_same_time(tmp_path):
    run(tmp_path, 4, "two_communicators")


def test_operations_of_two_streams_without_an_order_are_reported(tmp_path):
    results = run(tmp_path, 2, "unordered_streams", fail=False)
    assert all(result.returncode != 0 for result in results), report(results)
    assert all("HcclAllReduce" in result.output for result in results), report(results)


def test_wrong_arguments(tmp_path):
    run(tmp_path, 2, "arguments")


def test_communicators_take_card_memory(tmp_path):
    run(tmp_path, 2, "buffers", HCCL_BUFFSIZE="200")


def test_no_room_for_a_communicator(tmp_path):
    results = run(tmp_path, 2, "connect", "", HCCL_BUFFSIZE="3000", HCCL_CONNECT_TIMEOUT="3", fail=False)
    assert all("-> 24" in result.output and "HCCL_BUFFSIZE" in result.output for result in results), report(results)


def test_all_cards_in_one_process(tmp_path):
    run(tmp_path, 1, "one_process")


@pytest.mark.parametrize(
    "kind, words",
    [
        ("operation", ["rank 0 calls HcclAllGather(count 4, fp32)", "rank 1 calls HcclAllReduce(count 4, fp32, sum)"]),
        ("count", ["rank 0 calls HcclAllReduce(count 4, fp32, sum)", "rank 1 calls HcclAllReduce(count 5, fp32, sum)"]),
        ("type", ["count 4, fp32, sum", "count 4, int32, sum"]),
        ("reduction", ["count 4, fp32, sum", "count 4, fp32, max"]),
        ("root", ["rank 0 calls HcclBroadcast(count 4, fp32, root 0)", "HcclBroadcast(count 4, fp32, root 1)"]),
        ("counts", ["rank 0 calls HcclAllGatherV", "rank 1 calls HcclAllGatherV"]),
        ("all to all", ["rank 1 sends 3 elements to rank 0, which expects 2"]),
        ("send", ["rank 1 sends 4 fp32 to rank 0", "rank 0 receives 3 fp32 from rank 1"]),
        ("both send", ["sends 4 fp32", "both wait for ever"]),
        ("both receive", ["receives 4 fp32", "both wait for ever"]),
        ("send and collective", ["rank 1 sends 4 fp32 to rank 0, while rank 0 calls HcclBarrier"]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("checks", ["report", "abort"])
def test_mismatch_is_an_error_on_all_ranks(tmp_path, kind, words, checks):
    begin = time.monotonic()
    results = run(tmp_path, 2, "mismatch", kind, fail=False, TT_SIM_CHECKS=checks)
    assert time.monotonic() - begin < 20
    for result in results:
        assert result.returncode == (3 if checks == "report" else -6) or kind == "send and collective", report(results)
        assert result.returncode != 0, report(results)
        for word in words:
            assert word in result.output, report(results)


@pytest.mark.parametrize(
    "kind, word",
    [("killed", "died"), ("killed later", "died"), ("exits", "destroyed its"), ("destroys", "destroyed its")],
)
def test_peer_that_is_gone(tmp_path, kind, word):
    results = run(tmp_path, 3, "waits", kind, fail=False)
    for rank in (0, 2):
        output = results[rank].output
        assert results[rank].returncode == 0, report(results)
        assert "async error: 21" in output and "rank 1" in output and word in output, report(results)
        assert seconds_of(output) < (2.5 if kind == "killed later" else 1.5), report(results)


def test_execution_timeout(tmp_path):
    results = run(tmp_path, 3, "waits", "sleeps", fail=False, HCCL_EXEC_TIMEOUT="2")
    for rank in (0, 2):
        output = results[rank].output
        assert "async error: 9" in output and "rank 1" in output and "HCCL_EXEC_TIMEOUT" in output, report(results)
        assert 1.5 < seconds_of(output) < 4, report(results)


def test_fault_hccl_timeout(tmp_path):
    results = run(tmp_path, 3, "waits", "calls", fail=False, HCCL_EXEC_TIMEOUT="2", TT_SIM_FAULT="hccl_timeout:2:rank1")
    for result in results:
        assert "async error: 9" in result.output, report(results)
        assert 1.5 < seconds_of(result.output) < 4, report(results)


def test_fault_peer_death(tmp_path):
    results = run(tmp_path, 3, "waits", "calls", fail=False, TT_SIM_FAULT="peer_death:2:rank1")
    assert results[1].returncode == -9, report(results)
    for rank in (0, 2):
        assert "async error: 21" in results[rank].output and "rank 1, which died" in results[rank].output, report(
            results
        )


def test_peer_that_is_done_may_end(tmp_path):
    run(tmp_path, 3, "orderly_exit")


def test_connect_timeout_names_the_missing_ranks(tmp_path):
    results = run(tmp_path, 4, "connect", "missing", fail=False, HCCL_CONNECT_TIMEOUT="2")
    for rank in (0, 2):
        assert results[rank].returncode == 3, report(results)
        assert "missing: 1, 3" in results[rank].output and results[rank].seconds < 5, report(results)


@pytest.mark.parametrize(
    "kind, word", [("ranks", "number of ranks"), ("twice", "came as rank 1"), ("dies", "missing: 1")]
)
def test_set_up_that_cannot_work(tmp_path, kind, word):
    results = run(tmp_path, 3, "connect", kind, fail=False, HCCL_CONNECT_TIMEOUT="2")
    assert word in results[0].output and results[0].returncode == 3, report(results)


def test_bytes_sent(tmp_path):
    ranks = 4
    run(tmp_path, ranks, "statistics", TT_SIM_STATS=str(tmp_path / "stats-%r.json"))
    item = 4
    for rank in range(ranks):
        written = json.loads((tmp_path / f"stats-{rank}.json").read_text())
        counted = written["collectives"]
        assert written["memory"][str(rank)]["communicator_peak_bytes"] == 2 << 20  # HCCL_BUFFSIZE=1, two buffers
        root = rank == 0
        expected = {
            "HcclAllGather": 10 * item * (ranks - 1),
            "HcclReduceScatter": 10 * item * (ranks - 1),
            "HcclAllReduce": 2 * (ranks - 1) * 40 * item // ranks,
            "HcclAlltoAll": 10 * item * (ranks - 1),
            "HcclBroadcast": 10 * item * (ranks - 1) if root else 0,
            "HcclReduce": 0 if root else 10 * item,
            "HcclScatter": 10 * item * (ranks - 1) if root else 0,
            "HcclBarrier": 0,
        }
        assert {name: entry["bytes_sent"] for name, entry in counted.items()} == expected
        assert all(entry["calls"] == 1 for entry in counted.values())


TORCH_PROGRAM = str(Path(__file__).with_name("hccl_torch.py"))


@pytest.mark.parametrize(
    "ranks, settings",
    [(2, {"TASK_QUEUE_ENABLE": "0"}), (2, {"TASK_QUEUE_ENABLE": "2"}), (4, {}), (3, {"TT_SIM_DELAY": "5"})],
)
def test_torch_distributed(tmp_path, ranks, settings):
    run_ranks([TORCH_PROGRAM, str(tmp_path / "store")], ranks, timeout=300, python=NPU_PYTHON, **settings)


def test_two_machines(tmp_path):
    """Two launchers on this host: each has cards 0 and 1, and nothing may go by the number of the card."""
    launch = ["-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    launch += [f"--master-port={free_port()}", "--node-rank={rank}", TORCH_PROGRAM, str(tmp_path / "store")]
    run_ranks(launch, 2, timeout=300, python=NPU_PYTHON)


def test_torch_ends_when_a_peer_dies(tmp_path):
    results = run_ranks(
        [TORCH_PROGRAM, str(tmp_path / "store")], 3, 120, NPU_PYTHON, fail=False, TT_SIM_FAULT="peer_death:20:rank1"
    )
    assert results[1].returncode == -9, report(results)
    for rank in (0, 2):
        assert results[rank].returncode not in (0, -9), report(results)
        assert "rank 1, which died" in results[rank].output or "rank 1 died" in results[rank].output, report(results)
        assert results[rank].seconds < results[1].seconds + 15, report(results)
