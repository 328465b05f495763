"""Tokenizers: the built-in byte tokenizer, and any Hugging Face tokenizer on disk. Nothing is downloaded."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan_npu import _data
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.token_rows import Lengths, Tokens, frame, join_ids

# How common vocabularies call the begin and the end of a document, for a bare tokenizer.json that does not say.
_BOS_NAMES = ("<|begin_of_text|>", "<|startoftext|>", "<s>", "<bos>", "<|bos|>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class Tokenizer(Protocol):
    """Text to token ids. ``bos_id`` and ``eos_id`` are None where the tokenizer names no such token.

    ``fingerprint``: 32 hexadecimal digits; equal for tokenizers that turn any text into the same ids.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    fingerprint: str

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, special tokens included, never truncated or padded."""
        ...

    def encode_joined(
        self, texts: Sequence[str], with_bos: bool | None = None, with_eos: bool | None = None
    ) -> tuple[Tokens, Lengths]:
        """The ids of ``encode_batch`` back to back, unsigned, and how many of them each text has, int64.

        With BOS and EOS (True), without (False), or as the tokenizer itself does (None).
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0-255; 256 begins a document (BOS), 257 ends it (EOS), 258 is padding (PAD)."""

    bos_id: int | None = 256
    eos_id: int | None = 257
    pad_id = 258
    vocab_size = 259
    name = "byte"
    fingerprint = hashlib.blake2b(b"byte: BOS 256, EOS 257, PAD 258", digest_size=16).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[256, *text.encode("utf-8")] for text in texts]

    def encode_joined(
        self, texts: Sequence[str], with_bos: bool | None = None, with_eos: bool | None = None
    ) -> tuple[Tokens, Lengths]:
        return _data.utf8_ids(list(texts), None if with_bos is False else 256, 257 if with_eos else None)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class _BackedTokenizer:
    """What the tokenizers of both libraries have in common."""

    _backend: Any
    bos_id: int | None
    eos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        raise NotImplementedError

    def encode_joined(
        self, texts: Sequence[str], with_bos: bool | None = None, with_eos: bool | None = None
    ) -> tuple[Tokens, Lengths]:
        tokens, lengths = join_ids(self.encode_batch(texts))
        return frame(tokens, lengths, bos_id=self.bos_id, with_bos=with_bos, eos_id=self.eos_id, with_eos=with_eos)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


class FastTokenizer(_BackedTokenizer):
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, backend: Any, name: str, bos_id: int | None, eos_id: int | None) -> None:
        self._backend = backend
        # The file may carry a batch's truncation and padding; both would change documents silently.
        backend.no_truncation()
        backend.no_padding()
        self.name = name
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.fingerprint = hashlib.blake2b(backend.to_str().encode(), digest_size=16).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast": without the offsets into the text, which nobody reads here.
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=True)]


class SlowTokenizer(_BackedTokenizer):
    """A tokenizer that ``transformers`` runs in Python (SentencePiece without a ``tokenizer.json``, and others)."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend = backend
        self.name = name
        self.vocab_size: int = len(backend)
        self.bos_id = backend.bos_token_id
        self.eos_id = backend.eos_token_id
        content = [type(backend).__name__, self.bos_id, self.eos_id, sorted(backend.get_vocab().items())]
        self.fingerprint = hashlib.blake2b(json.dumps(content).encode(), digest_size=16).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._backend(
            list(texts),
            add_special_tokens=True,
            truncation=False,
            padding=False,
            return_attention_mask=False,
            verbose=False,  # lengths over the tokenizer's model_max_length are wanted here
        )
        return [list(ids) for ids in encoded["input_ids"]]


def load_tokenizer(name: str) -> Tokenizer:
    """``"byte"``, a ``tokenizer.json``, a Hugging Face tokenizer directory, or a name in the Hugging Face cache.

    Errors: DataError when there is no such thing on this machine or it does not hold a tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_file():
        return _from_file(path, name)
    if path.is_dir():
        return _from_directory(path, name)
    if _HUB_NAME.fullmatch(name):
        return _from_directory(_cached(name), name)
    raise DataError(
        f"--tokenizer {name!r}: no such file or directory. Give 'byte', a tokenizer.json, a Hugging Face tokenizer "
        "directory, or a name in the Hugging Face cache of this machine (nothing is downloaded)"
    )


def _from_directory(path: Path, name: str) -> Tokenizer:
    config = path / "tokenizer_config.json"
    plain = path / "tokenizer.json"
    if config.is_file() and not (plain.is_file() and _is_plain(config)):
        return _from_transformers(path, name)
    if plain.is_file():
        return _from_file(plain, name)
    raise DataError(f"--tokenizer {name}: {path} holds neither tokenizer_config.json nor tokenizer.json")


def _is_plain(config: Path) -> bool:
    """Whether transformers adds nothing to the tokenizer.json: as our own trainer writes it."""
    values = _read_config(config)
    return values.get("tokenizer_class") == "PreTrainedTokenizerFast" and values.get("trained_by") == "torchtitan-npu"


def _from_file(path: Path, name: str) -> FastTokenizer:
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise DataError(f"--tokenizer {name}: needs the tokenizers package: pip install tokenizers") from error
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"--tokenizer {name}: not a tokenizer.json of the tokenizers library: {error}") from error
    config = path.with_name("tokenizer_config.json")
    values = _read_config(config) if config.is_file() else {}

    def find(key: str, usual: Sequence[str]) -> int | None:
        named = values.get(key)
        named = named.get("content") if isinstance(named, dict) else named
        ids = (backend.token_to_id(token) for token in (usual if named is None else (named,)))
        return next((i for i in ids if i is not None), None)

    return FastTokenizer(backend, name, find("bos_token", _BOS_NAMES), find("eos_token", _EOS_NAMES))


def _from_transformers(path: Path, name: str) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise DataError(
            f"--tokenizer {name}: needs the transformers package: pip install transformers. Or name the file "
            "tokenizer.json in it, where there is one"
        ) from error
    try:
        loaded: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # many kinds, by tokenizer class
        raise DataError(f"--tokenizer {name}: transformers cannot load {path}: {error}") from error
    if loaded.is_fast:  # what transformers calls for every text; called directly, a batch takes half the time
        return FastTokenizer(loaded.backend_tokenizer, name, loaded.bos_token_id, loaded.eos_token_id)
    return SlowTokenizer(loaded, name)


def _cached(name: str) -> Path:
    """The snapshot of a model in the Hugging Face cache (HF_HOME), without a look at the network."""
    from huggingface_hub import snapshot_download  # a dependency of tokenizers

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # its errors differ by release
        raise DataError(
            f"--tokenizer {name!r}: no such file or directory, and not in the Hugging Face cache of this machine "
            f"(nothing is downloaded). On a machine with a network: hf download {name} --include 'tokenizer*' "
            "'special_tokens*' --local-dir DIR; then --tokenizer DIR"
        ) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: not a JSON object")
    return values
