"""Simulated Ascend, the runtime: devices, memory, streams, events, callbacks, errors. Without torch."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from simulated import Run

START = "import acl, ctypes, os, time, threading\nfrom acl import *\nstart()\n"


def test_devices_contexts_and_versions(run_well: Run) -> None:
    run_well(
        """
        from acl import *
        count, device = ctypes.c_uint(), c_int()
        call("aclInit", None)
        assert fails(100002, lambda: call("aclInit", None))
        call("aclrtGetDeviceCount", byref(count))
        assert count.value == 3, count.value
        assert "set no device" in fails(CONTEXT_NULL, lambda: call("aclrtGetDevice", byref(device)))
        fails(107001, lambda: call("aclrtSetDevice", 3))
        call("aclrtSetDevice", 2)
        call("aclrtGetDevice", byref(device))
        assert device.value == 2

        import threading
        seen = []
        def other():
            seen.append(library.aclrtGetDevice(byref(c_int())))
            call("aclrtSetDevice", 0)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        call("aclrtGetDevice", byref(device))
        assert seen == [CONTEXT_NULL] and device.value == 2

        context = c_void_p()
        call("aclrtCreateContext", byref(context), 1)
        call("aclrtGetDevice", byref(device))
        assert device.value == 1
        call("aclrtDestroyContext", context)
        fails(CONTEXT_NULL, lambda: call("aclrtSetCurrentContext", context))

        version = ctypes.create_string_buffer(512)
        call("aclsysGetCANNVersion", 0, version)
        assert version.value == b"8.5.0"
        assert library.aclrtGetSocName() == b"Ascend910B2"
        assert library.aclrtGetLastError(0) == CONTEXT_NULL and library.aclrtGetLastError(0) == 0
        """,
        TT_SIM_NPUS="3",
    )


def test_visible_devices(run_well: Run) -> None:
    done = run_well(
        """
        from acl import *
        start(1)
        address = malloc(100)
        attributes = (ctypes.c_uint32 * 7)()
        call("aclrtPointerGetAttributes", c_void_p(address), attributes)
        assert list(attributes[:2]) == [2, 1], list(attributes)
        fails(107001, lambda: call("aclrtSetDevice", 2))
        """,
        ASCEND_RT_VISIBLE_DEVICES="5,2",
    )
    assert done.stderr.count("nothing here says anything about a real card") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("TT_SIM_NPUS", "many"), ("TT_SIM_MEMORY_MB", "0"), ("TT_SIM_CHECKS", "no"), ("TT_SIM_FAULT", "operator:x:y")],
)
def test_a_wrong_setting_is_an_error_that_names_it(run_well: Run, name: str, value: str) -> None:
    run_well(f"from acl import *\nassert '{name}={value}' in fails(500000, start)", **{name: value})


def test_memory_is_poisoned_and_limited(run_well: Run) -> None:
    run_well(
        START
        + """
free_before, total = memory_info()
assert free_before == total == 64 << 20
one = malloc(1000)
assert one % 512 == 0 and download(one, 1000) == b"\\xff" * 1000
upload(b"abc", one + 5)
assert download(one + 4, 5) == b"\\xffabc\\xff"
message = fails(OUT_OF_MEMORY, lambda: malloc(64 << 20))
assert "67108864 bytes" in message and "1024 of 67108864 bytes are in use" in message, message
two = malloc(63 << 20)
free(two)
three = malloc(63 << 20)  # what is freed can be had again, and what was in it is gone
assert three == two and download(three, 8) == b"\\xff" * 8
fails(107000, lambda: free(three + 512))
free(three)
fails(107000, lambda: free(three))
free(one)
assert memory_info() == (total, total)
memory = statistics()["memory"]["0"]
assert (memory["current_bytes"], memory["peak_bytes"]) == (0, (63 << 20) + 1024), memory
""",
        TT_SIM_MEMORY_MB="64",
    )


def test_freed_pieces_are_joined(run_well: Run) -> None:
    run_well(
        START
        + """
import random
random.seed(5)
held = {}
for step in range(3000):
    if held and random.random() < 0.5:
        free(held.pop(random.choice(list(held))))
    else:
        size = random.choice([1, 500, 4096, 100_000])
        address = malloc(size)
        assert all(address + size <= other or other + held_size <= address
                   for other, held_size in ((a, 1) for a in held))
        held[address] = address
for address in held:
    free(address)
whole = malloc(64 << 20)
""",
        TT_SIM_MEMORY_MB="64",
    )


def test_copies_of_every_kind(run_well: Run) -> None:
    run_well(
        START
        + """
stream = create_stream()
card, host = malloc(64), malloc_host(64)
ctypes.memset(host, 7, 64)
copy(card, host, 64, HOST_TO_DEVICE, stream)
copy(card + 32, card, 16, DEVICE_TO_DEVICE, stream)
synchronize(stream)
ctypes.memset(host, 0, 64)
copy(host, card, 64, DEFAULT, stream)
synchronize(stream)
assert ctypes.string_at(host, 64) == b"\\x07" * 64
call("aclrtMemsetAsync", c_void_p(card), c_size_t(64), 3, c_size_t(10), stream)
synchronize(stream)
assert download(card, 12) == b"\\x03" * 10 + b"\\x07" * 2
# 3 rows of 4 bytes, 16 apart on the card and 4 apart on the host
call("aclrtMemcpy2dAsync", c_void_p(host), c_size_t(4), c_void_p(card), c_size_t(16), c_size_t(4), c_size_t(3), 2,
     stream)
