"""From a Hugging Face directory to a checkpoint that training starts from."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan_npu.checkpoint.directory import CheckpointStore
from torchtitan_npu.checkpoint.hf_config import CONFIG, config_from_hf, read_hf_config
from torchtitan_npu.checkpoint.hf_export import INDEX, SINGLE, TOKENIZER_FILES, copy_files
from torchtitan_npu.checkpoint.hf_names import EMBEDDING, IGNORED, LM_HEAD, compare, hf_name, shapes
from torchtitan_npu.checkpoint.manifest import CheckpointError
from torchtitan_npu.checkpoint.merge import with_dtype
from torchtitan_npu.checkpoint.state import META, TrainState
from torchtitan_npu.checkpoint.writer import SummingWriter
from torchtitan_npu.config import ModelConfig
from torchtitan_npu.safetensors_file import DTYPES, TensorEntry

TOKENIZER = "tokenizer"
"""Folder beside the checkpoints for the tokenizer's files, where ``export`` looks for them."""

_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items() if dtype.is_floating_point}


@dataclass(frozen=True)
class _Tensor:
    file: Path
    entry: TensorEntry

    def read(self) -> torch.Tensor:
        with safe_open(self.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(self.entry.name)
        return tensor


def import_hf(
    directory: Path,
    output: Path,
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 1,
    max_seq_len: int | None = None,
    overwrite: bool = False,
    on_start: Callable[[int], object] = lambda count: None,
    on_tensor: Callable[[str], object] = lambda name: None,
) -> tuple[Path, ModelConfig]:
    """Write ``step-00000000``, a checkpoint without optimizer state, into the directory of checkpoints ``output``.

    Host memory: one tensor at a time.

    Args:
        directory: has ``config.json`` and safetensors, with an index or in one file.
        dtype: of the tensors in the checkpoint; None keeps each one's. Training casts them to its master dtype.
        vocab_multiple: append rows of zeros to the embedding and the output matrix up to a multiple of this.
        max_seq_len: of the model section, instead of the file's.
        on_start: is called with the number of tensors.
        on_tensor: is called with each tensor's name after it has been read.

    Returns:
        The checkpoint, and the model section to train it with.

    Raises:
        CheckpointError: the directory holds no Llama or Qwen3 that our model can compute, tensors are missing,
            superfluous or of other shapes, or the output may not be written.
    """
    content = read_hf_config(directory)
    replaced: dict[str, Any] = {} if max_seq_len is None else {"max_seq_len": max_seq_len}
    model = config_from_hf(directory / CONFIG, content, **replaced)
    rows = -(-model.vocab_size // vocab_multiple) * vocab_multiple
    padded = config_from_hf(directory / CONFIG, content, vocab_size=rows, **replaced)
    found = _tensors(directory)
    wanted = {hf_name(name): (name, shape) for name, shape in shapes(model).items()}
    if model.tie_embeddings and LM_HEAD in found and EMBEDDING in found:
        _check_tied(directory, found)
        del found[LM_HEAD]
    problems = compare(
        {theirs: shape for theirs, (_, shape) in wanted.items()},
        {name: tensor.entry.shape for name, tensor in found.items()},
    )
    if problems:
        raise CheckpointError(
            f"{directory} does not hold the model of its {CONFIG} ({len(problems)} tensors differ):\n  "
            + "\n  ".join(problems)
        )
    on_start(len(wanted))

    def read(name: str, entry: TensorEntry) -> torch.Tensor:
        tensor = found[hf_name(name)].read().to(entry.dtype)
        if tensor.shape != entry.shape:
            tensor = torch.cat([tensor, tensor.new_zeros(entry.shape[0] - tensor.shape[0], *entry.shape[1:])])
        on_tensor(name)
        return tensor

    padded_shapes = shapes(padded)
    entries = {
        name: with_dtype(TensorEntry(name, padded_shapes[name], found[theirs].entry.dtype), dtype)
        for theirs, (name, _) in wanted.items()
    }
    state = TrainState(step=0, tokens=0, world_size=0, config={"model": asdict(padded)})
    path = _write_checkpoint(output, state, entries, read, overwrite=overwrite)
    tokenizer = output / TOKENIZER
    tokenizer.mkdir(exist_ok=True)
    copy_files(directory, tokenizer, (*TOKENIZER_FILES, CONFIG))
    return path, padded


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """Saves tensors that are read when their turn comes; the state dict holds their shapes, as meta tensors."""

    def __init__(self, entries: dict[str, TensorEntry], read: Callable[[str, TensorEntry], torch.Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._entries, self._read = entries, read

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn.removeprefix("model.")
        return self._read(name, self._entries[name])


def _write_checkpoint(
    output: Path,
    state: TrainState,
    entries: dict[str, TensorEntry],
    read: Callable[[str, TensorEntry], torch.Tensor],
    *,
    overwrite: bool,
) -> Path:
    store = CheckpointStore(output)
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"--output {output} is a file; name a directory of checkpoints")
    steps = store.steps()
    if any(steps):
        raise CheckpointError(
            f"--output {output} holds checkpoints of training (newest: step {steps[-1]}), which would be continued "
            "instead of the imported one; name another directory"
        )
    if steps and not overwrite:
        raise CheckpointError(f"--output {output} holds an imported checkpoint; name another, or give --overwrite")
    store.prepare()
    sizes = [math.prod(entry.shape) * entry.dtype.itemsize for entry in entries.values()]
    temporary = store.begin(0, sum(sizes))
    writer = SummingWriter(temporary, file_per_tensor=True)
    try:
        tensors = {
            f"model.{name}": torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            for name, entry in entries.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(tensors, storage_writer=writer, planner=_ReadingPlanner(entries, read), no_dist=True)
        path = store.commit(temporary, 0, {META: state.write(temporary), **writer.sums}, overwrite=bool(steps))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"--output {output} was not written: {cause}") from error
    except OSError as error:
        raise CheckpointError(f"--output {output} was not written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return path


def _tensors(directory: Path) -> dict[str, _Tensor]:
    """All tensors by their names, from the headers of the files."""
    found: dict[str, _Tensor] = {}
    for file in _files(directory):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it is no dict)
                    if IGNORED.fullmatch(name):
                        continue
                    part = opened.get_slice(name)
                    if part.get_dtype() not in _TORCH_DTYPES:
                        raise CheckpointError(
                            f"{file}: '{name}' is {part.get_dtype()}; only floating-point weights can be imported"
                        )
                    entry = TensorEntry(name, tuple(part.get_shape()), _TORCH_DTYPES[part.get_dtype()])
                    found[name] = _Tensor(file, entry)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}; fetch it again") from error
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        if not (directory / SINGLE).exists():
            raise CheckpointError(
                f"{directory} has neither {SINGLE} nor {INDEX}; only safetensors are imported (pickled weights such as "
                "pytorch_model.bin can run code: convert them with transformers' save_pretrained)"
            )
        return [directory / SINGLE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index} names {outside[0]!r}, which is no file beside it")
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise CheckpointError(f"{index} names files that are missing: {', '.join(missing)}")
    return [directory / name for name in names]


def _check_tied(directory: Path, found: dict[str, _Tensor]) -> None:
    if not torch.equal(found[LM_HEAD].read(), found[EMBEDDING].read()):
        raise CheckpointError(
            f"{directory}: {CONFIG} says tie_word_embeddings, but {LM_HEAD} differs from {EMBEDDING}; set it to false "
            "to keep both"
        )
