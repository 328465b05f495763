"""What the ranks of test_hccl.py run: hccl_programs.py <name of a function> <arguments>."""

from __future__ import annotations

import os
import signal
import sys
import time
from ctypes import byref, c_int32, c_void_p

import numpy as np
from card import (
    BF16,
    FP16,
    FP32,
    INT8,
    INT16,
    INT32,
    INT64,
    MAX,
    MIN,
    NUMPY,
    PROD,
    SUM,
    UINT8,
    Array,
    Card,
    Communicator,
    Config,
    Failure,
    exchange_root_info,
)

RANK = int(os.environ["RANK"])
RANKS = int(os.environ["WORLD_SIZE"])
COUNTS = (0, 1, 5, 1000, 70_001)  # none, fewer than ranks, uneven, more than one chunk of a reduction


def to_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def values_of(rank: int, count: int, dtype: int, salt: int = 0) -> np.ndarray:
    generator = np.random.default_rng(1000 * salt + rank)
    if dtype == BF16:
        return to_bf16(generator.standard_normal(count))
    if np.issubdtype(NUMPY[dtype], np.floating):
        return generator.standard_normal(count).astype(NUMPY[dtype])
    return generator.integers(np.iinfo(NUMPY[dtype]).min, np.iinfo(NUMPY[dtype]).max, count, NUMPY[dtype])


def reduced(parts: list[np.ndarray], dtype: int, op: int) -> np.ndarray:
    """In rank order, rounded to the element type after every step."""
    total = parts[0]
    for part in parts[1:]:
        a, b = (from_bf16(total), from_bf16(part)) if dtype == BF16 else (total, part)
        with np.errstate(over="ignore"):
            result = {SUM: np.add, PROD: np.multiply, MAX: np.maximum, MIN: np.minimum}[op](a, b)
        total = to_bf16(result) if dtype == BF16 else result.astype(NUMPY[dtype])
    return total


def equal(array: Array, expected: np.ndarray, what: object) -> None:
    got = array.numpy()
    expected = np.ascontiguousarray(expected, got.dtype)
    assert np.array_equal(got.view(np.uint8), expected.view(np.uint8)), (what, got, expected)


def expect(code: int, *words: str, call) -> None:
    try:
        call()
    except Failure as failure:
        assert failure.code == code, failure
        for word in words:
            assert word in str(failure), (word, str(failure))
    else:
        raise AssertionError(f"no error {code}")


def reductions() -> None:
    card = Card()
    comm = Communicator.world(card)
    salt = 0
    for dtype in (INT8, INT16, INT32, INT64, FP16, FP32, BF16):
        for op in (SUM, PROD, MAX, MIN):
            if op == PROD and dtype in (INT16, BF16):
                x = card.array(values_of(RANK, 4, dtype))
                expect(5, "prod", call=lambda x=x, dtype=dtype: comm.call("HcclAllReduce", x, x, 4, dtype, PROD))
                continue
            for count in COUNTS if op == SUM else (5,):
                for in_place in (False, True):
                    salt += 1
                    what = (dtype, op, count, in_place)
                    parts = [values_of(rank, count * RANKS, dtype, salt) for rank in range(RANKS)]
                    send = card.array(parts[RANK])
                    recv = send if in_place else card.empty(count * RANKS, NUMPY[dtype])
                    comm.call("HcclAllReduce", send, recv, count * RANKS, dtype, op)
                    card.synchronize()
                    equal(recv, reduced(parts, dtype, op), ("all-reduce", *what))
                    card.write(send, parts[RANK])
                    mine = slice(RANK * count, (RANK + 1) * count)
                    block = send[mine] if in_place else card.empty(count, NUMPY[dtype])
                    comm.call("HcclReduceScatter", send, block, count, dtype, op)
                    card.synchronize()
                    equal(block, reduced(parts, dtype, op)[mine], ("reduce-scatter", *what))
                    root = salt % RANKS
                    card.write(send, parts[RANK])
                    recv = send if in_place else card.empty(count * RANKS, NUMPY[dtype])
                    comm.call("HcclReduce", send, recv if root == RANK else None, count * RANKS, dtype, op, root)
                    card.synchronize()
                    if root == RANK:
                        equal(recv, reduced(parts, dtype, op), ("reduce", *what))
                    elif in_place:
                        equal(send, parts[RANK], ("reduce leaves the others alone", *what))
    comm.destroy()


