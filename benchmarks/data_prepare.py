"""How fast `prepare` turns text into tokens, on one core: bytes, and a Hugging Face tokenizer beside its own library.

    python benchmarks/data_prepare.py --csv data_prepare.csv
    python benchmarks/data_prepare.py --input corpus.jsonl --mb 50

The text is Python's standard library, as JSONL with one document per file and as text with one document per line. One
process, one thread. What is measured is the whole of `prepare`: reading, decoding, tokenising, writing, fsync; the
process' CPU seconds, so that others on the machine count less. The peer is `tokenizers`: `encode_batch`, and
`encode_batch_fast`, which leaves out offsets, on the same texts, which are in memory already; the ids are thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import (
    add_output_options,
    header,
    positive,
    progress,
    ratio_quartiles,
    require_package,
    require_plotting,
    table,
    write_csv,
    write_png,
)

# What the numbers must reach.
BYTE_MB_PER_SECOND = 50.0
OF_TOKENIZERS = 1 / 1.15
VOCAB_SIZE = 8192


def documents(source: Path | None, megabytes: float) -> Iterator[str]:
    """Texts, about that many MB: again and again the same where there are too few."""
    if source is not None:
        with source.open(encoding="utf-8") as file:
            texts = [str(json.loads(line)["text"]) for line in file]
    else:
        paths = sorted(Path(os.__file__).parent.rglob("*.py"))
        texts = [text for path in paths if (text := path.read_bytes().decode("utf-8", errors="ignore").strip())]
    left = megabytes * 1e6
    while left > 0:
        for text in texts:
            left -= len(text.encode())
            yield text
            if left <= 0:
                break


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of this process, all threads."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(
    quick: bool = False, source: Path | None = None, megabytes: float | None = None, rounds: int | None = None
) -> list[dict[str, Any]]:
    """One row per tokenizer, input and output: MB of text per CPU second, the median of the rounds; see ``COLUMNS``.

    ``ratio`` compares with the target (bytes) or with the library (BPE), in the same round.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core
    megabytes = megabytes or (2 if quick else 60)
    rounds = rounds or (1 if quick else 7)
    from torchtitan_npu.data.prepare import prepare
    from torchtitan_npu.data.prepare_encode import Options
    from torchtitan_npu.data.tokenizer_train import TrainOptions, train_tokenizer

    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        rows_file, lines_file = folder / "documents.jsonl", folder / "lines.txt"
        texts = list(documents(source, megabytes))
        with rows_file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        with lines_file.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for text in texts for line in text.split("\n") if line.strip())
        # BPE takes ten times as long: on a tenth of the text.
        few_file = folder / "few.jsonl"
        few = list(documents(source, megabytes / 10))
        with few_file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in few)
        progress(f"learning {VOCAB_SIZE} ids")
        train_tokenizer([str(few_file)], folder / "tokenizer", TrainOptions(vocab_size=VOCAB_SIZE))
        from tokenizers import Tokenizer

        library = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))

        def prepared(path: Path, tokenizer: str, output: str) -> Callable[[], Any]:
            options = Options(tokenizer, max_seq_len=None, eos="always", output_format=output)
            return lambda: prepare([str(path)], folder / f"out.{output}", options)

        def peer(encode: Callable[[list[str]], Any]) -> Callable[[], None]:
            def run() -> None:
                for first in range(0, len(few), 100):
                    encode(few[first : first + 100])

            return run

        works: dict[tuple[str, str, str], tuple[Callable[[], Any], Path]] = {}
        for output in ("jsonl", "bin"):
            works["byte", "jsonl", output] = prepared(rows_file, "byte", output), rows_file
            works["byte", "text", output] = prepared(lines_file, "byte", output), lines_file
            works["bpe", "jsonl", output] = prepared(few_file, str(folder / "tokenizer"), output), few_file
        works["bpe", "memory", "encode_batch"] = peer(library.encode_batch), few_file
        works["bpe", "memory", "encode_batch_fast"] = peer(library.encode_batch_fast), few_file
        text_bytes = {few_file: sum(len(t.encode()) for t in few), rows_file: sum(len(t.encode()) for t in texts)}
        text_bytes[lines_file] = lines_file.stat().st_size
        rates: dict[tuple[str, str, str], list[float]] = {key: [] for key in works}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for key in random.sample(list(works), len(works)):
                work, path = works[key]
                rates[key].append(text_bytes[path] / 1e6 / cpu_seconds(work))
    found = []
    for key, values in rates.items():
        tokenizer, given, output = key
        target = [BYTE_MB_PER_SECOND] * rounds if tokenizer == "byte" else rates["bpe", "memory", "encode_batch"]
        ratio, low, high = ratio_quartiles(values, target)
        found.append(
            {
                "tokenizer": tokenizer,
                "input": given,
                "output": output,
                "mb_per_second": statistics.median(values),
                "than": f"{BYTE_MB_PER_SECOND:.0f} MB/s" if tokenizer == "byte" else "encode_batch",
                "ratio": ratio,
                "ratio_low": low,
                "ratio_high": high,
                "wanted": 1.0 if tokenizer == "byte" else OF_TOKENIZERS,
            }
        )
    return found


COLUMNS = ["tokenizer", "input", "output", "MB/s", "than", "ratio", "quartiles", "wanted"]


def cells(row: dict[str, Any]) -> list[str]:
    """The row as the table shows it."""
    return [
        row["tokenizer"],
        row["input"],
        row["output"],
        f"{row['mb_per_second']:.1f}",
        row["than"],
        f"{row['ratio']:.2f}",
        f"{row['ratio_low']:.2f}-{row['ratio_high']:.2f}",
        f"{row['wanted']:.2f}",
    ]


def label(row: dict[str, Any]) -> str:
    """Two lines below the bar, of at most ten characters: more would reach into the next one's."""
    if row["input"] == "memory":  # a call of the library
        return str(row["output"]).replace("encode_", "encode_\n")
    return f"{row['input']} to\n{row['output']}"


def main() -> None:
    require_package("")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_output_options(parser)
    parser.add_argument("--input", type=Path, help="JSONL with a field text (the standard library's source)")
    parser.add_argument("--mb", type=positive, help="of text (60; 2 with --quick); a tenth of it for BPE")
    parser.add_argument("--rounds", type=positive, help="(7; 1 with --quick)")
    args = parser.parse_args()
    require_plotting(args.png)
    print(
        header(
            "Preparing text" + (" (--quick: a smoke test, not a measurement)" if args.quick else ""),
            [f"one core; MB of text per CPU second, files to file; bpe: learnt here, {VOCAB_SIZE} ids"],
        ),
        flush=True,
    )
    rows = measure(args.quick, args.input, args.mb, args.rounds)
    print("\n" + table(COLUMNS, [cells(row) for row in rows], left=3), flush=True)
    if args.csv:
        write_csv(args.csv, rows)
    if args.png:
        groups = [f"{row['tokenizer']}\n{label(row)}" for row in rows]
        series: dict[str, Any] = {"MB/s": [row["mb_per_second"] for row in rows]}
        write_png(args.png, "Preparing text", groups, series, "MB of text per CPU second", log_scale=True)


if __name__ == "__main__":
    sys.exit(main())