synchronize(stream)
assert ctypes.string_at(host, 12) == b"\\x03" * 4 + b"\\x07" * 8
assert "d2h" in fails(100000, lambda: copy(host, card, 8, HOST_TO_DEVICE))
fails(100000, lambda: call("aclrtMemcpy", c_void_p(card), c_size_t(3), c_void_p(host), c_size_t(4), 1))
copies = statistics()["copies"]
assert copies["h2d"]["bytes"] == 64 and copies["d2d"]["bytes"] == 16 and copies["d2h"] == {"calls": 3, "bytes": 88}
"""
    )


def test_streams_are_asynchronous_and_in_order(run_well: Run) -> None:
    run_well(
        START
        + """
stream, other = create_stream(), create_stream()
gate, order = threading.Event(), []
host_function(stream, gate.wait)
for number in range(50):
    host_function(stream, lambda number=number: order.append(number))
assert not stream_is_idle(stream) and order == []
fails(SYNC_TIMEOUT, lambda: synchronize(stream, 20))
host_function(other, lambda: order.append("other"))
synchronize(other)
assert order == ["other"]
gate.set()
synchronize(stream)
assert order[1:] == list(range(50)) and stream_is_idle(stream)
fails(107000, lambda: synchronize(c_void_p(1)))
for made in (stream, other):
    call("aclrtDestroyStream", made)
fails(107000, lambda: synchronize(stream))
"""
    )


def test_default_stream_and_device_synchronisation(run_well: Run) -> None:
    run_well(
        START
        + """
done = []
host_function(c_void_p(), lambda: (time.sleep(0.05), done.append(1)))
call("aclrtSynchronizeDevice")
assert done == [1]
host_function(c_void_p(), lambda: (time.sleep(0.05), done.append(2)))
call("aclrtSynchronizeStream", c_void_p())
assert done == [1, 2]
"""
    )


def test_a_wait_refers_to_the_record_submitted_before_it(run_well: Run) -> None:
    run_well(
        START
        + """
first, second = create_stream(), create_stream()
gates, order = [threading.Event() for _ in range(3)], []
event = create_event()

# Nothing recorded yet: the wait is none, although a record follows.
wait(second, event)
host_function(first, gates[0].wait)
record(event, first)
host_function(second, lambda: order.append("not held up"))
synchronize(second, 5000)
assert not query_event(event)

# Recorded: held up, also when the event is recorded again behind another gate.
wait(second, event)
host_function(second, lambda: order.append("after the first record"))
host_function(first, gates[1].wait)
record(event, first)
gates[0].set()
synchronize(second, 5000)
assert order == ["not held up", "after the first record"]
assert not query_event(event)
wait(second, event)
host_function(second, lambda: order.append("after the second record"))
fails(SYNC_TIMEOUT, lambda: synchronize(second, 50))
gates[1].set()
synchronize(second)
assert order[-1] == "after the second record" and query_event(event)
call("aclrtSynchronizeEvent", event)
call("aclrtResetEvent", event, first)
assert not query_event(event)

# Destroyed while it is pending: the wait still holds.
host_function(first, gates[2].wait)
record(event, first)
wait(second, event)
call("aclrtDestroyEvent", event)
host_function(second, lambda: order.append("after the last record"))
fails(SYNC_TIMEOUT, lambda: synchronize(second, 50))
gates[2].set()
synchronize(second)
assert order[-1] == "after the last record"
fails(107000, lambda: record(c_void_p(1), first))
"""
    )


def test_times_of_events(run_well: Run) -> None:
    run_well(
        START
        + """
stream = create_stream()
begin, end, untimed = create_event(TIMED), create_event(TIMED), create_event()
record(begin, stream)
host_function(stream, lambda: time.sleep(0.05))
record(end, stream)
fails(507006, lambda: elapsed(begin, end))
record(untimed, stream)
synchronize(stream)
assert 50 <= elapsed(begin, end) < 1000, elapsed(begin, end)
assert timestamp(end) - timestamp(begin) >= 50_000
fails(107006, lambda: elapsed(begin, untimed))
"""
    )


def test_callbacks_run_on_the_thread_that_subscribed(run_well: Run) -> None:
    run_well(
        START
        + """
stream = create_stream()
fails(100034, lambda: call("aclrtLaunchCallback", HostFunction(lambda _: None), None, 1, stream))
ran, stop = [], threading.Event()
def serve():
    ready.set()
    while not stop.is_set():
        library.aclrtProcessReport(50)
