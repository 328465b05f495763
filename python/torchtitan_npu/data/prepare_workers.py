"""Encodes chunks in this process or in several, in the order of the input."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_encode import Options, Summary, encode_chunk
from torchtitan_npu.data.prepare_output import Payload, payload_of
from torchtitan_npu.data.prepare_read import Chunk
from torchtitan_npu.data.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Done = tuple[Chunk, Payload | None, Summary]


def encode_all(chunks: Iterator[Chunk], options: Options, tokenizer: Tokenizer, num_proc: int) -> Iterator[Done]:
    """Each chunk, without its data, with what is to be written (None: no document is left) and what became of it.

    Errors: DataError when a worker process dies; whatever reading ``chunks`` raises.
    """
    if num_proc == 1:
        for chunk in chunks:
            yield _without_data(chunk), *_encode(chunk, tokenizer, options)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe with the tokenizers' threads
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(options,))
    # A bounded queue: the input is read only as fast as it is encoded.
    pending: deque[tuple[Chunk, Future[tuple[Payload | None, Summary]]]] = deque()
    try:
        for chunk in chunks:
            pending.append((_without_data(chunk), pool.submit(_work, chunk)))
            if len(pending) >= 4 * num_proc:
                done, future = pending.popleft()
                yield done, *future.result()
        for done, future in pending:
            yield done, *future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"--num_proc {num_proc}: a worker process died (out of memory?); try a smaller --num_proc or "
            "--max_document_mb"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _encode(chunk: Chunk, tokenizer: Tokenizer, options: Options) -> tuple[Payload | None, Summary]:
    tokens, lengths, summary = encode_chunk(chunk, tokenizer, options)
    if not len(lengths):
        return None, summary
    return payload_of(tokens, lengths, options.output_format, tokenizer.vocab_size), summary


def _without_data(chunk: Chunk) -> Chunk:
    return replace(chunk, data=b"", dropped=[])


_worker: tuple[Tokenizer, Options] | None = None


def _start_worker(options: Options) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process is what --num_proc asks for
    _worker = (load_tokenizer(options.tokenizer), options)


def _end_with_parent() -> None:
    """A parent that is killed cannot stop the pool, and its workers would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _work(chunk: Chunk) -> tuple[Payload | None, Summary]:
    assert _worker is not None
    return _encode(chunk, *_worker)
