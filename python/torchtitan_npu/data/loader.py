"""Documents to training batches: shuffled, packed, cut, dealt out to ranks; resumable at any global sample.

The order. An epoch concatenates all documents, in an order drawn from (seed, epoch), into one token stream. Sample i
of the epoch is stream[i*T : i*T + T + 1]: T inputs, and T labels one token further on, so neighbours share one token
and each stream position is a label once. Up to T tokens at the end of an epoch do not fill a sample and are left out;
the next epoch's order leaves out others. Global sample g is sample g % S of epoch g // S, S samples per epoch.

The ranks. With ``position`` global samples handed out so far, the next batch of all ranks together is the
``batch_size * dp_size`` global samples from ``position`` on, and row b of rank r is ``position + b * dp_size + r``.
So an optimizer step takes one run of consecutive samples, whatever the number of ranks and micro-batches, and a run
that goes on with another ``dp_size`` or ``batch_size`` goes on at the same sample.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchtitan_npu.data.dataset import TokenDataset
from torchtitan_npu.data.errors import DataError

logger = logging.getLogger(__name__)

IGNORE_INDEX = -100
_EOS_PROBE_DOCUMENTS = 100


@dataclass
class Batch:
    """One micro-batch of one rank; all int64 [B, T], on the CPU.

    Attributes:
        inputs: token ids.
        labels: the next token of the same document; -100 where there is none (last token of a document, padding).
        document_ids: counts the documents of a row from 0. Padding counts as one more document.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor


