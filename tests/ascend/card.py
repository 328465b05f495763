"""A simulated card and its communicators, through the C interfaces that a real card has."""

from __future__ import annotations

import ctypes
import os
import time
from ctypes import byref, c_char_p, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

# HcclDataType
INT8, INT16, INT32, FP16, FP32, INT64, UINT64, UINT8, UINT16, UINT32, FP64, BF16 = range(12)
NUMPY = {
    INT8: np.int8, INT16: np.int16, INT32: np.int32, FP16: np.float16, FP32: np.float32, INT64: np.int64,
    UINT64: np.uint64, UINT8: np.uint8, UINT16: np.uint16, UINT32: np.uint32, FP64: np.float64, BF16: np.uint16,
}  # fmt: skip
SUM, PROD, MAX, MIN = range(4)


class Failure(Exception):
    def __init__(self, function: str, code: int, message: str) -> None:
        super().__init__(f"{function} -> {code}: {message}")
        self.code = code


class RootInfo(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 4108)]


class Config(ctypes.Structure):
    _fields_ = [("head", ctypes.c_uint8 * 24), ("buffer_size", c_uint32), ("rest", ctypes.c_uint8 * 2212)]

    def __init__(self, buffer_size: int = 0xFFFFFFFF, name: bytes = b"", exec_timeout: int = -1) -> None:
        super().__init__()
        ctypes.memset(byref(self), 0, 2240)
        view = (ctypes.c_uint8 * 2240).from_buffer(self)
        view[0:24] = np.array([2240, (10 << 32) | 0xF0F0F0F0, 0], dtype=np.uint64).tobytes()
        view[24:28] = np.uint32(buffer_size).tobytes()
        view[32 : 32 + len(name)] = name
        view[316:320] = np.int32(exec_timeout).tobytes()


class SendRecvItem(ctypes.Structure):
    _fields_ = [("kind", c_int), ("buf", c_void_p), ("count", c_uint64), ("type", c_int), ("peer", c_uint32)]


class Array:
    """Elements on a card."""

    def __init__(self, card: Card, address: int, count: int, dtype: Any) -> None:
        self.card, self.address, self.count, self.dtype = card, address, count, np.dtype(dtype)

    def __getitem__(self, part: slice) -> Array:
        begin, end, _ = part.indices(self.count)
        return Array(self.card, self.address + begin * self.dtype.itemsize, end - begin, self.dtype)

    def numpy(self) -> np.ndarray:
        host = np.zeros(self.count, self.dtype)
        if self.count:
            self.card.acl("aclrtMemcpy", host.ctypes.data_as(c_void_p), c_size_t(host.nbytes), c_void_p(self.address),
                          c_size_t(host.nbytes), 2)  # fmt: skip
        return host


class Card:
    def __init__(self, number: int | None = None) -> None:
        self._acl = ctypes.CDLL("libascendcl.so", mode=ctypes.RTLD_GLOBAL)
        self._hccl = ctypes.CDLL("libhccl.so")
        self._acl.aclGetRecentErrMsg.restype = c_char_p
        self._hccl.HcclGetErrorString.restype = c_char_p
        self.number = int(os.environ["LOCAL_RANK"]) if number is None else number
        self._acl.aclInit(None)
        self.acl("aclrtSetDevice", self.number)
        self.stream = self.new_stream()

    def message(self) -> str:
        return (self._acl.aclGetRecentErrMsg() or b"").decode()

    def acl(self, function: str, *arguments: Any) -> None:
        code = getattr(self._acl, function)(*arguments)
        if code != 0:
            raise Failure(function, code, self.message())

    def hccl(self, function: str, *arguments: Any) -> None:
        code = getattr(self._hccl, function)(*arguments)
        if code != 0:
            raise Failure(function, code, self.message())

    def new_stream(self) -> c_void_p:
        stream = c_void_p()
        self.acl("aclrtCreateStream", byref(stream))
        return stream

    def empty(self, count: int, dtype: Any) -> Array:
        address = c_void_p()
        self.acl("aclrtMalloc", byref(address), c_size_t(max(count, 1) * np.dtype(dtype).itemsize), 0)
        assert address.value
        return Array(self, address.value, count, dtype)

    def array(self, values: np.ndarray) -> Array:
        made = self.empty(values.size, values.dtype)
        self.write(made, values)
        return made

    def write(self, array: Array, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values, array.dtype)
        if values.size:
            self.acl("aclrtMemcpy", c_void_p(array.address), c_size_t(values.nbytes), values.ctypes.data_as(c_void_p),
                     c_size_t(values.nbytes), 1)  # fmt: skip

    def synchronize(self, stream: c_void_p | None = None) -> None:
        self.acl("aclrtSynchronizeStream", stream or self.stream)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.acl("aclrtGetMemInfo", 1, byref(free), byref(total))
        return free.value


