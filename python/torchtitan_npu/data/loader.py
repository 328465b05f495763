"""Training batches: samples of one or several corpora, dealt out to ranks; resumable at any global sample.

Global sample g is sample n of corpus c (``mixture``), and that is a window of c (``sampling``): a function of the data
and the settings alone, whatever the ranks, threads and restarts.

With ``position`` global samples handed out so far, the next batch of all ranks together is the ``batch_size * dp_size``
global samples from ``position`` on, and row b of rank r is ``position + b * dp_size + r``. So an optimizer step takes
one run of consecutive samples, whatever the number of ranks and micro-batches, and a run that goes on with another
``dp_size`` or ``batch_size`` goes on at the same sample.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from torchtitan_npu.data.dataset import TokenDataset
from torchtitan_npu.data.mixture import Mixture
from torchtitan_npu.data.position import saved_position
from torchtitan_npu.data.sampling import ORDER_VERSION, DocumentSampler, PackedSampler, Sampler

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
_EOS_PROBE_DOCUMENTS = 100
# Odd, so that no two of 2^64 corpora have the same seed.
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass
class Batch:
    """One micro-batch of one rank; all int64 [B, T], on the CPU, in pinned memory where the loader has a ``device``.

    Attributes:
        inputs: token ids.
        labels: the next token of the same document; -100 where there is none (last token of a document, padding).
        document_ids: counts the documents of a row from 0. Padding counts as one more document.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor


@dataclass(frozen=True)
class Corpus:
    """One part of a mixture: ``weight / sum of all weights`` of the samples come from it. ``name`` is for the log."""

    dataset: TokenDataset
    weight: float = 1.0
    name: str = "the data"


