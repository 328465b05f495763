"""Trains a byte-level BPE tokenizer on the user's own text, so that a start from nothing needs no download."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.prepare_encode import Summary, describe_drops, documents
from torchtitan_npu.data.prepare_progress import Progress
from torchtitan_npu.data.prepare_read import DEFAULT_MAX_DOCUMENT_MB, Input, Position, find_inputs, read_chunks

logger = logging.getLogger(__name__)

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
_BYTES = 256
# How Llama 3 cuts text into words: letters, up to three digits, punctuation, and space, each with what belongs to it.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class TrainOptions:
    """What to learn.

    Attributes:
        vocab_size: ids, special ones and the 256 bytes included.
        special_tokens: besides BOS, EOS and PAD, which have the ids 0, 1 and 2.
        sample_mb: read about this many MB of the files, evenly spread; None: all.
        input_format, text_field, max_document_mb: as in ``prepare``.
    """

    vocab_size: int
    special_tokens: tuple[str, ...] = ()
    sample_mb: int | None = None
    input_format: str = "auto"
    text_field: str = "text"
    max_document_mb: int = DEFAULT_MAX_DOCUMENT_MB


def train_tokenizer(inputs: Sequence[str], output: Path, options: TrainOptions) -> int:
    """Writes the directory ``output``, which ``prepare``, ``generate`` and transformers' AutoTokenizer open.

    The same text and options give the same files. Returns the number of ids, which is smaller than ``vocab_size`` where
    the text has fewer pairs that occur twice.

    Errors: DataError (a vocabulary that is too small, no text, the input, a directory that is in use or cannot be
    written).
    """
    special = (BOS, EOS, PAD, *options.special_tokens)
    if len(set(special)) < len(special) or not all(special):
        raise DataError(f"--special_tokens: {BOS}, {EOS}, {PAD} are there already; name others, each once")
    least = _BYTES + len(special)
    if options.vocab_size < least:
        raise DataError(
            f"--vocab_size {options.vocab_size}: must be at least {least}: {_BYTES} bytes, {len(special)} special "
            "tokens"
        )
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise DataError(f"--output {output}: exists and is not an empty directory; name another, or remove it")
    found = find_inputs(inputs, options.input_format, [output])
    summary = Summary()
    backend = _train(found, options, special, summary)
    for line in describe_drops(summary):
        logger.info("%s", line)
    if summary.documents == 0:
        raise DataError(f"--input: no text to learn from; {output} is not written")
    size: int = backend.get_vocab_size()
    if size < options.vocab_size:
        logger.warning(
            "the text has pairs that occur twice for %s ids only, not for --vocab_size %s: set model.vocab_size to %s, "
            "or train on more text",
            f"{size:,}",
            f"{options.vocab_size:,}",
            size,
        )
    _write(backend, special, output)
    logger.info("%s: %s ids, from %s documents", output, f"{size:,}", f"{summary.documents:,}")
    return size


def _train(inputs: Sequence[Input], options: TrainOptions, special: Sequence[str], summary: Summary) -> Any:
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    except ImportError as error:
        raise DataError("needs the tokenizers package: pip install tokenizers") from error
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_WORDS), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # so that any text can be encoded
        show_progress=False,
    )
    with _signals_end_the_process():
        backend.train_from_iterator(_texts(inputs, options, summary), trainer)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return backend


def _texts(inputs: Sequence[Input], options: TrainOptions, summary: Summary) -> Iterator[list[str]]:
    total = sum(one.size for one in inputs)
    stride = 1 if options.sample_mb is None else max(1, total // (options.sample_mb * 1_000_000))
    chunks = read_chunks(inputs, Position(), options.text_field, options.max_document_mb << 20)
    progress = Progress(total, 0, 0)
    read_bytes = 0
    try:
        for chunk in itertools.islice(chunks, 0, None, stride):
            texts, _ = documents(chunk, options.text_field, summary)
            summary.documents += len(texts)
            yield texts
            read_bytes = chunk.read_bytes
            progress.update(read_bytes, summary)
    finally:
        progress.close()
    logger.info("read %s documents; now learning %s ids", f"{summary.documents:,}", f"{options.vocab_size:,}")


@contextlib.contextmanager
def _signals_end_the_process() -> Iterator[None]:
    """Learning does not come back to Python for minutes, and nothing is on the disk yet: Ctrl-C need not wait."""
    try:
        previous = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller owns the signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write(backend: Any, special: Sequence[str], output: Path) -> None:
    """All files, or none."""
    named: dict[str, Any] = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    if special[3:]:
        named["additional_special_tokens"] = list(special[3:])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "trained_by": "torchtitan-npu",
        **named,
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
        try:
            backend.save(str(temporary / "tokenizer.json"))
            for name, values in (("tokenizer_config.json", config), ("special_tokens_map.json", named)):
                (temporary / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            os.replace(temporary, output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise DataError(f"--output {output} is not written: {error}") from error
