"""From a checkpoint to a directory that transformers loads."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from torchtitan_npu.checkpoint.hf_config import CONFIG, config_to_hf
from torchtitan_npu.checkpoint.hf_names import hf_name
from torchtitan_npu.checkpoint.manifest import CheckpointError, write_durably
from torchtitan_npu.checkpoint.merge import with_dtype
from torchtitan_npu.checkpoint.output import new_directory
from torchtitan_npu.checkpoint.tensor_source import TensorSource
from torchtitan_npu.checkpoint.whole_model import check_model
from torchtitan_npu.config import ModelConfig
from torchtitan_npu.safetensors_file import TensorEntry, write_safetensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What belongs to a tokenizer's directory, and goes with the model where it is there."""

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_hf(
    source: TensorSource,
    model: ModelConfig,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    on_tensor: Callable[[str], object] = lambda name: None,
) -> list[str]:
    """Write ``config.json``, sharded safetensors with their index, and the tokenizer's files.

    Host memory: one tensor, and one chunk of it as it is read.

    Args:
        model: what the checkpoint was trained with.
        dtype: of the tensors; None keeps each one's (fp32 in checkpoints of training).
        max_shard_bytes: of one file, unless a single tensor is larger.
        vocab_size: keep this many rows of the embedding and the output matrix: the others are padding.
        tokenizer: a directory whose tokenizer files are copied along.
        on_tensor: is called with each tensor's name after it has been read.

    Returns:
        Names of the files.

    Raises:
        CheckpointError: the checkpoint does not hold this model, or the output may not be written.
    """
    check_model(source, model)
    rows = model.vocab_size if vocab_size is None else vocab_size
    if rows > model.vocab_size:
        raise CheckpointError(f"--vocab_size {rows} is more than the model's {model.vocab_size}; it can only cut off")
    ours: dict[str, str] = {}
    entries = []
    for name, entry in source.entries.items():
        theirs, shape = hf_name(name), entry.shape
        if name in ("tok_embeddings.weight", "output.weight"):
            shape = (rows, *shape[1:])
        ours[theirs] = name
        entries.append(with_dtype(TensorEntry(theirs, shape, entry.dtype), dtype))

    def read(entry: TensorEntry) -> torch.Tensor:
        tensor = source.read(ours[entry.name])[: entry.shape[0]].to(entry.dtype)
        on_tensor(entry.name)
        return tensor

    model = dataclasses.replace(model, vocab_size=rows)
    with new_directory(output, overwrite=overwrite, is_replaceable=_is_hf_model, kind="a Hugging Face model") as folder:
        files = _write_shards(folder, _shards(entries, max_shard_bytes), read)
        files += _copy_tokenizer(tokenizer, folder)
        special = {} if tokenizer is None else special_tokens(tokenizer)
        name = str(entries[0].dtype).removeprefix("torch.")
        write_durably(folder / CONFIG, json.dumps(config_to_hf(model, name, special), indent=2) + "\n")
    return [CONFIG, *files]


def copy_files(source: Path, target: Path, names: Sequence[str]) -> list[str]:
    """Copy those of ``names`` that ``source`` has; return their names."""
    present = [name for name in names if (source / name).is_file()]
    for name in present:
        shutil.copyfile(source / name, target / name)
    return present


def special_tokens(directory: Path) -> dict[str, Any]:
    """Ids of special tokens that ``generation_config.json`` or else ``config.json`` gives."""
    found: dict[str, Any] = {}
    for name in (CONFIG, "generation_config.json"):
        try:
            content = json.loads((directory / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{directory / name} cannot be read: {error}") from error
        if isinstance(content, dict):
            found |= {key: content[key] for key in _SPECIAL_TOKENS if content.get(key) is not None}
    return found


def _copy_tokenizer(tokenizer: Path | None, folder: Path) -> list[str]:
    if tokenizer is None:
        return []
    copied = copy_files(tokenizer, folder, TOKENIZER_FILES)
    if not copied:
        raise CheckpointError(f"--tokenizer {tokenizer} has no tokenizer files, such as tokenizer.json")
    return copied


def _shards(entries: Sequence[TensorEntry], max_bytes: int) -> list[list[TensorEntry]]:
    """Consecutive entries of at most ``max_bytes`` together, in order."""
    shards: list[list[TensorEntry]] = []
    filled = 0
    for entry in entries:
        if not shards or filled + entry.num_bytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.num_bytes
    return shards


def _write_shards(
    folder: Path, shards: Sequence[Sequence[TensorEntry]], read: Callable[[TensorEntry], torch.Tensor]
) -> list[str]:
    """Names as transformers gives them: one file is called ``model.safetensors`` and has no index."""
    if len(shards) == 1:
        write_safetensors(folder / SINGLE, shards[0], read)
        return [SINGLE]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(folder / name, shard, read)
        weight_map |= {entry.name: name for entry in shard}
    total = sum(entry.num_bytes for shard in shards for entry in shard)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return [*sorted(set(weight_map.values())), INDEX]


def _is_hf_model(path: Path) -> bool:
    return (path / CONFIG).is_file() and all(entry.is_file() for entry in path.iterdir())
