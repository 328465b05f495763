"""Writing tensors in DCP's format: every file synced, and its checksum taken from the bytes on their way to it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Generator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.utils.serialization import config as serialization

from torchtitan_npu.checkpoint.manifest import FileSum, Sums


class SummingWriter(dcp.FileSystemWriter):
    """``sums`` has what this rank wrote: its tensors and, on rank 0 after the save, ``.metadata``."""

    def __init__(self, path: Path, *, file_per_tensor: bool = False) -> None:
        """``file_per_tensor``: else one file, of which DCP keeps all tensors until it is complete."""
        super().__init__(path, single_file_per_rank=not file_per_tensor, sync_files=True, overwrite=False)
        self.sums: Sums = {}
        self.fs = _SummingFileSystem(self.sums)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        # torch.save would spend more time on a checksum of its own than on writing. The setting is this thread's only.
        with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
            return super().write_data(*args, **kwargs)


class _SummingFileSystem(FileSystem):
    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with open(path, "wb", buffering=0) as raw, ThreadPoolExecutor(1) as beside:
            summing = _SummingStream(raw, beside)
            yield summing
            self._sums[Path(path).name] = FileSum(summing.tell(), summing.crc32)

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        self._sums[Path(new_path).name] = self._sums.pop(Path(path).name)


class _SummingStream(io.RawIOBase):
    """Writes in sequence to an unbuffered file, small pieces together; a thread beside takes the checksum meanwhile."""

    _BUFFER_BYTES = 1 << 20

    def __init__(self, raw: io.FileIO, beside: Executor) -> None:
        self._raw, self._beside = raw, beside
        self._pending = bytearray()
        self._position = 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._position += len(view)
        if len(view) < self._BUFFER_BYTES:
            self._pending += view
            if len(self._pending) >= self._BUFFER_BYTES:
                self.flush()
        else:
            self.flush()
            self._out(view)
        return len(view)

    def flush(self) -> None:
        if self._pending:
            self._out(memoryview(self._pending))
            self._pending = bytearray()

    def _out(self, view: memoryview) -> None:
        crc32 = self._beside.submit(zlib.crc32, view, self.crc32)  # without the interpreter lock, as writing is
        rest = view
        while rest:
            rest = rest[self._raw.write(rest) :]
        self.crc32 = crc32.result()

    def fileno(self) -> int:
        self.flush()
        return self._raw.fileno()