ready = threading.Event()
thread = threading.Thread(target=serve)
thread.start()
ready.wait()
call("aclrtSubscribeReport", c_uint64(thread.ident), stream)
callback = HostFunction(lambda _: ran.append(threading.get_ident()))
call("aclrtLaunchCallback", callback, None, 1, stream)
synchronize(stream)  # the callback blocks the stream
assert ran == [thread.ident]
call("aclrtUnSubscribeReport", c_uint64(thread.ident), stream)
stop.set()
thread.join()
fails(100035, lambda: call("aclrtProcessReport", 10))
"""
    )


@pytest.mark.usefixtures("launcher")
def test_a_failed_task_poisons_what_depends_on_it(run_well: Run) -> None:
    run_well(
        START
        + """
bad, follower, free_stream = create_stream(), create_stream(), create_stream()
event = create_event()
ran = []
launch(bad, "aclnnBroken", result=OPERATOR_FAILED, microseconds=20_000)
host_function(bad, lambda: ran.append("bad"))
record(event, bad)
wait(follower, event)
host_function(follower, lambda: ran.append("follower"))
host_function(free_stream, lambda: ran.append("free"))
synchronize(free_stream)
assert "aclnnBroken failed on stream 0 of simulated card 0" in fails(OPERATOR_FAILED, lambda: synchronize(bad))
fails(OPERATOR_FAILED, lambda: synchronize(follower))
fails(OPERATOR_FAILED, lambda: call("aclrtSynchronizeEvent", event))
fails(OPERATOR_FAILED, lambda: synchronize(bad))
fails(OPERATOR_FAILED, lambda: launch(bad))
fails(OPERATOR_FAILED, lambda: call("aclrtSynchronizeDevice"))
assert ran == ["free"]
""",
    )


@pytest.mark.usefixtures("launcher")
def test_faults_by_name_number_and_rank(run_well: Run) -> None:
    program = (
        START
        + """
stream = create_stream()
for name in ("aclnnAdd", "aclnnMul", "aclnnAdd"):
    launch(stream, name)
    synchronize(stream)
launch(stream, "aclnnMul")
if os.environ["RANK"] == "1":
    assert "aclnnMul failed" in fails(OPERATOR_FAILED, lambda: synchronize(stream))
    assert library.aclGetRecentErrMsg() == b""
else:
    synchronize(stream)
malloc(10)
assert "TT_SIM_FAULT made it fail" in fails(OUT_OF_MEMORY, lambda: malloc(10))
malloc(10)
"""
    )
    for rank in "01":
        run_well(program, RANK=rank, TT_SIM_FAULT="operator:aclnnMul:2:rank1,oom:2")


def test_peer_death(run: Run) -> None:
    done = run(
        START + "stream = create_stream()\nfor n in range(9): print(n, flush=True); host = malloc_host(8); "
        "call('aclrtMemsetAsync', c_void_p(host), c_size_t(8), 0, c_size_t(8), stream)",
        TT_SIM_FAULT="peer_death:4",
    )
    assert done.returncode == -signal.SIGKILL and done.stdout.split() == list("0123")


def test_statistics_are_written_at_exit_and_on_request(run_well: Run, tmp_path: Path, launcher: Path) -> None:
    program = START + "stream = create_stream()\nlaunch(stream, 'aclnnAdd')\nlaunch(stream, 'aclnnAdd')\nmalloc(1)\n"
    endings = ["", "call('aclFinalize')", "library.sim_write_statistics(); os._exit(0)"]
    for number, ending in enumerate(endings):
        run_well(program + ending, RANK="3", TT_SIM_STATS=str(tmp_path / f"{number}-%r.json"))
        found = json.loads((tmp_path / f"{number}-3.json").read_text())
        assert found["rank"] == 3 and found["violations"] == {} and found["memory"]["0"]["peak_bytes"] == 512
        assert found["operators"] == {"aclnnAdd": {"launches": 2, "bytes_written": 0}}
    run_well(program + "library.sim_reset_statistics()\nassert statistics()['operators'] == {}")


def test_old_operators_fail_loudly(run_well: Run) -> None:
    done = run_well(
        START
        + """
message = fails(100024, lambda: call("aclopCompileAndExecute", b"ScatterElements", *[None] * 11))
assert "ScatterElements" in message
assert "aclrtReserveMemAddress" in fails(200006, lambda: call("aclrtReserveMemAddress", *[None] * 5))
"""
    )
    assert "'ScatterElements' was asked for" in done.stderr


@pytest.mark.usefixtures("launcher")
def test_delays_change_the_speed_and_not_the_result(run_well: Run) -> None:
    program = (
        START
        + """
streams, data = [create_stream() for _ in range(3)], [malloc(8) for _ in range(3)]
interleaving = []
for step in range(200):
    for which, stream in enumerate(streams):
        launch(stream, write=(data[which], 8), value=step)
        host_function(stream, lambda which=which: interleaving.append(which))
call("aclrtSynchronizeDevice")
assert all(download(address, 8) == bytes([199]) * 8 for address in data)
print(interleaving)
"""
    )
    seen = {run_well(program, TT_SIM_DELAY=seed).stdout for seed in "123"}
    assert len(seen) > 1