def exchange_root_info(card: Card, rank: int, name: str = "root") -> RootInfo:
    """Rank 0 makes one, and the others read it from the directory that the test gave."""
    path = Path(os.environ["TT_TEST_DIR"]) / name
    info = RootInfo()
    if rank == 0:
        card.hccl("HcclGetRootInfo", byref(info))
        part = path.with_suffix(".part")
        part.write_bytes(bytes(info))
        part.rename(path)
        return info
    for _ in range(3000):
        if path.exists():
            ctypes.memmove(byref(info), path.read_bytes(), 4108)
            return info
        time.sleep(0.01)
    raise TimeoutError(path)


class Communicator:
    """Methods have the names and the argument order of HCCL, with arrays for addresses."""

    def __init__(self, card: Card, handle: c_void_p) -> None:
        self.card, self.handle = card, handle
        size, rank = c_uint32(), c_uint32()
        card.hccl("HcclGetRankSize", handle, byref(size))
        card.hccl("HcclGetRankId", handle, byref(rank))
        self.ranks, self.rank = size.value, rank.value

    @staticmethod
    def join(card: Card, ranks: int, rank: int, name: str = "root", config: Config | None = None) -> Communicator:
        info = exchange_root_info(card, rank, name)
        handle = c_void_p()
        if config is None:
            card.hccl("HcclCommInitRootInfo", c_uint32(ranks), byref(info), c_uint32(rank), byref(handle))
        else:
            card.hccl("HcclCommInitRootInfoConfig", c_uint32(ranks), byref(info), c_uint32(rank), byref(config),
                      byref(handle))  # fmt: skip
        return Communicator(card, handle)

    @staticmethod
    def world(card: Card, **more: Any) -> Communicator:
        return Communicator.join(card, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), **more)

    def split(self, members: list[int], number: int = 1) -> Communicator | None:
        handle = c_void_p()
        ids = (c_uint32 * len(members))(*members)
        config = Config()
        if self.rank not in members:
            self.card.hccl("HcclCreateSubCommConfig", byref(self.handle), 0, None, c_uint64(0xFFFFFFFF),
                           c_uint32(0xFFFFFFFF), byref(config), byref(handle))  # fmt: skip
            assert not handle.value
            return None
        self.card.hccl("HcclCreateSubCommConfig", byref(self.handle), len(members), ids, c_uint64(number),
                       c_uint32(members.index(self.rank)), byref(config), byref(handle))  # fmt: skip
        return Communicator(self.card, handle)

    def call(self, function: str, *arguments: Any, stream: c_void_p | None = None) -> None:
        converted: list[Any] = []
        for argument in arguments:
            if isinstance(argument, Array):
                converted.append(c_void_p(argument.address))
            elif isinstance(argument, list):
                converted.append((c_uint64 * len(argument))(*argument))
            else:
                converted.append(None if argument is None else c_uint64(argument))
        self.card.hccl(function, *converted, self.handle, stream or self.card.stream)

    def batch(self, items: list[tuple[int, Array, int, int]]) -> None:
        made = (SendRecvItem * len(items))()
        for slot, (kind, array, dtype, peer) in zip(made, items, strict=True):
            slot.kind, slot.buf, slot.count, slot.type, slot.peer = kind, array.address, array.count, dtype, peer
        self.card.hccl("HcclBatchSendRecv", made, c_uint32(len(items)), self.handle, self.card.stream)

    def async_error(self) -> int:
        code = c_int32()
        self.card.hccl("HcclGetCommAsyncError", self.handle, byref(code))
        return code.value

    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self.card.hccl("HcclGetCommName", self.handle, text)
        return text.value.decode()

    def destroy(self) -> None:
        self.card.hccl("HcclCommDestroy", self.handle)
