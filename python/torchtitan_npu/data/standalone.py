"""Token files in binary form without a JSONL (``prepare --format bin``): which files count, and the checks.

A .bin that was converted from a JSONL is that JSONL's cache: it counts only through it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.files import expand_paths
from torchtitan_npu.data.index_file import (
    FileIndex,
    StaleIndexError,
    has_bin_magic,
    idx_of,
    index_of,
    read_idx_header,
)
from torchtitan_npu.data.tokenizer_mark import MARK_SUFFIX, TokenizerMark

logger = logging.getLogger(__name__)


def token_files(path: str | Path | Sequence[str | Path], name: str) -> list[Path]:
    """The JSONL and standalone .bin files that a file, a directory, a glob or a sequence of these stands for.

    In directories and globs, caches and marks of JSONL files and foreign .bin files are left out.

    Args:
        name: how errors call ``path``.

    Errors: DataError when nothing is found, or a file is named that is only a part of a token file.
    """
    found = expand_paths(path, (".jsonl", ".bin"), name)
    named = {Path(one) for one in ([path] if isinstance(path, (str, Path)) else path)}
    for file in named & set(found):
        if file.suffix == ".idx":
            raise DataError(f"{name}: {file} is the index of {file.with_suffix('.bin')}; name that one")
        if file.suffix == MARK_SUFFIX and file.with_suffix("").exists():
            raise DataError(f"{name}: {file} says which tokenizer {file.with_suffix('')} is of; name that one")
        if is_standalone(file) and (source := file.with_suffix("")).is_file():
            raise DataError(f"{name}: {file} is the converted form of {source}; name that one")
    kept = [file for file in found if file in named or _counts(file)]
    if not kept:
        raise DataError(
            f"{name}: {path}: none of the {len(found)} files that are found there is JSONL, or a .bin that "
            "prepare_data.py wrote"
        )
    return kept


def is_standalone(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix == ".bin"


def open_standalone(path: Path, *, verify: bool) -> FileIndex:
    """Errors: DataError that says which of the two files is missing, torn, damaged, or of another pair.

    ``verify``: also compares the digests of the contents, of a .bin up to 256 MiB.
    """
    idx_path = idx_of(path)
    try:
        with idx_path.open("rb") as idx, path.open("rb") as binary:
            header = read_idx_header(idx)
            mark = header.get("tokenizer")
            tokenizer = None if mark is None else TokenizerMark.from_json(mark)
            return index_of(path, header, idx, binary, tokenizer, verify=verify)
    except StaleIndexError as error:
        raise DataError(
            f"{path}: {error}; copy both {path.name} and {idx_path.name} again, or prepare it again"
        ) from None
    except OSError as error:
        raise DataError(
            f"{path}: {error.filename} cannot be read: {error.strerror}. A binary token file is a pair, "
            f"{path.name} and {idx_path.name} (prepare_data.py --format bin)"
        ) from error
    except ValueError as error:
        raise DataError(f"{idx_path}: the tokenizer in its header is not one: {error}; prepare it again") from error


def _counts(file: Path) -> bool:
    """Whether a file that was found, not named, is data."""
    if file.suffix == ".idx":
        return not file.with_suffix(".bin").exists()
    if file.suffix == MARK_SUFFIX:
        return False
    if not is_standalone(file):
        return True
    if file.with_suffix("").is_file():
        return False  # the cache of this JSONL
    try:
        with idx_of(file).open("rb") as idx:
            header = read_idx_header(idx)
    except (OSError, StaleIndexError):
        # Ours with an .idx that is missing or damaged: opening it says so. All else has nothing to do with us.
        return has_bin_magic(file)
    if header.get("source", "a JSONL") is not None:
        logger.warning("%s: left out: it was converted from a JSONL that is no longer there; name it to use it", file)
        return False
    return True
