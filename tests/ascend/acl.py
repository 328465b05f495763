"""libascendcl through ctypes, for the programs that tests run in processes of their own."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT = range(5)
TIMED = 8  # flag of an event

CONTEXT_NULL = 107002
OUT_OF_MEMORY = 207001
OPERATOR_FAILED = 507015
SYNC_TIMEOUT = 507046

library = ctypes.CDLL(os.path.join(os.environ["ASCEND_HOME_PATH"], "lib64", "libascendcl.so"))
library.aclGetRecentErrMsg.restype = c_char_p
library.aclrtGetSocName.restype = c_char_p
library.sim_statistics_json.restype = c_size_t
HostFunction = ctypes.CFUNCTYPE(None, c_void_p)
kept: list[Any] = []  # callbacks, which must outlive their call


class AclError(RuntimeError):
    def __init__(self, name: str, code: int) -> None:
        self.code = code
        self.message = message()
        super().__init__(f"{name}: {code}: {self.message}")


def message() -> str:
    return (library.aclGetRecentErrMsg() or b"").decode()


def call(name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        raise AclError(name, code)


def fails(code: int, function: Callable[[], Any]) -> str:
    """The message of the error `code`, which the function must raise."""
    try:
        function()
    except AclError as error:
        assert error.code == code, error
        return error.message
    raise AssertionError(f"error {code} was expected")


def start(device: int = 0) -> None:
    call("aclInit", None)
    call("aclrtSetDevice", device)


def malloc(size: int) -> int:
    address = c_void_p()
    call("aclrtMalloc", byref(address), c_size_t(size), 0)
    assert address.value
    return address.value


def free(address: int) -> None:
    call("aclrtFree", c_void_p(address))


def malloc_host(size: int) -> int:
    address = c_void_p()
    call("aclrtMallocHost", byref(address), c_size_t(size))
    assert address.value
    return address.value


def create_stream() -> c_void_p:
    stream = c_void_p()
    call("aclrtCreateStreamWithConfig", byref(stream), 0, 3)
    return stream


def create_event(flags: int = 0) -> c_void_p:
    event = c_void_p()
    call("aclrtCreateEventExWithFlag", byref(event), c_uint(flags))
    return event


def record(event: c_void_p, stream: c_void_p) -> None:
    call("aclrtRecordEvent", event, stream)


def wait(stream: c_void_p, event: c_void_p) -> None:
    call("aclrtStreamWaitEvent", stream, event)


def synchronize(stream: c_void_p, timeout: int = -1) -> None:
    call("aclrtSynchronizeStreamWithTimeout", stream, timeout)


def query_event(event: c_void_p) -> bool:
    status = c_int()
    call("aclrtQueryEventStatus", event, byref(status))
    return status.value == 1


def stream_is_idle(stream: c_void_p) -> bool:
    status = c_int()
    call("aclrtStreamQuery", stream, byref(status))
    return status.value == 0


def elapsed(start_event: c_void_p, end_event: c_void_p) -> float:
    result = c_float()
    call("aclrtEventElapsedTime", byref(result), start_event, end_event)
    return result.value


def host_function(stream: c_void_p, function: Callable[[], None]) -> None:
    callback = HostFunction(lambda _: function())
    kept.append(callback)
    call("aclrtLaunchHostFunc", stream, callback, None)


def copy(to: int, source: int, size: int, kind: int = DEFAULT, stream: c_void_p | None = None) -> None:
    """In no stream's order if there is none."""
    arguments = c_void_p(to), c_size_t(size), c_void_p(source), c_size_t(size), kind
    if stream is None:
        call("aclrtMemcpy", *arguments)
    else:
        call("aclrtMemcpyAsync", *arguments, stream)


def upload(data: bytes, to: int) -> None:
    buffer = ctypes.create_string_buffer(data, len(data))
    copy(to, ctypes.addressof(buffer), len(data), HOST_TO_DEVICE)


def download(address: int, size: int) -> bytes:
    buffer = ctypes.create_string_buffer(size)
    copy(ctypes.addressof(buffer), address, size, DEVICE_TO_HOST)
    return buffer.raw


def memory_info() -> tuple[int, int]:
    free_bytes, total = c_size_t(), c_size_t()
    call("aclrtGetMemInfo", 1, byref(free_bytes), byref(total))
    return free_bytes.value, total.value


def launch(
    stream: c_void_p,
    name: str = "aclnnTest",
    read: tuple[int, int] = (0, 0),
    write: tuple[int, int] = (0, 0),
    value: int = 0,
    microseconds: int = 0,
    result: int = 0,
) -> None:
    """An operator that reads and writes these (address, bytes); see launcher.cpp."""
    code = ctypes.CDLL(os.environ["TEST_LAUNCHER"]).launch(
        stream,
        name.encode(),
        c_void_p(read[0]),
        c_size_t(read[1]),
        c_void_p(write[0]),
        c_size_t(write[1]),
        value,
        microseconds,
        result,
    )
    if code != 0:
        raise AclError(name, code)


def statistics() -> dict[str, Any]:
    import json

    size = library.sim_statistics_json(None, c_size_t(0))
    text = ctypes.create_string_buffer(size)
    library.sim_statistics_json(text, c_size_t(size))
    return json.loads(text.value)


def timestamp(event: c_void_p) -> int:
    result = c_uint64()
    call("aclrtEventGetTimestamp", event, byref(result))
    return result.value
