"""Tokenizers: the built-in byte tokenizer, and any Hugging Face tokenizer on disk. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from torchtitan_npu.data.errors import DataError

# How common vocabularies call the end of a document, for a bare tokenizer.json that does not say which it is.
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
    """Text to token ids. ``eos_id`` is None where the tokenizer names no end-of-document token."""

    name: str
    vocab_size: int
    eos_id: int | None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, special tokens included, never truncated or padded."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """UTF-8 bytes are ids 0-255; 256 begins a document (BOS), 257 ends it (EOS), 258 is padding (PAD)."""

    bos_id = 256
    eos_id: int | None = 257
    pad_id = 258
    vocab_size = 259
    name = "byte"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self.bos_id, *text.encode("utf-8")] for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class TokenizersFile:
    """A ``tokenizer.json`` of the ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise DataError(f"--tokenizer {path}: needs the tokenizers package: pip install tokenizers") from error
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"--tokenizer {path}: not a tokenizer.json of the tokenizers library: {error}") from error
        # The file may carry a batch's truncation and padding; both would change documents silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.name = str(path)
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        named = _eos_name(path.with_name("tokenizer_config.json"))
        candidates = _EOS_NAMES if named is None else (named,)
        ids = (self._backend.token_to_id(name) for name in candidates)
        self.eos_id: int | None = next((i for i in ids if i is not None), None)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch(list(texts), add_special_tokens=True)]

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


class TransformersDirectory:
    """A tokenizer directory as ``transformers`` saves it (``tokenizer_config.json`` and its files)."""

    def __init__(self, path: Path) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise DataError(f"--tokenizer {path}: needs the transformers package: pip install transformers") from error
        try:
            self._backend: Any = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # many kinds, by tokenizer class
            raise DataError(f"--tokenizer {path}: transformers cannot load this directory: {error}") from error
        self.name = str(path)
        self.vocab_size: int = len(self._backend)
        self.eos_id: int | None = self._backend.eos_token_id

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

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text


def load_tokenizer(name: str) -> Tokenizer:
    """``"byte"``, a ``tokenizer.json`` file, or a Hugging Face tokenizer directory.

    Errors: DataError when the path is missing or does not hold a tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    path = Path(name)
    if path.is_file():
        return TokenizersFile(path)
    if path.is_dir():
        if (path / "tokenizer_config.json").is_file():
            return TransformersDirectory(path)
        if (path / "tokenizer.json").is_file():
            return TokenizersFile(path / "tokenizer.json")
        raise DataError(f"--tokenizer {name}: the directory holds neither tokenizer_config.json nor tokenizer.json")
    raise DataError(
        f"--tokenizer {name!r}: no such file or directory. Give 'byte', a tokenizer.json, or a Hugging Face tokenizer "
        "directory on this machine (nothing is downloaded)"
    )


def _eos_name(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{config}: not a JSON object: {error}") from error
    return token.get("content") if isinstance(token, dict) else token