def moves() -> None:
    card = Card()
    comm = Communicator.world(card)
    for salt, (dtype, count) in enumerate((dtype, count) for dtype in (UINT8, BF16, FP32, INT64) for count in COUNTS):
        kind = NUMPY[dtype]
        parts = [values_of(rank, count * RANKS, dtype, salt) for rank in range(RANKS)]
        mine = slice(RANK * count, (RANK + 1) * count)
        root = salt % RANKS
        # Broadcast
        buffer = card.array(parts[RANK])
        comm.call("HcclBroadcast", buffer, count * RANKS, dtype, root)
        card.synchronize()
        equal(buffer, parts[root], "broadcast")
        for in_place in (False, True):
            # Gather
            recv = card.array(parts[RANK])
            send = recv[mine] if in_place else card.array(parts[RANK][mine])
            comm.call("HcclAllGather", send, recv, count, dtype)
            card.synchronize()
            gathered = np.concatenate([part[r * count : (r + 1) * count] for r, part in enumerate(parts)])
            equal(recv, gathered, ("all-gather", in_place))
            # Scatter
            send = card.array(parts[RANK]) if root == RANK else None
            recv = send[mine] if in_place and send is not None else card.empty(count, kind)
            comm.call("HcclScatter", send, recv, count, dtype, root)
            card.synchronize()
            equal(recv, parts[root][mine], ("scatter", in_place))
            # Uneven gather and reduce-scatter: rank r has r * count + 1 elements, with a gap of one before each block
            counts = [r * count + 1 for r in range(RANKS)]
            begins = [sum(counts[:r]) + r + 1 for r in range(RANKS)]
            own = slice(begins[RANK], begins[RANK] + counts[RANK])
            whole = sum(counts) + RANKS + 1
            uneven = [values_of(r, whole, dtype, salt + 500) for r in range(RANKS)]
            recv = card.array(uneven[RANK])
            send = recv[own] if in_place else card.array(uneven[RANK][own])
            comm.call("HcclAllGatherV", send, counts[RANK], recv, counts, begins, dtype)
            card.synchronize()
            expected = uneven[RANK].copy()
            for r in range(RANKS):
                part = slice(begins[r], begins[r] + counts[r])
                expected[part] = uneven[r][part]
            equal(recv, expected, ("all-gather v", in_place))
            if dtype in (FP32, BF16):
                send = card.array(uneven[RANK])
                recv = send[own] if in_place else card.empty(counts[RANK], kind)
                comm.call("HcclReduceScatterV", send, counts, begins, recv, counts[RANK], dtype, SUM)
                card.synchronize()
                equal(recv, reduced(uneven, dtype, SUM)[own], ("reduce-scatter v", in_place))
        # All to all
        send, recv = card.array(parts[RANK]), card.empty(count * RANKS, kind)
        card.hccl("HcclAlltoAll", c_void_p(send.address), count, dtype, c_void_p(recv.address), count, dtype,
                  comm.handle, card.stream)  # fmt: skip
        card.synchronize()
        equal(recv, np.concatenate([part[mine] for part in parts]), "all to all")
        # With counts: i sends j (i + 2 j) % 4 * count elements, in reverse order of the ranks, gaps of two
        matrix = [[(i + 2 * j) % 4 * count for j in range(RANKS)] for i in range(RANKS)]

        def places(counts: list[int]) -> list[int]:
            return [2 + sum(counts[r + 1 :]) + 2 * (RANKS - 1 - r) for r in range(RANKS)]

        whole = 8 * count * RANKS + 2 * RANKS + 2
        sources = [values_of(r, whole, dtype, salt + 900) for r in range(RANKS)]
        received = [matrix[i][RANK] for i in range(RANKS)]
        send, before = card.array(sources[RANK]), values_of(RANK, whole, dtype, salt + 901)
        recv = card.array(before)
        sent = matrix[RANK]
        comm.call("HcclAlltoAllV", send, sent, places(sent), dtype, recv, received, places(received), dtype)
        card.synchronize()
        expected = before.copy()
        for i in range(RANKS):
            at, source = places(received)[i], places(matrix[i])[RANK]
            expected[at : at + received[i]] = sources[i][source : source + received[i]]
        equal(recv, expected, "all to all v")
        # With the matrix: blocks without gaps, in the order of the ranks
        comm.call("HcclAlltoAllVC", send, [n for row in matrix for n in row], dtype, recv, dtype)
        card.synchronize()
        pieces = [sources[i][sum(matrix[i][:RANK]) : sum(matrix[i][: RANK + 1])] for i in range(RANKS)]
        equal(recv[: sum(received)], np.concatenate(pieces), "all to all vc")
        comm.call("HcclBarrier")
        card.synchronize()
    comm.destroy()


