"""Text files to a token file: JSONL with one ``{"tokens": [...], "length": n}`` per document, or the binary form.

Each document is stripped, encoded with the tokenizer's special tokens, given a BOS and an EOS or not, and cut at
``max_seq_len``. A cut document therefore has no EOS: its text does not end there.

``prepare_read`` reads, ``prepare_encode`` encodes, ``prepare_workers`` in several processes, ``prepare_output`` writes,
``prepare_journal`` remembers how far it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_encode import Options, Summary, check_special_tokens, describe_drops
from torchtitan_npu.data.prepare_journal import State, WorkDirectory
from torchtitan_npu.data.prepare_output import Output, open_output, targets
from torchtitan_npu.data.prepare_progress import Progress
from torchtitan_npu.data.prepare_read import Input, Position, find_inputs, read_chunks
from torchtitan_npu.data.prepare_workers import encode_all
from torchtitan_npu.data.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# What a kill costs at most, in work done again.
JOURNAL_SECONDS = 5.0


def prepare(
    inputs: Sequence[str], output: Path, options: Options, *, input_format: str = "auto", num_proc: int = 1
) -> Summary:
    """Writes ``output`` from ``inputs``, in order; the result does not depend on ``num_proc`` or on interruptions.

    ``output`` appears whole or not at all; an older file stays until then. A run that was stopped goes on where it was.

    Args:
        inputs: files, directories and globs.
        input_format: "auto", "text", "jsonl" or "parquet".
        num_proc: processes that encode.

    Errors: DataError (no document left, damaged input, the tokenizer, a place that cannot be written).
    """
    output = Path(os.path.realpath(output))  # a symbolic link keeps pointing at its target, which is what is replaced
    files = targets(output, options.output_format)
    work = WorkDirectory(output)
    found = find_inputs(inputs, input_format, [output, *files.values(), work.path])
    tokenizer = load_tokenizer(options.tokenizer)
    check_special_tokens(options, tokenizer)
    identity = _identity(found, options, tokenizer)
    try:
        with work:
            state = work.load(identity, files)
            if state is None or not state.finished:
                state = _run(found, options, tokenizer, work, identity, state, num_proc)
            work.publish(files)
    except OSError as error:
        raise DataError(f"{output} is not written: {error}. {work.kept()}") from error
    except BaseException:
        logger.info("%s is not written. %s", output, work.kept())
        raise
    _log_summary(state.summary, output, tokenizer, options)
    return state.summary


def _run(
    inputs: Sequence[Input],
    options: Options,
    tokenizer: Tokenizer,
    work: WorkDirectory,
    identity: dict[str, Any],
    state: State | None,
    num_proc: int,
) -> State:
    """Reads, encodes and writes what is left to do. Returns the finished state, with all data on the disk."""
    output, state = _open_output(options, tokenizer, work, state)
    position, read_bytes, summary = state.position, state.read_bytes, state.summary
    progress = Progress(sum(one.size for one in inputs), read_bytes, summary.tokens)
    stored = time.monotonic()
    try:
        chunks = read_chunks(inputs, position, options.text_field, options.max_document_mb << 20)
        for chunk, payload, part in encode_all(chunks, options, tokenizer, num_proc):
            if payload is not None:
                output.append(payload)
            summary.add(part)
            position, read_bytes = chunk.end, chunk.read_bytes
            progress.update(read_bytes, summary)
            if time.monotonic() - stored >= JOURNAL_SECONDS:
                work.store(identity, State(position, read_bytes, output.sync(), summary))
                stored = time.monotonic()
        if summary.documents == 0:
            work.discard()
            reasons = "; ".join(describe_drops(summary)) or "the input is empty"
            raise DataError(f"--input: no document left to write ({reasons}); nothing is written")
        output.finish(summary, tokenizer)
        finished = State(position, read_bytes, {}, summary, finished=True)
        work.store(identity, finished)
        logger.info("%s", progress.describe(read_bytes, summary))
        return finished
    finally:
        progress.close()
        output.close()


def _open_output(
    options: Options, tokenizer: Tokenizer, work: WorkDirectory, state: State | None
) -> tuple[Output, State]:
    """The files to go on writing, and from where."""

    def opened(at: dict[str, Any] | None) -> Output:
        return open_output(work.path, options.output_format, tokenizer.vocab_size, at)

    if state is not None:
        try:
            output = opened(state.output)
            logger.info("continuing the run that was stopped after %s documents", f"{state.summary.documents:,}")
            return output, state
        except (DataError, FileNotFoundError) as error:
            logger.info("the earlier run cannot be continued: %s. Starting anew", error)
            work.discard()
    return opened(None), State(Position(), 0, {}, Summary())


def _identity(inputs: Sequence[Input], options: Options, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a run must have in common with the one that it continues, as JSON gives it back."""
    values = {f"--{key}": value for key, value in asdict(options).items()}
    values["--format"] = values.pop("--output_format")
    values["--tokenizer"] = f"{tokenizer.name} ({tokenizer.fingerprint})"
    return {"inputs": [one.identity() for one in inputs], **values}


def _log_summary(total: Summary, output: Path, tokenizer: Tokenizer, options: Options) -> None:
    for line in describe_drops(total):
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
