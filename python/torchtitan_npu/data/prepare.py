"""Text files to a JSONL token file: one ``{"tokens": [...], "length": n}`` per document.

Input formats:
  ``text``   one document per line, UTF-8.
  ``jsonl``  one JSON object per line with a string field ``text``: the way to have newlines inside a document.
  ``auto``   (default) ``jsonl`` for files that end in .jsonl or .json, ``text`` for all others.

Each document is stripped, encoded with the tokenizer's special tokens, given an EOS where ``--eos`` asks for one, and
cut at ``--max_seq_len``. A cut document therefore has no EOS: its text does not end there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import atomic_write, expand_paths
from torchtitan_npu.data.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LEN = 8192
_CHUNK_BYTES = 1 << 20
_PROGRESS_SECONDS = 10.0


@dataclass
class Summary:
    """What became of the input. ``dropped`` maps a reason to ``(count, first file:line)``."""

    documents: int = 0
    tokens: int = 0
    largest_id: int = -1
    cut_documents: int = 0
    cut_tokens: int = 0
    dropped: dict[str, tuple[int, str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        count, first = self.dropped.get(reason, (0, where))
        self.dropped[reason] = (count + 1, first)

    def add(self, other: Summary) -> None:
        """Adds a later part of the same input."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.largest_id = max(self.largest_id, other.largest_id)
        self.cut_documents += other.cut_documents
        self.cut_tokens += other.cut_tokens
        for reason, (more, where) in other.dropped.items():
            count, first = self.dropped.get(reason, (0, where))
            self.dropped[reason] = (count + more, first)


@dataclass(frozen=True)
class Options:
    """How a document becomes tokens. ``max_seq_len`` None: never cut. ``eos``: append the tokenizer's EOS."""

    tokenizer: str
    max_seq_len: int | None = DEFAULT_MAX_SEQ_LEN
    eos: bool = False


@dataclass(frozen=True)
class _Chunk:
    file: str
    format: str  # "text" or "jsonl"
    first_line: int
    lines: list[bytes]


def prepare(
    inputs: Sequence[Path], output: Path, options: Options, *, input_format: str = "auto", num_proc: int = 1
) -> Summary:
    """Writes ``output`` from ``inputs``, in order; the result does not depend on ``num_proc``.

    ``output`` appears whole or not at all; an older file stays until then.
    Errors: DataError (no document left, the tokenizer, a place that cannot be written).
    """
    tokenizer = load_tokenizer(options.tokenizer)
    if options.eos and tokenizer.eos_id is None:
        raise DataError(
            f"--eos: tokenizer {tokenizer.name} names no end-of-document token; set eos_token in its "
            "tokenizer_config.json, or leave --eos out"
        )
    total = Summary()
    read_bytes = 0
    started = last_report = time.monotonic()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(output) as file:
            chunks = _read_chunks(inputs, input_format)
            for size, encoded, part in _encode_all(chunks, options, tokenizer, num_proc):
                file.write(encoded)
                total.add(part)
                read_bytes += size
                now = time.monotonic()
                if now - last_report >= _PROGRESS_SECONDS:
                    last_report = now
                    logger.info("%s", _progress(total, read_bytes, now - started))
            if total.documents == 0:
                reasons = "; ".join(_describe_drops(total)) or "the input is empty"
                raise DataError(f"--input: no document left to write ({reasons}); {output} is not written")
    except OSError as error:
        raise DataError(f"{output} is not written: {error}") from error
    logger.info("%s", _progress(total, read_bytes, time.monotonic() - started))
    _log_summary(total, output, tokenizer, options)
    return total


def encode_chunk(chunk: _Chunk, tokenizer: Tokenizer, options: Options) -> tuple[bytes, Summary]:
    """JSONL bytes of a run of input lines, and what became of them."""
    summary = Summary()
    texts: list[str] = []
    for number, line in enumerate(chunk.lines, chunk.first_line):
        text, reason = _document(line, chunk.format)
        if reason:
            summary.drop(reason, f"{chunk.file}:{number}")
        else:
            texts.append(text)
    rows: list[str] = []
    for ids in tokenizer.encode_batch(texts) if texts else []:
        if options.eos and tokenizer.eos_id is not None and (not ids or ids[-1] != tokenizer.eos_id):
            ids.append(tokenizer.eos_id)
        if options.max_seq_len is not None and len(ids) > options.max_seq_len:
            summary.cut_documents += 1
            summary.cut_tokens += len(ids) - options.max_seq_len
            del ids[options.max_seq_len :]
        if not ids:
            summary.drop("no tokens: the tokenizer knows none of its characters", chunk.file)
            continue
        summary.documents += 1
        summary.tokens += len(ids)
        summary.largest_id = max(summary.largest_id, *ids)
        rows.append(json.dumps({"tokens": ids, "length": len(ids)}, separators=(",", ":")))
    return "".join(row + "\n" for row in rows).encode("ascii"), summary


def _document(line: bytes, kind: str) -> tuple[str, str]:
    """(text, "") or ("", why the line is dropped)."""
    try:
        text = line.decode("utf-8").strip()
    except UnicodeDecodeError:
        return "", "not UTF-8"
    if not text:
        return "", "empty line"
    if kind == "text":
        return text, ""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return "", "not JSON"
    value = record.get("text") if isinstance(record, dict) else None
    if not isinstance(value, str):
        return "", 'no string field "text"'
    text = value.strip()
    if not text:
        return "", "empty text"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", "unpaired surrogate in the text"
    return text, ""