def point_to_point() -> None:
    card = Card()
    comm = Communicator.world(card)
    right, left = (RANK + 1) % RANKS, (RANK - 1) % RANKS
    for turn, count in enumerate(COUNTS):
        sent, recv = card.array(values_of(RANK, count, FP32, turn)), card.empty(count, np.float32)
        # Along the line
        if RANK > 0:
            comm.call("HcclRecv", recv, count, FP32, left)
        if RANK < RANKS - 1:
            comm.call("HcclSend", sent, count, FP32, right)
        card.synchronize()
        if RANK > 0:
            equal(recv, values_of(left, count, FP32, turn), "line")
        # Around the ring, both ways, and two to the same rank; the order of sends and receives does not matter
        more = card.array(values_of(RANK, count, FP32, turn + 50))
        first, second, third = (card.empty(count, np.float32) for _ in range(3))
        items = [(1, first, FP32, left), (0, sent, FP32, right), (1, second, FP32, left), (0, more, FP32, right)]
        if RANKS > 2:
            items += [(0, more, FP32, left), (1, third, FP32, right)]
        comm.batch(items)
        card.synchronize()
        equal(first, values_of(left, count, FP32, turn), "ring, first")
        equal(second, values_of(left, count, FP32, turn + 50), "ring, second")
        if RANKS > 2:
            equal(third, values_of(right, count, FP32, turn + 50), "ring, the other way")
        # The same from a group of single calls
        card.hccl("HcclGroupStart")
        comm.call("HcclSend", more, count, FP32, right)
        comm.call("HcclRecv", first, count, FP32, left)
        card.hccl("HcclGroupEnd")
        # A collective afterwards, without waiting for the host
        comm.call("HcclAllReduce", sent, sent, count, FP32, MAX)
        card.synchronize()
        equal(first, values_of(left, count, FP32, turn + 50), "group")
        equal(sent, reduced([values_of(r, count, FP32, turn) for r in range(RANKS)], FP32, MAX), "after the group")
    comm.destroy()


def subgroups() -> None:
    card = Card()
    world = Communicator.world(card, config=Config(buffer_size=1, name=b"the world"))
    assert world.name() == "the world"
    for repeat in range(3):
        for members in ([0, 1], [RANKS - 1, 0], list(range(RANKS)), [RANKS - 1]):
            comm = world.split(members, number=7 + repeat % 2)
            if comm is None:
                continue
            x = card.array(np.full(10, RANK + 1, np.float32))
            comm.call("HcclAllReduce", x, x, 10, FP32, SUM)
            card.synchronize()
            equal(x, np.full(10, sum(m + 1 for m in members), np.float32), members)
            assert comm.name() != world.name()
            if repeat != 1:
                comm.destroy()
    halves = [[r for r in range(RANKS) if r % 2 == half] for half in range(2)]
    comm = world.split(halves[RANK % 2], number=3)  # the same number for both halves
    x = card.array(np.full(10, RANK + 1, np.int64))
    comm.call("HcclAllReduce", x, x, 10, INT64, SUM)
    world.call("HcclBarrier")
    card.synchronize()
    equal(x, np.full(10, sum(r + 1 for r in halves[RANK % 2]), np.int64), "half")
    world.destroy()


