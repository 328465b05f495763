"""PyPI's torchtitan trains its debug model; run as a program, by an interpreter that has it.

torchtitan_debug.py assets FOLDER     # a tokenizer and a text, which its wheel does not bring
torchtitan_debug.py train ARGUMENT …  # torchtitan's own entry, with what torch 2.13 lacks of it
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def write_assets(folder: Path) -> None:
    """`folder`/tokenizer: one token for each byte; `folder`/text: lines that a model learns something of at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BEGIN, END])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))
    (folder / "text").mkdir()
    with open(folder / "text" / "data.jsonl", "w") as file:
        for i in range(200):
            file.write(json.dumps({"text": f"Line {i}: the quick brown fox jumps over the lazy dog. " * 20}) + "\n")


def train(arguments: list[str]) -> None:
    import torch.distributed as dist

    if not hasattr(dist, "set_timeout"):  # torchtitan 0.3 asks for it; torch 2.13 has it as a private function only
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]
    sys.argv = ["torchtitan.train", *arguments]
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "assets":
        write_assets(Path(sys.argv[2]))
    else:
        train(sys.argv[2:])
