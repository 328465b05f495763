"""Collect a training corpus that every machine has: the source text of Python's standard library.

Writes one JSON object per line, ``{"text": ...}``, one source file per document: JSON keeps the newlines inside a
document on one line. ``prepare_data.py --format jsonl`` reads it.

    python examples/collect_stdlib.py --output stdlib.jsonl --max_mb 20
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_SKIPPED_DIRECTORIES = {"site-packages", "dist-packages", "__pycache__"}


def source_files(root: Path) -> list[Path]:
    """Every ``*.py`` under ``root`` outside installed packages, sorted by its relative path."""
    found: list[Path] = []
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if name not in _SKIPPED_DIRECTORIES]
        found.extend(Path(directory, file) for file in files if file.endswith(".py"))
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def documents(paths: list[Path], max_bytes: int | None) -> Iterator[str]:
    """Texts in order until the next one would pass ``max_bytes``; empty and non-UTF-8 files are skipped."""
    used = 0
    for path in paths:
        data = path.read_bytes()
        try:
            text = data.decode("utf-8").strip()
        except UnicodeDecodeError:
            continue
        if not text:
            continue
        used += len(text.encode("utf-8"))
        if max_bytes is not None and used > max_bytes:
            return
        yield text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--max_mb", type=float, default=None, help="stop before this many MB (10^6 bytes) of text")
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="where to look")
    args = parser.parse_args()
    if args.max_mb is not None and args.max_mb <= 0:
        parser.error(f"--max_mb {args.max_mb}: must be above 0")

    paths = source_files(args.root)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.output.with_name(f".{args.output.name}.{os.getpid()}.tmp")
    count = size = 0
    try:
        with temporary.open("w", encoding="utf-8") as file:
            for text in documents(paths, None if args.max_mb is None else int(args.max_mb * 1e6)):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                count += 1
                size += len(text.encode("utf-8"))
        if count == 0:
            print(f"{args.root}: no readable *.py file within the limit; see --root and --max_mb", file=sys.stderr)
            return 1
        temporary.replace(args.output)
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{args.output}: {count:,} documents, {size / 1e6:.1f} MB of text, from {args.root}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
