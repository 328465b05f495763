"""Simulated Ascend, what it finds wrong: races, lifetimes, card memory on the host. Each program is tried with and
without its mistake."""

from __future__ import annotations

import signal

import pytest
from simulated import Run

pytestmark = pytest.mark.usefixtures("launcher")

START = """
import ctypes, threading
from acl import *
start()
one, two, three = create_stream(), create_stream(), create_stream()
event, other = create_event(), create_event()
a, b = malloc(4096), malloc(4096)
host = malloc_host(4096)
ready = create_event()
"""

# mistake -> (kind, program, the line that is missing, parts of the message)
MISTAKES = {
    "no wait between a write and a read": (
        "race",
        "launch(one, 'aclnnWriter', write=(a, 4096))\nrecord(event, one)\n{}\n"
        "launch(two, 'aclnnReader', read=(a, 4096))",
        "wait(two, event)",
        ["aclnnReader", "reads bytes", "aclnnWriter", "stream 0", "allocation of 4096 bytes"],
    ),
    "no wait between a read and a write": (
        "race",
        "launch(one, read=(a, 4096))\nrecord(event, one)\n{}\nlaunch(two, write=(a + 4095, 1))",
        "wait(two, event)",
        ["writes bytes"],
    ),
    "no wait between two writes": (
        "race",
        "launch(one, write=(a, 100))\nrecord(event, one)\n{}\nlaunch(two, write=(a + 99, 100))",
        "wait(two, event)",
        [],
    ),
    "a wait before the record": (
        "race",
        "launch(one, write=(a, 8))\n{}\nrecord(event, one)\nwait(two, event) if not early else None\n"
        "launch(two, read=(a, 8))",
        "early = False",
        [],
    ),
    "an order through a third stream": (
        "race",
        "launch(one, write=(a, 8))\nrecord(event, one)\nwait(two, event)\nrecord(other, two)\n{}\n"
        "launch(three, read=(a, 8))",
        "wait(three, other)",
        [],
    ),
    "the event was recorded too early": (
        "race",
        "record(event, one)\nlaunch(one, write=(a, 8))\n{}\nwait(two, event)\nlaunch(two, read=(a, 8))",
        "record(event, one)",
        [],
    ),
    "no synchronisation of the host": (
        "race",
        "launch(one, write=(a, 8))\n{}\nlaunch(two, read=(a, 8))",
        "synchronize(one)",
        [],
    ),
    "a synchronous copy of what a stream still writes": (
        "race",
        "launch(one, 'aclnnWriter', write=(a, 8), microseconds=1000)\n{}\ndownload(a, 8)",
        "call('aclrtSynchronizeDevice')",
        ["aclrtMemcpy on the host reads", "aclnnWriter"],
    ),
    "a host buffer that two streams copy to": (
        "race",
        "copy(host, a, 8, DEVICE_TO_HOST, one)\nrecord(event, one)\n{}\ncopy(host + 4, b, 8, DEVICE_TO_HOST, two)",
        "call('aclrtSynchronizeEvent', event)",
        ["of host memory"],
    ),
    "a read among readers, then a write": (
        "race",
        "launch(one, read=(a, 8))\nlaunch(two, read=(a, 8))\nrecord(event, one)\nrecord(other, two)\n"
        "wait(three, event)\n{}\nlaunch(three, write=(a, 8))",
        "wait(three, other)",
        ["stream 1"],
    ),
    "a use after free": (
        "use after free",
        "{}\nlaunch(one, read=(a, 16))",
        "keep = True",
        ["reads 16 bytes", "allocation of 4096 bytes that was freed"],
    ),
    "an access beyond the end": (
        "out of bounds",
        "{}\nlaunch(one, write=(a + 4000, bytes))",
        "bytes = 96",
        ["beyond the allocation of 4096 bytes"],
    ),
    "a free while a stream may read": (
        "free while in use",
        "launch(one, 'aclnnReader', read=(a, 8))\n{}\nfree(a)",
        "synchronize(one)",
        ["aclnnReader", "has not waited"],
    ),
    "a free of host memory that is copied from": (
        "free while in use",
        "copy(a, host, 8, HOST_TO_DEVICE, one)\n{}\ncall('aclrtFreeHost', c_void_p(host))",
        "synchronize(one)",
        ["host memory"],
    ),
    "an event destroyed while pending": (
        "event destroyed while pending",
        "old = c_void_p()\ncall('aclrtCreateEvent', byref(old))\n"
        "launch(one, write=(a, 8))\nrecord(old, one)\n{}\ncall('aclrtDestroyEvent', old)",
        "call('aclrtSynchronizeEvent', old)",
        ["stream 0"],
    ),
    "a wait for an event that is gone": (
        "use of a destroyed event",
        "record(event, one)\n{}\nwait(two, event)\ncall('aclrtDestroyEvent', event) if not early else None",
        "early = False",
        ["aclrtStreamWaitEvent"],
    ),
    "a stream destroyed while busy": (
        "stream destroyed while busy",
        "launch(one, write=(a, 8))\n{}\ncall('aclrtDestroyStream', one)",
        "synchronize(one)",
        ["stream 0"],
    ),
}
# What stands where the missing line would be.
INSTEAD = {
    "a wait for an event that is gone": "early = True; call('aclrtDestroyEvent', event)",
    "a wait before the record": "wait(two, event); early = True",
    "a use after free": "free(a)",
    "an access beyond the end": "bytes = 97",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_the_process_and_the_same_program_without_it_runs(run: Run, mistake: str) -> None:
    kind, program, remedy, parts = MISTAKES[mistake]
    wrong = run(START + program.format(INSTEAD.get(mistake, "")))
    assert wrong.returncode == -signal.SIGABRT, wrong.stderr
    assert f"simulated Ascend: rank 0: {kind}: " in wrong.stderr
    for part in parts:
        assert part in wrong.stderr, wrong.stderr

    for seed in ("", "1"):
        right = run(START + program.format(remedy), TT_SIM_DELAY=seed)
        assert right.returncode == 0, right.stderr
        assert "rank 0" not in right.stderr


def test_reported_mistakes_are_counted(run: Run) -> None:
    done = run(
        START
        + "for _ in range(3):\n  launch(one, write=(a, 8))\n  launch(two, write=(a, 8))\n"
        + "print(statistics()['violations'])",
        TT_SIM_CHECKS="report",
    )
    assert done.returncode == 0 and done.stdout.strip() == "{'race': 5}", done.stdout + done.stderr


def test_host_dereference_of_card_memory(run: Run) -> None:
    done = run(START + "ctypes.string_at(a + 40, 1)")
    assert done.returncode == -signal.SIGSEGV
    assert "host dereference of simulated card address 0x" in done.stderr
    assert "(card 0, allocation of 4096 bytes)" in done.stderr

    done = run(START + "free(b)\nctypes.memset(b, 0, 1)")
    assert done.returncode == -signal.SIGSEGV and "not allocated" in done.stderr


def test_a_fault_that_is_none_of_ours_says_nothing(run: Run) -> None:
    done = run(START + "ctypes.string_at(8, 1)")
    assert done.returncode == -signal.SIGSEGV and "host dereference" not in done.stderr


def test_races_are_those_of_a_model(run: Run) -> None:
    """Random programs on three streams. The model keeps every access and every clock, and drops nothing."""
    program = START + MODEL
    done = run(program, TT_SIM_CHECKS="report", timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    racy, clean = map(int, done.stdout.split())
    assert racy > 50 and clean > 50, done.stdout


MODEL = """
import random

streams = [one, two, three]
HOST = 3
def races():
    return statistics()["violations"].get("race", 0)

def program(random):
    clocks = [[0] * 3 for _ in range(4)]
    records = [None, None]
    events = [event, other]
    history = []
    ordered = random.random() * 0.8
    for step in range(random.randrange(3, 40)):
        which = random.randrange(3)
        dice = random.random()
        if dice < 0.15:
            records_at = random.randrange(2)
            record(events[records_at], streams[which])
            records[records_at] = list(join(clocks[which], clocks[HOST]))
        elif dice < 0.15 + ordered:
            target = random.randrange(2)
            wait(streams[which], events[target])
            if records[target]:
                clocks[which] = join(join(clocks[which], clocks[HOST]), records[target])
        elif dice < 0.18 + ordered and random.random() < 0.3:
            synchronize(streams[which])
            clocks[HOST] = join(clocks[HOST], clocks[which])
        else:
            begin = random.randrange(0, 40)
            size = random.randrange(1, 24)
            writes = random.random() < 0.4
            before = races()
            launch(streams[which], **{"write" if writes else "read": (a + begin, size)})
            clocks[which] = join(clocks[which], clocks[HOST])
            clocks[which][which] += 1
            expected = any(
                (writes or w) and b < begin + size and begin < b + s and clocks[which][stream] < time
                for stream, time, b, s, w in history)
            assert (races() > before) == expected, (step, history, which, begin, size, writes)
            if expected:
                return True
            history.append((which, clocks[which][which], begin, size, writes))
    return False

def join(x, y):
    return [max(pair) for pair in zip(x, y)]

count = 0
for seed in range(400):
    call("aclrtSynchronizeDevice")
    for e in (event, other):
        call("aclrtResetEvent", e, one)
    count += program(random.Random(seed))
print(count, 400 - count)
"""