class PackedLoader:
    """An endless iterator of this rank's batches.

    Args:
        data: the documents, or several corpora with weights, each with epochs of its own.
        batch_size: rows per batch and rank.
        seq_len: tokens per row.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        seed: 0 .. 2^64 - 1; with the epoch it fixes the order of samples.
        shuffle: False takes the samples in the order of the files in every epoch.
        pack: False puts one document into each row, cut at ``seq_len + 1`` tokens and padded with ``pad_id``;
            documents without a label (fewer than two tokens) are left out.
        append_eos: adds ``eos_id`` to the end of every document.
        pad_id: the input at padded places; it has no label.
        num_workers: threads that read ahead; 0 reads when a batch is asked for.
        ahead: batches that they hold ready.
        device: the accelerator that batches are copied to; None or the CPU: none. Batches lie in memory that is pinned
            for it, so that ``batch.inputs.to(device, non_blocking=True)`` does not wait for what the device still does.
            A batch may be dropped at once after that: torch's allocator gives its memory out again when the copy is
            through.

    Memory: the batches held ready, 24 bytes a token; nothing that grows with the corpora (see ``sampling``).
    Errors: ValueError for arguments out of range; DataError when a corpus has no sample. ``close`` ends the threads.
    """

    def __init__(
        self,
        data: TokenDataset | Sequence[Corpus],
        *,
        batch_size: int,
        seq_len: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        pack: bool = True,
        append_eos: bool = False,
        eos_id: int | None = None,
        pad_id: int = 0,
        num_workers: int = 0,
        ahead: int = 2,
        device: torch.device | None = None,
    ) -> None:
        self.corpora = (Corpus(data),) if isinstance(data, TokenDataset) else tuple(data)
        for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("dp_size", dp_size), ("ahead", ahead)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank = {dp_rank}: must be in [0, dp_size = {dp_size})")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed = {seed}: must be in [0, 2^64)")
        if append_eos and eos_id is None:
            raise ValueError("append_eos is set, but eos_id is not: name the tokenizer's end-of-document id")
        vocab_size = min(corpus.dataset.vocab_size for corpus in self.corpora)
        for name, token in (("eos_id", eos_id if append_eos else None), ("pad_id", pad_id)):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"{name} = {token}: must be in [0, model.vocab_size = {vocab_size})")
        self.batch_size, self.seq_len = batch_size, seq_len
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle, self.pack = seed, shuffle, pack
        self.eos_id = eos_id if append_eos else None
        self.global_sample = 0
        self._mixture = Mixture([corpus.weight for corpus in self.corpora])
        self._samplers: list[Sampler] = []
        for number, corpus in enumerate(self.corpora):
            sampler = (PackedSampler if pack else DocumentSampler)(
                corpus.dataset,
                seq_len=seq_len,
                seed=(seed + number * _SEED_STEP) % 2**64,
                shuffle=shuffle,
                eos_id=self.eos_id,
                pad_id=pad_id,
            )
            if dp_rank == 0:
                _log_corpus(corpus, self._mixture.shares[number], sampler, seq_len)
                _warn_about_doubled_eos(corpus, self.eos_id)
            self._samplers.append(sampler)
        self._ahead = ahead
        self._device = None if device is None or device.type == "cpu" else device
        self._threads = ThreadPoolExecutor(num_workers, "data", self._use_device) if num_workers else None
        self._coming: deque[tuple[int, Future[Batch]]] = deque()  # (position, batch), in order

    @property
    def samples_per_epoch(self) -> int:
        """Of the only corpus."""
        (sampler,) = self._samplers
        return sampler.samples_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Errors: what reading raises, in a thread too; the position stays."""
        batch = self._batch(self._samples(self.global_sample)) if self._threads is None else self._take(self._threads)
        before = self.global_sample
        self.global_sample += self._step
        if self.dp_rank == 0:
            self._log_epochs(before)
        return batch

    def at(self, position: int) -> Batch:
        """What the next batch would be with ``position`` samples handed out, without moving there; samples beyond the
        first epoch of the only corpus are its last one again.
        """
        return self._batch([min(sample, self.samples_per_epoch - 1) for sample in self._samples(position)])

    def close(self) -> None:
        """Ends the threads; batches that they hold ready are dropped. A closed loader still reads when asked."""
        if self._threads is not None:
            self._coming.clear()
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def state_dict(self) -> dict[str, Any]:
        """Position and what gives it its meaning; the same on all ranks, and plain JSON values."""
        return {
            "global_sample": self.global_sample,
            "order": ORDER_VERSION,
            "fingerprints": [corpus.dataset.fingerprint for corpus in self.corpora],
            "shares": [str(share) for share in self._mixture.shares],
            "seed": self.seed,
            "seq_len": self.seq_len,
            "shuffle": self.shuffle,
            "pack": self.pack,
            "eos_id": self.eos_id,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on at the saved global sample; ``dp_size`` and ``batch_size`` may differ from the saved run's.

        An empty state is that of a checkpoint without a position (imported weights): nothing is changed.

        Errors: ValueError, with nothing changed, when the saved number would mean another place in other data.
        """
        if state:
            self.global_sample = saved_position(state, self.state_dict())

    @property
    def _step(self) -> int:
        return self.batch_size * self.dp_size

    def _samples(self, position: int) -> list[int]:
        return [position + b * self.dp_size + self.dp_rank for b in range(self.batch_size)]

    def _batch(self, samples: Sequence[int]) -> Batch:
        shape, pinned = (len(samples), self.seq_len), self._device is not None
        batch = Batch(*(torch.empty(shape, dtype=torch.int64, pin_memory=pinned) for _ in range(3)))
        for row, sample in enumerate(samples):
            corpus, number = self._mixture.locate(sample)
            self._samplers[corpus].write(number, (batch.inputs, batch.labels, batch.document_ids), row)
        return batch

    def _use_device(self) -> None:
        """In a new thread. Pinning asks the current device, which would be the first one."""
        if self._device is not None:
            torch.get_device_module(self._device).set_device(self._device)

    def _take(self, threads: ThreadPoolExecutor) -> Batch:
        if self._coming and self._coming[0][0] != self.global_sample:  # it was moved
            for _, future in self._coming:
                future.cancel()
            self._coming.clear()
        position = self._coming[-1][0] + self._step if self._coming else self.global_sample
        while len(self._coming) <= self._ahead:
            self._coming.append((position, threads.submit(self._batch, self._samples(position))))
            position += self._step
        try:
            batch = self._coming[0][1].result()
        except BaseException:
            self._coming.clear()  # the next call tries again
            raise
        self._coming.popleft()
        return batch

    def _log_epochs(self, before: int) -> None:
        """Says which corpora began an epoch between two positions."""
        counts = zip(self._mixture.counts(before), self._mixture.counts(self.global_sample), strict=True)
        for corpus, sampler, (old, new) in zip(self.corpora, self._samplers, counts, strict=True):
            # Sample n begins an epoch where n is a multiple of its length; not the run's first one.
            begun = (new - 1) // sampler.samples_per_epoch
            if new > old and begun > (old - 1) // sampler.samples_per_epoch and begun > 0:
                logger.info(
                    "epoch %d of %s is done; epoch %d begins within global samples %s to %s%s",
                    begun,
                    corpus.name,
                    begun + 1,
                    f"{before:,}",
                    f"{self.global_sample - 1:,}",
                    " with a new order of samples" if self.shuffle else "",
                )


def _log_corpus(corpus: Corpus, share: Any, sampler: Sampler, seq_len: int) -> None:
    dataset = corpus.dataset
    logger.info(
        "%s: %s tokens in %s documents: %s samples of %d tokens per epoch%s%s",
        corpus.name,
        f"{dataset.num_tokens:,}",
        f"{dataset.num_documents:,}",
        f"{sampler.samples_per_epoch:,}",
        seq_len,
        f", the last one with {sampler.padding} of padding" if sampler.padding else "",
        f"; {float(share):.4g} of all samples" if share != 1 else "",
    )
    if isinstance(sampler, DocumentSampler) and sampler.cut_documents:
        logger.warning(
            "data.pack: false cuts %s of %s documents at training.seq_len + 1 = %d tokens: %s tokens per epoch are not "
            "used",
            f"{sampler.cut_documents:,}",
            f"{dataset.num_documents:,}",
            seq_len + 1,
            f"{sampler.lost_tokens:,}",
        )


def _warn_about_doubled_eos(corpus: Corpus, eos_id: int | None) -> None:
    if eos_id is None:
        return
    dataset = corpus.dataset
    probe = [dataset.read(document) for document in range(min(dataset.num_documents, _EOS_PROBE_DOCUMENTS))]
    if all(tokens.size and int(tokens[-1]) == eos_id for tokens in probe):
        logger.warning("data.append_eos: the documents already end with id %d; each gets a second one", eos_id)