def streams() -> None:
    """Two streams, ordered by events: the calls run in the order of submission."""
    card = Card()
    comm = Communicator.world(card)
    other = card.new_stream()
    event = c_void_p()
    card.acl("aclrtCreateEventExWithFlag", byref(event), 1)
    x = card.array(np.full(1000, RANK, np.float32))
    gathered = card.empty(1000 * RANKS, np.float32)
    for _ in range(30):
        comm.call("HcclAllReduce", x, x, 1000, FP32, MAX)
        card.acl("aclrtRecordEvent", event, card.stream)
        card.acl("aclrtStreamWaitEvent", other, event)
        comm.call("HcclAllGather", x, gathered, 1000, FP32, stream=other)
        card.acl("aclrtRecordEvent", event, other)
        card.acl("aclrtStreamWaitEvent", card.stream, event)
    card.synchronize()
    equal(gathered, np.full(1000 * RANKS, RANKS - 1, np.float32), "gathered")
    comm.destroy()


def two_communicators() -> None:
    """Collectives of two communicators at the same time, whose order differs between the ranks."""
    card = Card()
    first, second = Communicator.world(card), Communicator.world(card, name="second")
    other = card.new_stream()
    x, y = card.array(np.full(3000, RANK, np.float32)), card.array(np.full(3000, RANK, np.float32))
    gathered = card.empty(3000 * RANKS, np.float32)
    for turn in range(40):
        if (turn + RANK) % 2:
            first.call("HcclAllReduce", x, x, 3000, FP32, MAX)
        second.call("HcclAllGather", y, gathered, 3000, FP32, stream=other)
        if not (turn + RANK) % 2:
            first.call("HcclAllReduce", x, x, 3000, FP32, MAX)
    card.synchronize()
    card.synchronize(other)
    equal(x, np.full(3000, RANKS - 1, np.float32), "reduced")
    equal(gathered, np.arange(RANKS, dtype=np.float32).repeat(3000), "gathered")
    first.destroy()
    second.destroy()


def unordered_streams() -> None:
    card = Card()
    comm = Communicator.world(card)
    other = card.new_stream()
    x, y = card.array(np.ones(4, np.float32)), card.array(np.ones(4, np.float32))
    comm.call("HcclAllReduce", x, x, 4, FP32, SUM)
    comm.call("HcclAllReduce", y, y, 4, FP32, SUM, stream=other)
    card.synchronize()
    card.synchronize(other)