class PackedLoader:
    """An endless iterator of this rank's batches.

    Args:
        dataset: the documents.
        batch_size: rows per batch and rank.
        seq_len: tokens per row.
        dp_rank, dp_size: this rank's place among the data-parallel ranks.
        seed: 0 .. 2^64 - 1; with the epoch it fixes the order of documents.
        shuffle: False keeps the documents in file order in every epoch.
        pack: False puts one document into each row, cut at ``seq_len + 1`` tokens and padded with ``pad_id``;
            documents without a label (fewer than two tokens) are left out.
        append_eos: adds ``eos_id`` to the end of every document.
        pad_id: the input at padded places; it has no label.

    Memory: about 40 bytes per document.
    Errors: ValueError for arguments out of range; DataError when the corpus does not fill one sample.
    """

    def __init__(
        self,
        dataset: TokenDataset,
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
    ) -> None:
        for name, value in (("batch_size", batch_size), ("seq_len", seq_len), ("dp_size", dp_size)):
            if value < 1:
                raise ValueError(f"{name} = {value}: must be at least 1")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank = {dp_rank}: must be in [0, dp_size = {dp_size})")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed = {seed}: must be in [0, 2^64)")
        if append_eos and eos_id is None:
            raise ValueError("append_eos is set, but eos_id is not: name the tokenizer's end-of-document id")
        for name, token in (("eos_id", eos_id if append_eos else None), ("pad_id", pad_id)):
            if token is not None and not 0 <= token < dataset.vocab_size:
                raise ValueError(f"{name} = {token}: must be in [0, model.vocab_size = {dataset.vocab_size})")
        self.dataset = dataset
        self.batch_size, self.seq_len = batch_size, seq_len
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.seed, self.shuffle, self.pack, self.pad_id = seed, shuffle, pack, pad_id
        self.eos_id = eos_id if append_eos else None
        self.global_sample = 0
        self._lengths = dataset.lengths() + (1 if append_eos else 0)
        self._documents = np.flatnonzero(self._lengths >= (1 if pack else 2))
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = self._documents
        self._starts: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self.samples_per_epoch = self._count_samples()
        self._warn_about_doubled_eos()

    @property
    def epoch(self) -> int:
        """Epoch of the next global sample, from 0."""
        return self.global_sample // self.samples_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._batch(self._samples(self.global_sample))
        self.global_sample += self.batch_size * self.dp_size
        return batch

    def at(self, position: int) -> Batch:
        """What the next batch would be with ``position`` samples handed out, without moving there; samples beyond the
        first epoch are its last one again.
        """
        return self._batch([min(sample, self.samples_per_epoch - 1) for sample in self._samples(position)])

    def _samples(self, position: int) -> list[int]:
        return [position + b * self.dp_size + self.dp_rank for b in range(self.batch_size)]

    def _batch(self, samples: Sequence[int]) -> Batch:
        rows = [self._row(sample) for sample in samples]
        return Batch(*(torch.from_numpy(np.stack(parts)) for parts in zip(*rows, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """Position and what gives it its meaning; the same on all ranks, and plain JSON values."""
        return {
            "global_sample": self.global_sample,
            "fingerprint": self.dataset.fingerprint,
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
        if not state:
            return
        own = self.state_dict()
        missing = [key for key in own if key not in state]
        if missing:
            raise ValueError(f"the saved data position lacks {', '.join(missing)}: it is not a PackedLoader's state")
        changed = [
            f"{_KEY_NAMES[key]} was {state[key]!r}, is {own[key]!r}"
            for key in own
            if key != "global_sample" and state[key] != own[key]
        ]
        if changed:
            raise ValueError(
                f"the data position (global sample {state['global_sample']}) belongs to other data or settings: "
                f"{'; '.join(changed)}. Go on with the saved ones, or begin at the first sample on purpose: start "
                "without resuming, in another checkpoint directory"
            )
        position = state["global_sample"]
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(f"the saved data position is {position!r}: must be an integer, 0 or more")
        self.global_sample = position

    def _count_samples(self) -> int:
        tokens = int(self._lengths.sum())
        if not self.pack:
            if not self._documents.size:
                raise DataError("data.pack: false needs documents of at least two tokens; the data has none")
            lost = self._lengths - (self.seq_len + 1)
            cut = int(np.count_nonzero(lost > 0))
            if cut and self.dp_rank == 0:
                logger.warning(
                    "data.pack: false cuts %s of %s documents at training.seq_len + 1 = %d tokens: %s tokens per "
                    "epoch are not used",
                    f"{cut:,}",
                    f"{len(self.dataset):,}",
                    self.seq_len + 1,
                    f"{int(lost[lost > 0].sum()):,}",
                )
            return int(self._documents.size)
        samples = (tokens - 1) // self.seq_len
        if samples < 1:
            raise DataError(
                f"the data has {tokens:,} tokens, fewer than one sample of training.seq_len + 1 = {self.seq_len + 1}: "
                f"lower training.seq_len to {max(tokens - 1, 1)} or less, or add data"
            )
        if self.dp_rank == 0:
            logger.info(
                "%s tokens in %s documents: %s samples of %d tokens per epoch; the last %d tokens of an epoch's order "
                "do not fill a sample",
                f"{tokens:,}",
                f"{len(self.dataset):,}",
                f"{samples:,}",
                self.seq_len,
                (tokens - 1) % self.seq_len,
            )
        return samples

    def _warn_about_doubled_eos(self) -> None:
        if self.eos_id is None or self.dp_rank != 0:
            return
        probe = [self.dataset.read(int(d)) for d in self._documents[:_EOS_PROBE_DOCUMENTS]]
        if all(tokens.size and int(tokens[-1]) == self.eos_id for tokens in probe):
            logger.warning("data.append_eos: the documents already end with id %d; each gets a second one", self.eos_id)

    def _enter_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        if self._epoch >= 0 and epoch == self._epoch + 1 and self.dp_rank == 0:
            logger.info(
                "epoch %d of the data is done; epoch %d begins at global sample %s%s",
                self._epoch + 1,
                epoch + 1,
                f"{epoch * self.samples_per_epoch:,}",
                " with a new order of documents" if self.shuffle else "",
            )
        self._epoch = epoch
        self._order = self._documents
        if self.shuffle:
            # Raw Philox words, not Generator.permutation: only the raw stream is promised to stay the same in other
            # numpy releases, and a resumed run depends on it.
            philox = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            words = np.asarray(philox.random_raw(self._documents.size))
            self._order = self._documents[np.argsort(words, kind="stable")]
        if self.pack:
            self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths[self._order])])

    def _row(self, global_sample: int) -> tuple[npt.NDArray[np.int64], ...]:
        """(inputs, labels, document_ids), each int64 [T]."""
        epoch, sample = divmod(global_sample, self.samples_per_epoch)
        self._enter_epoch(epoch)
        tokens = np.full(self.seq_len + 1, self.pad_id, np.int64)
        documents = np.zeros(self.seq_len + 1, np.int64)
        if not self.pack:
            document = int(self._order[sample])
            count = min(int(self._lengths[document]), self.seq_len + 1)
            self._copy(document, 0, tokens[:count])
            documents[count:] = 1
            real = np.arange(1, self.seq_len + 1) < count
        else:
            position = sample * self.seq_len
            place = int(np.searchsorted(self._starts, position, side="right")) - 1
            filled = number = 0
            while filled <= self.seq_len:
                start = position + filled - int(self._starts[place])
                document = int(self._order[place])
                count = min(int(self._lengths[document]) - start, self.seq_len + 1 - filled)
                self._copy(document, start, tokens[filled : filled + count])
                documents[filled : filled + count] = number
                filled, number, place = filled + count, number + 1, place + 1
            real = documents[1:] == documents[:-1]
        return tokens[:-1], np.where(real, tokens[1:], IGNORE_INDEX), documents[:-1]

    def _copy(self, document: int, start: int, out: npt.NDArray[np.int64]) -> None:
        """Fills ``out`` with the document's tokens from ``start`` on, the appended EOS among them."""
        stored = int(self._lengths[document]) - (self.eos_id is not None)
        count = min(stored - start, out.size)
        out[:count] = self.dataset.read(document, start, start + count)
        if count < out.size:
            assert self.eos_id is not None
            out[count:] = self.eos_id


_KEY_NAMES = {
    "fingerprint": "the data's fingerprint",
    "seed": "training.seed",
    "seq_len": "training.seq_len",
    "shuffle": "data.shuffle",
    "pack": "data.pack",
    "eos_id": "the appended EOS id (data.append_eos)",
}
