"""The shared-memory communicator with real processes: what is gathered and reduced, and how it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import re
import signal
import socket
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from processes import forkserver

from torchtitan_npu import _C

UNITS = ["embedding", "layers.0", "layers.1", "head"]
F32 = _C.DType.float32
SHARD_FLOATS = 1027  # odd, so that segments are not aligned to cache lines
# Two places and two buckets; gather memory holds both places, reduce memory both buckets of two rounds.
PLACES, BUCKETS, PARAMS = 2, 2, 70


def layout(size: int) -> dict[str, object]:
    return {
        "gather_bytes": PLACES * size * SHARD_FLOATS * 4,
        "reduce_bytes": BUCKETS * size * SHARD_FLOATS * 4,
        "gather_reserved_bytes": 1 << 32,
        "reduce_reserved_bytes": 1 << 32,
        "places": PLACES,
        "bucket_params": [PARAMS] * BUCKETS,
        "unit_names": UNITS,
    }


def connect(rank: int, size: int, name: str, **options: object) -> _C.ShmCommunicator:
    comm = _C.ShmCommunicator(rank, size, name, **{"timeout_seconds": 20, "connect_timeout_seconds": 20, **options})
    comm.allocate(**layout(size))
    return comm


def child(target: Callable[..., None], rank: int, size: int, name: str, pipe: Connection, arguments: tuple) -> None:
    """Runs `target` and reports ("ok", "") or (exception type, message)."""
    try:
        target(rank, size, name, pipe, *arguments)
        pipe.send(("ok", ""))
    except BaseException as error:  # reported to the test, whatever it is
        detail = "" if isinstance(error, _C.PeerError) else traceback.format_exc()
        pipe.send((type(error).__name__, f"{error} {detail}".strip()))


class Ranks:
    """`size` processes that run `target(rank, size, socket_name, pipe, *arguments)`."""

    def __init__(self, target: Callable[..., None], size: int, *arguments: object) -> None:
        context = forkserver()
        self.name = f"ttnpu-test-{uuid.uuid4()}"
        self.pipes, self.processes = [], []
        for rank in range(size):
            mine, its = context.Pipe()
            process = context.Process(target=child, args=(target, rank, size, self.name, its, arguments), daemon=True)
            process.start()
            its.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def receive(self, rank: int) -> object:
        assert self.pipes[rank].poll(30), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def results(self) -> list[tuple[str, str]]:
        return [self.receive(rank) for rank in range(len(self.pipes))]


@contextlib.contextmanager
def running(target: Callable[..., None], size: int, *arguments: object) -> Iterator[Ranks]:
    ranks = Ranks(target, size, *arguments)
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def floats(memory: _C.HostMemory) -> memoryview:
    return memoryview(memory)[: 1 << 22].cast("f")


def read_floats(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


# ---- right results ---------------------------------------------------------------------------------------------------


def gather_and_reduce(rank: int, size: int, name: str, pipe: Connection, steps: int) -> None:
    """Gathers and reductions with random delays; each value says who wrote it and when."""
    comm = connect(rank, size, name)
    delays = random.Random(rank)
    gathered, mine = floats(comm.gather_memory), floats(comm.reduce_memory)
    place_floats, bucket_floats = size * SHARD_FLOATS, size * SHARD_FLOATS

    def delay() -> None:
        if delays.random() < 0.2:
            time.sleep(delays.random() * 0.004)

    def launch(sequence: int) -> None:
        place = sequence % PLACES
        comm.wait_place_free(place)
        begin = place * place_floats + rank * SHARD_FLOATS
        for i in (0, 1, SHARD_FLOATS - 1):
            gathered[begin + i] = sequence * 16 + rank
        comm.launch_gather(place, sequence % len(UNITS), sequence, [(place * place_floats * 4, SHARD_FLOATS * 4)])

    launch(1)
    for sequence in range(1, steps + 1):
        if sequence < steps:
            launch(sequence + 1)  # one ahead
        delay()
        place = sequence % PLACES
        comm.wait_gather(place, sequence % len(UNITS), sequence)
        for peer in range(size):
            begin = place * place_floats + peer * SHARD_FLOATS
            assert [gathered[begin + i] for i in (0, 1, SHARD_FLOATS - 1)] == [sequence * 16 + peer] * 3
        comm.release(place)

        # Rank r contributes to bucket b unless (round + r + b) is a multiple of 3.
        round_ = sequence
        for bucket in range(BUCKETS):
            if round_ > 1:
                comm.wait_contribution_free(bucket, round_ - 1)
            has = (round_ + rank + bucket) % 3 != 0
            begin = bucket * bucket_floats
            if has:
                for segment in range(size):
                    mine[begin + segment * SHARD_FLOATS] = 1000 * round_ + 100 * bucket + 10 * segment + rank
            offset = begin * 4 if has else _C.NO_GRADIENT
            reported = [0, 1 << rank] if has else []
            delay()
            comm.launch_reduce(bucket, round_, offset, SHARD_FLOATS, F32, reported)
        comm.close_round(round_)
        for bucket in range(BUCKETS):
            comm.wait_reduce_ready(bucket, round_)
            contributors = [peer for peer in range(size) if (round_ + peer + bucket) % 3 != 0]
            assert comm.reported_anywhere(bucket, round_) == [0, sum(1 << peer for peer in contributors)]
            segments = comm.my_segment_everywhere(bucket, round_)
            assert [peer for peer, address in enumerate(segments) if address] == contributors
            for peer in contributors:
                assert read_floats(segments[peer], 1) == [1000 * round_ + 100 * bucket + 10 * rank + peer]
            delay()
            comm.finish_reduce(bucket, round_)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_and_reduce(size: int) -> None:
    with running(gather_and_reduce, size, 60) as ranks:
        assert ranks.results() == [("ok", "")] * size


def leaves_nothing(rank: int, size: int, name: str, pipe: Connection) -> None:
    def traces() -> tuple[int, int]:
        with open("/proc/self/maps") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:torchtitan_npu" in line for line in maps)

    before = traces()
    comm = connect(rank, size, name)
    memory = comm.gather_memory
    view = memoryview(memory)
    assert traces()[1] == 1
    del comm, memory
    view[0] = 1  # whoever looks at the memory keeps it
    assert traces()[1] == 1
    view.release()
    del view
    assert traces() == before


def test_leaves_no_files_and_no_mappings() -> None:
    with running(leaves_nothing, 2) as ranks:
        assert ranks.results() == [("ok", "")] * 2
        with open("/proc/net/unix") as sockets:
            assert ranks.name not in sockets.read()


# ---- ranks that come apart -------------------------------------------------------------------------------------------


def other_unit(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name)
    for sequence, unit in ((1, 0), (2, 1 + (rank == 1))):
        comm.launch_gather(0, unit, sequence, [])
        comm.wait_gather(0, unit, sequence)
        comm.release(0)
        comm.wait_place_free(0)


def other_place(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name)
    comm.launch_gather(rank, 3, 1, [])
    comm.wait_gather(rank, 3, 1)


def skipped_reduction(rank: int, size: int, name: str, pipe: Connection, late: int) -> None:
    """Rank 1 ends the backward pass without a reduction that rank 0 waits for; rank `late` comes to its wait last: either
    may be the one that finds it."""
    comm = connect(rank, size, name)
    if rank == 0:
        comm.launch_reduce(1, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
    if rank == late:
        time.sleep(0.3)
    comm.close_round(1)
    if rank == 0:
        comm.wait_reduce_ready(1, 1)
    else:
        comm.launch_gather(0, 0, 1, [])
        comm.wait_gather(0, 0, 1)


def test_other_unit_is_named_on_both_sides() -> None:
    with running(other_unit, 3) as ranks:
        for kind, message in ranks.results():
            assert kind == "PeerError"
            assert "ranks have come apart" in message
            assert "unit 'layers.0' (gather 2)" in message and "rank 1 gathers unit 'layers.1' (gather 2)" in message


def test_other_place_is_named() -> None:
    with running(other_place, 2) as ranks:
        for kind, message in ranks.results():
            assert kind == "PeerError"
            assert "rank 0 gathers unit 'head' (gather 1, place 0)" in message
            assert "rank 1 gathers unit 'head' (gather 1, place 1)" in message


@pytest.mark.parametrize("late", [0, 1])
def test_skipped_reduction_is_named(late: int) -> None:
    with running(skipped_reduction, 2, late) as ranks:
        for kind, message in ranks.results():
            assert kind == "PeerError"
            assert "rank 1 has ended backward pass 1 without the reduction of bucket 1" in message


# ---- dead, failed and late peers -------------------------------------------------------------------------------------


def wait_for_rank_1(rank: int, size: int, name: str, pipe: Connection, timeout_seconds: float) -> None:
    """Rank 1 joins and then only sleeps; the others wait for its gather."""
    comm = connect(rank, size, name, timeout_seconds=timeout_seconds)
    pipe.send("connected")
    if rank == 1:
        time.sleep(60)
    comm.launch_gather(0, 2, 1, [])
    comm.wait_gather(0, 2, 1)


def test_dead_peer_is_named() -> None:
    with running(wait_for_rank_1, 3, 60.0) as ranks:
        assert [ranks.receive(rank) for rank in range(3)] == ["connected"] * 3
        pid = ranks.processes[1].pid
        os.kill(pid, signal.SIGKILL)  # becomes a zombie, as nobody has waited for it yet
        for rank in (0, 2):
            kind, message = ranks.receive(rank)
            assert kind == "PeerError"
            assert f"rank 1 (pid {pid}) died while rank {rank} waited for it in gather 1 of unit 'layers.1'" in message


def test_late_peer_is_named() -> None:
    with running(wait_for_rank_1, 2, 0.3) as ranks:
        assert ranks.receive(0) == ranks.receive(1) == "connected"
        kind, message = ranks.receive(0)
        assert kind == "PeerError"
        expected = (
            rf"rank 0 waited 0.3 seconds in gather 1 of unit 'layers.1' for rank 1 \(pid {ranks.processes[1].pid}\)"
        )
        assert re.search(expected, message) and "HCCL_EXEC_TIMEOUT" in message


def fail_on_rank_1(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name, global_ranks=[8, 9])
    if rank == 1:
        comm.fail("the loss is NaN at step 3")
        pipe.recv()
    comm.launch_reduce(rank, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
    comm.wait_reduce_ready(rank, 1)


def test_failed_peer_is_quoted() -> None:
    with running(fail_on_rank_1, 2) as ranks:
        assert ranks.receive(0) == ("PeerError", "rank 9 failed: the loss is NaN at step 3")
        ranks.pipes[1].send("go on")
        assert ranks.receive(1) == ("PeerError", "rank 9 gave up before: the loss is NaN at step 3")


def leave_early(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name)
    comm.launch_gather(0, 0, 1, [])
    if rank == 1:
        del comm
        return
    comm.wait_gather(0, 0, 1)  # was launched before rank 1 left
    comm.release(0)
    comm.wait_place_free(0)


def test_closed_peer_is_named() -> None:
    with running(leave_early, 2) as ranks:
        kind, message = ranks.receive(0)
        assert kind == "PeerError"
        assert re.match(r"rank 1 \(pid \d+\) (has closed its communicator|died) while rank 0 waited", message)


def stuck(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name)
    if rank == 0:
        comm.launch_reduce(0, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
        # Rank 1 waits for bucket 1, which rank 0 has not launched, and has not launched bucket 0 itself.
        assert comm.wait_reduce_ready_or_stuck(0, 1) is False
        comm.launch_reduce(1, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
        assert comm.wait_reduce_ready_or_stuck(0, 1) is True
    else:
        comm.launch_reduce(1, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
        comm.wait_reduce_ready(1, 1)
        comm.launch_reduce(0, 1, _C.NO_GRADIENT, SHARD_FLOATS, F32, [])
        comm.wait_reduce_ready(0, 1)
    pipe.send("past")
    pipe.recv()


def test_stuck_is_told_from_slow() -> None:
    with running(stuck, 2) as ranks:
        assert ranks.receive(0) == ranks.receive(1) == "past"
        for pipe in ranks.pipes:
            pipe.send("end")
        assert ranks.results() == [("ok", "")] * 2


def progress_ends_wait(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = connect(rank, size, name)
    if rank == 1:
        pipe.recv()
        return
    calls: list[int] = []

    def progress() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    comm.set_progress(progress)
    comm.launch_gather(0, 0, 1, [])
    with pytest.raises(KeyboardInterrupt):
        comm.wait_gather(0, 0, 1)
    assert len(calls) == 3


def test_progress_is_called_and_may_throw() -> None:
    with running(progress_ends_wait, 2) as ranks:
        assert ranks.receive(0) == ("ok", "")
        ranks.pipes[1].send("end")
        assert ranks.receive(1) == ("ok", "")


# ---- connecting ------------------------------------------------------------------------------------------------------


def absent(rank: int, size: int, name: str, pipe: Connection) -> None:
    if rank != 2:
        connect(rank, size, name, connect_timeout_seconds=0.5)


def test_rank_that_does_not_connect_is_named_everywhere() -> None:
    with running(absent, 3) as ranks:
        assert ranks.receive(2) == ("ok", "")
        (kind_0, message_0), (kind_1, message_1) = ranks.receive(0), ranks.receive(1)
        assert kind_0 == kind_1 == "PeerError"
        # Rank 1 may start more than 0.5 seconds before or after rank 0.
        assert re.search(r"no shared memory with (rank 1, )?rank 2: not connected within 0.5 seconds", message_0)
        assert "rank 2: not connected within" in message_1 or "rank 0" in message_1


def other_layout(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = _C.ShmCommunicator(rank, size, name, connect_timeout_seconds=20)
    comm.allocate(**{**layout(size), "unit_names": UNITS[: 4 - rank]})


def test_other_layout_is_refused() -> None:
    with running(other_layout, 2) as ranks:
        for kind, message in ranks.results():
            assert kind == "PeerError" and "rank 1 asks for other memory than rank 0" in message


def too_large(rank: int, size: int, name: str, pipe: Connection) -> None:
    comm = _C.ShmCommunicator(rank, size, name, connect_timeout_seconds=20)
    comm.allocate(**{**layout(size), "gather_bytes": 1 << 45})


def test_too_large_is_refused_before_memory_is_taken() -> None:
    with running(too_large, 2) as ranks:
        for kind, message in ranks.results():
            assert kind in ("Error", "PeerError")
            # 2**45 bytes are 32768 GiB.
            assert "gathered parameters 32768.00 GiB" in message and "Lower bucket_cap_mb" in message


def test_strangers_on_the_socket_do_no_harm() -> None:
    name = f"ttnpu-test-{uuid.uuid4()}"
    comms = [_C.ShmCommunicator(rank, 2, name, connect_timeout_seconds=20) for rank in range(2)]
    threads = [threading.Thread(target=comm.allocate, kwargs=layout(2)) for comm in comms]
    threads[0].start()
    for message in (b"", b"hello", b"x" * 48):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for _ in range(1000):
            with contextlib.suppress(ConnectionRefusedError):  # until rank 0 listens
                stranger.connect(f"\0{name}")
                break
            time.sleep(0.005)
        if message:
            stranger.send(message)
        stranger.close()
    threads[1].start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    memoryview(comms[0].gather_memory)[5] = 42
    assert memoryview(comms[1].gather_memory)[5] == 42


def test_single_rank_needs_no_socket() -> None:
    comm = connect(0, 1, "")
    assert (comm.rank, comm.size, comm.name, comm.needs_fixed_order) == (0, 1, "shared memory", False)
    comm.launch_gather(1, 0, 1, [(0, 4)])
    comm.wait_gather(1, 0, 1)
    assert not comm.place_is_free(1)
    comm.release(1)
    assert comm.place_is_free(1)
    comm.launch_reduce(0, 1, 64, 8, F32, [1, 2])
    assert comm.reduce_is_ready(0, 1) and not comm.reduce_is_ready(1, 1)
    assert comm.my_segment_everywhere(0, 1) == [comm.reduce_memory.address + 64]
    assert not comm.contribution_is_free(0, 1)
    comm.finish_reduce(0, 1)
    assert comm.contribution_is_free(0, 1)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"rank": 2, "size": 2}, "rank 2 of 2"),
        ({"rank": 0, "size": 0}, "rank 0 of 0"),
        ({"rank": 0, "size": 1, "timeout_seconds": 0.0}, "must be positive"),
        ({"rank": 0, "size": 2, "global_ranks": [1]}, "1 global ranks for 2 ranks"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.ShmCommunicator(**{"socket_name": "x", **arguments})


def test_misuse_is_an_internal_error() -> None:
    comm = _C.ShmCommunicator(0, 1)
    with pytest.raises(RuntimeError, match=r"allocate\(\) comes first"):
        comm.launch_gather(0, 0, 1, [])
    comm = connect(0, 1, "")
    comm.launch_gather(0, 0, 5, [])
    with pytest.raises(RuntimeError, match="still in use"):
        comm.launch_gather(0, 1, 6, [])
    with pytest.raises(RuntimeError, match="not a new one"):
        comm.launch_gather(1, 1, 5, [])
    with pytest.raises(RuntimeError, match="was not launched here"):
        comm.wait_gather(1, 1, 6)
    with pytest.raises(RuntimeError, match="gradients end at"):
        comm.launch_reduce(0, 1, 0, 1 << 40, F32, [])
    with pytest.raises(RuntimeError, match="place 9 of 2"):
        comm.place_is_free(9)


def test_socket_name_must_fit() -> None:
    with pytest.raises(ValueError, match="it must have 1 to 107"):
        connect(0, 2, "x" * 200)


def tell_identity(rank: int, size: int, name: str, pipe: Connection) -> None:
    pipe.send(_C.shm_identity())


def test_identity_is_the_same_for_all_processes_here() -> None:
    with running(tell_identity, 1) as ranks:
        assert ranks.receive(0) == _C.shm_identity()