def arguments() -> None:
    card = Card()
    comm = Communicator.world(card)
    x, y = card.empty(64, np.float32), card.empty(64, np.float32)
    host = Array(card, np.zeros(64, np.float32).ctypes.data, 64, np.float32)
    shifted = Array(card, x.address + 2, 4, np.float32)
    foreign = Card((RANK + 1) % 4 + 1)
    elsewhere = foreign.empty(64, np.float32)
    card.acl("aclrtSetDevice", card.number)
    expect(2, "sendBuf is null", call=lambda: comm.call("HcclAllReduce", None, y, 4, FP32, SUM))
    expect(1, "no card memory", call=lambda: comm.call("HcclAllReduce", host, y, 4, FP32, SUM))
    expect(1, "lies on card", call=lambda: comm.call("HcclAllReduce", elsewhere, y, 4, FP32, SUM))
    expect(1, "aligned", call=lambda: comm.call("HcclAllReduce", shifted, y, 4, FP32, SUM))
    expect(1, "belongs to card", call=lambda: comm.call("HcclBarrier", stream=foreign.stream))
    expect(1, "overlap", call=lambda: comm.call("HcclAllReduce", x[:8], x[4:12], 8, FP32, SUM))
    expect(1, "overlap", call=lambda: comm.call("HcclAlltoAll", x, 4, FP32, x, 4, FP32))
    expect(1, "overlap", call=lambda: comm.call("HcclAllGather", x[1:], x, 4, FP32))
    expect(1, "root = 9", call=lambda: comm.call("HcclBroadcast", x, 4, FP32, 9))
    expect(1, "itself", call=lambda: comm.call("HcclSend", x, 4, FP32, RANK))
    expect(1, "is none", call=lambda: comm.call("HcclAllGather", x, y, 4, 13))
    expect(5, "reduction", call=lambda: comm.call("HcclAllReduce", x, x, 4, 10, SUM))
    expect(5, "reduction", call=lambda: comm.call("HcclAllReduce", x, x, 4, FP32, 4))
    expect(1, "recvCount", call=lambda: comm.call("HcclReduceScatterV", x, [4] * RANKS, [0] * RANKS, y, 5, FP32, SUM))
    expect(5, "rank tables", call=lambda: card.hccl("HcclCommInitClusterInfo", b"x", 0, byref(c_void_p())))
    expect(5, "HcclCommSuspend", call=lambda: card.hccl("HcclCommSuspend", comm.handle))
    expect(1, "no communicator", call=lambda: card.hccl("HcclBarrier", c_void_p(1234), card.stream))
    comm.call("HcclAllReduce", x, x, 4, FP32, SUM)  # nothing of it did harm
    card.synchronize()
    comm.destroy()
    expect(1, "destroyed", call=lambda: comm.call("HcclBarrier"))


def buffers() -> None:
    card = Card()
    before = card.free_bytes()
    comm = Communicator.world(card)
    assert before - card.free_bytes() == 2 * 200 << 20
    small = Communicator.world(card, name="small", config=Config(buffer_size=3))
    assert before - card.free_bytes() == 2 * 203 << 20
    comm.destroy()
    small.destroy()
    assert before == card.free_bytes()


def one_process() -> None:
    """Four cards in one process."""
    cards = [Card(number) for number in range(4)]
    handles, numbers = (c_void_p * 4)(), (c_int32 * 4)(0, 1, 2, 3)
    cards[0].hccl("HcclCommInitAll", 4, numbers, handles)
    arrays = []
    for number, card in enumerate(cards):
        card.acl("aclrtSetDevice", number)
        comm = Communicator(card, c_void_p(handles[number]))
        assert (comm.rank, comm.ranks) == (number, 4)
        arrays.append(card.array(np.full(100, number + 1, np.float32)))
        comm.call("HcclAllReduce", arrays[-1], arrays[-1], 100, FP32, PROD)
    for number, card in enumerate(cards):
        card.acl("aclrtSetDevice", number)
        card.synchronize()
        equal(arrays[number], np.full(100, 24, np.float32), number)
        card.hccl("HcclCommDestroy", c_void_p(handles[number]))


