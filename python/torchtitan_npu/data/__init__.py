"""Data: tokenise text, index token files, pack samples, load batches.

``prepare`` writes JSONL token files, ``build_index`` turns them into memory-mapped binaries, ``open_dataset`` opens
those, and ``PackedLoader`` cuts them into batches. Names are imported on first use: preparing text needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_npu.data.dataset import TokenDataset, open_dataset
    from torchtitan_npu.data.errors import DataError
    from torchtitan_npu.data.index import IndexInfo, build_index
    from torchtitan_npu.data.index_file import FileIndex
    from torchtitan_npu.data.loader import IGNORE_INDEX, Batch, Corpus, PackedLoader
    from torchtitan_npu.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Batch",
    "Corpus",
    "DataError",
    "FileIndex",
    "IndexInfo",
    "PackedLoader",
    "TokenDataset",
    "Tokenizer",
    "build_index",
    "load_tokenizer",
    "open_dataset",
]

_MODULE_OF = {
    "Batch": "loader",
    "Corpus": "loader",
    "DataError": "errors",
    "FileIndex": "index_file",
    "IGNORE_INDEX": "loader",
    "IndexInfo": "index",
    "PackedLoader": "loader",
    "TokenDataset": "dataset",
    "Tokenizer": "tokenizer",
    "build_index": "index",
    "load_tokenizer": "tokenizer",
    "open_dataset": "dataset",
}


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
