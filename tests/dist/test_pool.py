"""The processes that run the distributed tests."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from pool import RankGroup, RankPool, on_ranks


@on_ranks(1, 2, 3, 4)
def test_all_ranks_take_part() -> None:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total.item() == size * (size + 1) // 2


def own_pid() -> int:
    return os.getpid()


def fail_on_rank_1() -> int:
    if dist.get_rank() == 1:
        raise ValueError("no luck")
    return dist.get_rank()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(1000)


def test_processes_are_used_again_until_one_fails() -> None:
    pool = RankPool()
    first = pool.run(2, own_pid)
    assert pool.run(2, own_pid) == first
    with pytest.raises(pytest.fail.Exception, match="(?s)1 of 2 ranks failed.*rank 1.*ValueError: no luck"):
        pool.run(2, fail_on_rank_1)
    assert not set(pool.run(2, own_pid)) & set(first)
    pool.close()


def test_dead_and_hanging_ranks_are_reported() -> None:
    group = RankGroup(2)
    outcomes = group.call(hang_on_rank_1, timeout=2)
    assert outcomes[0].error == ""
    assert "hang_on_rank_1" in outcomes[1].error, "the stack names the function"
    group.kill()
    group = RankGroup(2)
    assert group.call(die_on_rank_1)[1].error == "died, exit code 7"
    group.kill()
    assert not any(process.is_alive() for process in group.processes)