def mismatch(kind: str) -> None:
    card = Card()
    comm = Communicator.world(card)
    x, y = card.array(np.zeros(64, np.float32)), card.empty(64, np.float32)
    comm.call("HcclBarrier")
    odd = RANK == 1
    if kind == "operation":
        comm.call("HcclAllReduce", x, x, 4, FP32, SUM) if odd else comm.call("HcclAllGather", x, y, 4, FP32)
    elif kind == "count":
        comm.call("HcclAllReduce", x, x, 5 if odd else 4, FP32, SUM)
    elif kind == "type":
        comm.call("HcclAllReduce", x, x, 4, INT32 if odd else FP32, SUM)
    elif kind == "reduction":
        comm.call("HcclAllReduce", x, x, 4, FP32, MAX if odd else SUM)
    elif kind == "root":
        comm.call("HcclBroadcast", x, 4, FP32, RANK)
    elif kind == "counts":
        other = [5 if odd and r == 0 else 4 for r in range(RANKS)]
        comm.call("HcclAllGatherV", x, 4, y, other, [8 * r for r in range(RANKS)], FP32)
    elif kind == "all to all":
        counts, places = [2] * RANKS, [8 * r for r in range(RANKS)]
        sent = [3 if odd and r == 0 else 2 for r in range(RANKS)]
        comm.call("HcclAlltoAllV", x, sent, places, FP32, y, counts, places, FP32)
    elif kind == "send":
        comm.call("HcclSend", x, 4, FP32, 0) if odd else comm.call("HcclRecv", x, 3, FP32, 1)
    elif kind == "both send":
        comm.call("HcclSend", x, 4, FP32, 1 - RANK)
    elif kind == "both receive":
        comm.call("HcclRecv", x, 4, FP32, 1 - RANK)
    elif kind == "send and collective":
        comm.call("HcclSend", x, 4, FP32, 0) if odd else comm.call("HcclBarrier")
    try:
        card.synchronize()
    except Failure as failure:
        print("synchronize:", failure, "async error:", comm.async_error())
        os._exit(3)


def waits(kind: str) -> None:
    """Rank 0 and 2 call; rank 1 does what `kind` says. Prints what the others are told."""
    card = Card()
    comm = Communicator.world(card)
    x = card.array(np.zeros(1 << 10, np.float32))
    comm.call("HcclAllReduce", x, x, 8, FP32, SUM)
    card.synchronize()
    if RANK == 1 and kind != "calls":
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "killed later":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "exits":
            sys.exit(0)
        if kind == "destroys":
            comm.destroy()
        time.sleep(8 if kind == "sleeps" else 4)
        return
    begin = time.monotonic()
    if kind == "killed":  # noticed without any call
        while comm.async_error() == 0 and time.monotonic() - begin < 10:
            time.sleep(0.01)
    code = 0
    try:
        comm.call("HcclAllReduce", x, x, 1 << 10, FP32, SUM)
        card.synchronize()
    except Failure as failure:
        code = failure.code
        print("told:", failure)
    print(f"seconds: {time.monotonic() - begin:.2f} async error: {comm.async_error()} code: {code}")
    begin = time.monotonic()
    comm.destroy()
    assert time.monotonic() - begin < 3
    os._exit(0)


def orderly_exit() -> None:
    """A peer that is done may end first, without destroying anything."""
    card = Card()
    comm = Communicator.world(card)
    x = card.array(np.zeros(8, np.float32))
    comm.call("HcclAllReduce", x, x, 8, FP32, SUM)
    card.synchronize()
    if RANK == 0:
        time.sleep(1.5)
        assert comm.async_error() == 0


def connect(kind: str) -> None:
    card = Card()
    try:
        if kind == "missing" and RANK in (1, 3):
            time.sleep(5)
            return
        if kind == "ranks":
            Communicator.join(card, RANKS + RANK % 2, RANK)
        elif kind == "twice":
            Communicator.join(card, RANKS, 0 if RANK == 0 else 1)
        elif kind == "dies" and RANK == 1:
            exchange_root_info(card, RANK)
            os._exit(0)
        else:
            Communicator.world(card)
    except Failure as failure:
        print("told:", failure)
        os._exit(3)


def statistics() -> None:
    card = Card()
    comm = Communicator.world(card)
    x, y = card.array(np.zeros(64 * RANKS, np.float32)), card.empty(64 * RANKS, np.float32)
    comm.call("HcclAllGather", x, y, 10, FP32)
    comm.call("HcclReduceScatter", x, y, 10, FP32, SUM)
    comm.call("HcclAllReduce", x, y, 40, FP32, SUM)
    comm.call("HcclAlltoAll", x, 10, FP32, y, 10, FP32)
    comm.call("HcclBroadcast", x, 10, FP32, 0)
    comm.call("HcclReduce", x, y, 10, FP32, SUM, 0)
    comm.call("HcclScatter", x, y, 10, FP32, 0)
    comm.call("HcclBarrier")
    card.synchronize()
    comm.destroy()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