def _read_chunks(inputs: Iterable[Path], input_format: str) -> Iterator[_Chunk]:
    for path in inputs:
        kind = input_format
        if kind == "auto":
            kind = "jsonl" if path.suffix in (".jsonl", ".json") else "text"
        number = 1
        with path.open("rb") as file:
            if file.read(3) != b"\xef\xbb\xbf":  # a byte order mark is not part of the first document
                file.seek(0)
            while lines := file.readlines(_CHUNK_BYTES):
                yield _Chunk(str(path), kind, number, lines)
                number += len(lines)


def _encode_all(
    chunks: Iterator[_Chunk], options: Options, tokenizer: Tokenizer, num_proc: int
) -> Iterator[tuple[int, bytes, Summary]]:
    if num_proc == 1:
        for chunk in chunks:
            yield sum(map(len, chunk.lines)), *encode_chunk(chunk, tokenizer, options)
        return
    context = multiprocessing.get_context("spawn")  # fork is unsafe with the tokenizers' threads
    pool = ProcessPoolExecutor(num_proc, context, initializer=_start_worker, initargs=(options,))
    # A bounded queue: the input is read only as fast as it is encoded.
    pending: deque[tuple[int, Future[tuple[bytes, Summary]]]] = deque()
    try:
        for chunk in chunks:
            pending.append((sum(map(len, chunk.lines)), pool.submit(_work, chunk)))
            if len(pending) >= 2 * num_proc:
                size, future = pending.popleft()
                yield size, *future.result()
        for size, future in pending:
            yield size, *future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"--num_proc {num_proc}: a worker process died (out of memory?); try a smaller --num_proc"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, Options] | None = None


def _start_worker(options: Options) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the pool
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process is what --num_proc asks for
    _worker = (load_tokenizer(options.tokenizer), options)


def _work(chunk: _Chunk) -> tuple[bytes, Summary]:
    assert _worker is not None
    return encode_chunk(chunk, *_worker)


def _progress(total: Summary, read_bytes: int, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    return (
        f"{total.documents:,} documents, {total.tokens:,} tokens from {read_bytes / 1e6:,.1f} MB in {seconds:.1f} s "
        f"({read_bytes / 1e6 / seconds:,.1f} MB/s, {total.tokens / seconds:,.0f} tokens/s)"
    )


def _describe_drops(total: Summary) -> list[str]:
    return [f"{count:,} dropped: {reason} (first: {where})" for reason, (count, where) in total.dropped.items()]


def _log_summary(total: Summary, output: Path, tokenizer: Tokenizer, options: Options) -> None:
    for line in _describe_drops(total):
        logger.info("%s", line)
    if total.cut_documents:
        logger.info(
            "%s of %s documents were cut at max_seq_len %s: %s tokens are lost. --no_truncate keeps them; the "
            "trainer packs documents of any length",
            f"{total.cut_documents:,}",
            f"{total.documents:,}",
            options.max_seq_len,
            f"{total.cut_tokens:,}",
        )
    logger.info(
        "%s: %s documents, %s tokens, largest id %d. Tokenizer %s: model.vocab_size must be at least %d",
        output,
        f"{total.documents:,}",
        f"{total.tokens:,}",
        total.largest_id,
        tokenizer.name,
        max(tokenizer.vocab_size, total.largest_id + 1),
    )


def _inputs(pattern: str, output: Path) -> list[Path]:
    found = expand_paths(pattern, (".txt", ".jsonl", ".json"), "--input")
    target = os.path.realpath(output)
    kept = [path for path in found if os.path.realpath(path) != target]
    if not kept:
        raise DataError(f"--output {output} is the only --input; write the tokens to another file")
    if len(kept) < len(found):
        logger.info("%s is the output: not read as input", output)
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prepare_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", required=True, metavar="FILE|DIR|GLOB", help="text (DIR: *.txt, *.jsonl, *.json)")
    parser.add_argument("--output", required=True, type=Path, metavar="train.jsonl", help="the token file to write")
    parser.add_argument(
        "--tokenizer", required=True, metavar="byte|PATH", help="'byte', a tokenizer.json, or a Hugging Face directory"
    )
    parser.add_argument("--format", choices=("auto", "text", "jsonl"), default="auto", help="default: by file ending")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--max_seq_len", type=int, default=DEFAULT_MAX_SEQ_LEN, help="tokens kept (default: 8192)")
    length.add_argument("--no_truncate", action="store_true", help="keep documents of any length whole")
    parser.add_argument("--eos", action="store_true", help="end each document with the tokenizer's EOS")
    parser.add_argument("--num_proc", type=int, default=1, help="processes that encode (default: 1)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``prepare_data.py``. Returns the exit status: 0, 1 (bad data) or 130 (interrupted)."""
    parser = _parser()
    args = parser.parse_args(argv)
    for flag, value in (("--max_seq_len", args.max_seq_len), ("--num_proc", args.num_proc)):
        if value < 1:
            parser.error(f"{flag} {value}: must be at least 1")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    logger.setLevel(logging.INFO)
    options = Options(args.tokenizer, None if args.no_truncate else args.max_seq_len, args.eos)
    try:
        # SIGTERM must remove the temporary file too.
        with _raise_on_sigterm():
            inputs = _inputs(args.input, args.output)
            prepare(inputs, args.output, options, input_format=args.format, num_proc=args.num_proc)
    except DataError as error:
        logger.error("error: %s", error)
        return 1
    except KeyboardInterrupt:
        logger.error("interrupted; %s is not written", args.output)
        return 130
    return 0


@contextlib.contextmanager
def _raise_on_sigterm() -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
