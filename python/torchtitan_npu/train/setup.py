"""What has to be right before the model is built: data, and what the log says about the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from torchtitan_npu.config import Config, Degrees, RunArgs
from torchtitan_npu.data import Corpus, DataError, PackedLoader, build_index, open_dataset
from torchtitan_npu.data.sources import Source, training_sources
from torchtitan_npu.data.tokenizer_mark import check_tokenizers
from torchtitan_npu.launch import Environment, gather_texts, once_per_machine, read_timeouts, together
from torchtitan_npu.launch.simulated import is_simulated
from torchtitan_npu.launch.waiting import Report
from torchtitan_npu.planning import MemoryEstimate
from torchtitan_npu.planning.bucket_hints import bucket_cap_hints
from torchtitan_npu.planning.hints import memory_hints
from torchtitan_npu.planning.memory import format_bytes, on_device
from torchtitan_npu.train.memory import capacity_bytes

logger = logging.getLogger(__name__)


def open_loader(cfg: Config, args: RunArgs, env: Environment, degrees: Degrees, device: torch.device) -> PackedLoader:
    """The loader of ``--data_dir`` or ``data.mixture``, which reads ahead. Collective; see :func:`_open`."""
    sources = together(lambda: training_sources(cfg.data, args.data_dir))
    return _open(cfg, env, degrees, device, sources, shuffle=cfg.data.shuffle, num_workers=cfg.data.num_workers)


def open_validation_loader(
    cfg: Config, env: Environment, degrees: Degrees, device: torch.device, training: PackedLoader
) -> PackedLoader | None:
    """The loader of the held-out data, in the order of the file, if there are any. Collective; see :func:`_open`.

    Their tokenizer must be that of ``training``.
    """
    if cfg.validation.interval == 0 or cfg.validation.data_dir is None:
        return None
    held_out = Source(cfg.validation.data_dir, 1.0, "the held-out data", "validation.data_dir")
    return _open(cfg, env, degrees, device, [held_out], shuffle=False, num_workers=0, beside=training.corpora)


def _open(
    cfg: Config,
    env: Environment,
    degrees: Degrees,
    device: torch.device,
    sources: list[Source],
    *,
    shuffle: bool,
    num_workers: int,
    beside: Sequence[Corpus] = (),
) -> PackedLoader:
    """Open the data, which local rank 0 of each machine converts first, and check that all ranks see the same.

    Raises:
        DataError: the data cannot be used, differs between ranks, or is of another tokenizer than another corpus, one
            of ``beside`` too.
    """
    vocab_size = cfg.model.vocab_size

    def convert(report: Report) -> None:
        for source in sources:
            build_index(source.path, vocab_size, name=source.key, report=report)

    def open_all() -> list[Corpus]:
        corpora = [
            Corpus(open_dataset(source.path, vocab_size, name=source.key, build=False), source.weight, source.name)
            for source in sources
        ]
        files = [file for corpus in [*beside, *corpora] for file in corpus.dataset.files]
        key = "data.mixture" if cfg.data.mixture else "--data_dir"
        check_tokenizers(files, f"{key} and {sources[0].key}" if beside else key, vocab_size)
        return corpora

    deadline = read_timeouts().exec_seconds
    once_per_machine(convert, env, what="converts the data", deadline_seconds=deadline)
    corpora = together(open_all)
    fingerprints = [text.split() for text in gather_texts(" ".join(c.dataset.fingerprint for c in corpora))]
    for number, source in enumerate(sources):
        different = [rank for rank, texts in enumerate(fingerprints) if texts[number] != fingerprints[0][number]]
        if different:
            raise DataError(
                f"{source.key}: {source.path} holds other data on ranks {different} than on rank 0; give every machine "
                "the same files"
            )

    def build_loader() -> PackedLoader:
        try:
            return PackedLoader(
                corpora,
                batch_size=cfg.training.batch_size,
                seq_len=cfg.training.seq_len,
                dp_rank=degrees.dp_rank(env.rank),
                dp_size=degrees.dp,
                seed=cfg.training.seed,
                shuffle=shuffle,
                pack=cfg.data.pack,
                append_eos=cfg.data.append_eos,
                eos_id=cfg.data.eos_id,
                num_workers=num_workers,
                ahead=cfg.training.gradient_accumulation_steps,
                device=device,
            )
        except DataError:
            raise
        except ValueError as error:
            raise DataError(str(error)) from error

    return together(build_loader)


def log_header(
    cfg: Config,
    *,
    env: Environment,
    device: torch.device,
    num_parameters: int,
    degrees: Degrees,
    memory: MemoryEstimate,
) -> None:
    """What the run is, before step 1: parameters, tokens, memory by kind against what there is, and hints."""
    training = cfg.training
    sequences = training.batch_size * degrees.dp * training.gradient_accumulation_steps
    tokens = sequences * training.seq_len
    logger.info(
        "model %s: %s parameters, strategy %s, %s, data-parallel degree %d%s, on %s",
        cfg.model.name,
        f"{num_parameters:,}",
        cfg.parallel.strategy,
        cfg.parallel.dtype,
        degrees.dp,
        f", tensor-parallel degree {degrees.tp}" if degrees.tp > 1 else "",
        device_name(device),
    )
    logger.info(
        "global batch: batch_size %d x dp_degree %d x gradient_accumulation_steps %d = %d sequences = %s tokens per "
        "step; %s steps, %s tokens in total",
        training.batch_size,
        degrees.dp,
        training.gradient_accumulation_steps,
        sequences,
        f"{tokens:,}",
        f"{training.max_steps:,}",
        f"{tokens * training.max_steps:,}",
    )
    # The CPU's memory is for all ranks of the machine.
    capacity = capacity_bytes(device) // (env.local_world_size if device.type == "cpu" else 1)
    logger.info("%s, of %s", memory.describe(), format_bytes(capacity))
    hints = memory_hints(on_device(cfg, device.type), env.world_size, memory, capacity)
    for hint in [*hints, *bucket_cap_hints(cfg, env.world_size, device.type)]:
        logger.info("hint: %s", hint)


def device_name(device: torch.device) -> str:
    """For people: ``the CPU``, or what torch calls the accelerator of each rank."""
    if device.type == "cpu":
        return "the CPU"
    name = torch.get_device_module(device).get_device_name(device)
    return f"{'simulated ' if device.type == 'npu' and is_simulated() else ''}{name} each"
