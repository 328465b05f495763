"""The samples of one corpus, by number: nothing is stored that grows with the corpus.

Packed. The stream is all documents in the order of the files, each with its appended EOS; nothing of it is in memory.
An epoch begins at the start of a document and goes once around the stream, in windows of T = seq_len tokens: window i
has the inputs i*T .. i*T + T - 1 and the labels one token further on. So every token is a label exactly once an epoch,
but for the first token of a document, which is none (the one at which the epoch begins would close the circle). The
last window is filled up with padding. With ``shuffle``, the document to begin at and the order of the windows are drawn
from (seed, epoch); without, the windows stand in the order of the files.

One document a row (``pack`` false). The same with documents in place of windows, of those that have a label.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from torchtitan_npu import _data
from torchtitan_npu.data.dataset import TokenDataset
from torchtitan_npu.data.errors import DataError

if TYPE_CHECKING:
    import torch

# Of what a (seed, epoch, sample) means: a checkpoint of another number is refused. 1 shuffled documents before packing.
ORDER_VERSION = 2

_BLOCK_DOCUMENTS = 1024
_SCAN_DOCUMENTS = 1 << 20


class Sampler(Protocol):
    """Samples 0, 1, 2, … of a corpus, without an end: sample n is number ``n % samples_per_epoch`` of its epoch.

    Threads may share it.
    """

    samples_per_epoch: int
    padding: int
    """Places without a token at the end of an epoch's last sample, where the corpus does not fill it."""

    def write(self, sample: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], row: int) -> None:
        """Writes inputs, labels and document_ids, of [B, T] int64 each, at ``row``."""
        ...


class _Cutter:
    """What both kinds have in common: the stream, the order of an epoch, and writing to rows."""

    def __init__(
        self, dataset: TokenDataset, *, seq_len: int, seed: int, shuffle: bool, eos_id: int | None, pad_id: int
    ) -> None:
        self._stream = dataset.stream(eos_id)
        self._documents = dataset.num_documents
        self._seq_len, self._seed, self._shuffle, self._pad_id = seq_len, seed, shuffle, pad_id
        self._order: tuple[int, int, _data.Permutation] = (-1, 0, _data.Permutation(size=1, seed=0, stream=0))

    def _epoch_order(self, epoch: int, samples: int) -> tuple[int, _data.Permutation]:
        """(position at which the epoch begins, order of its samples)."""
        known = self._order  # read once: another thread may replace it
        if known[0] != epoch:
            # A stream number of its own for each use of the seed.
            first = _data.Permutation(size=self._documents, seed=self._seed, stream=2 * epoch + 1).at(0)
            order = _data.Permutation(size=samples, seed=self._seed, stream=2 * epoch)
            known = (epoch, self._stream.start_of(first) % self._stream.size, order)
            self._order = known
        return known[1:]

    def _cut(self, begin: int, count: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], row: int) -> None:
        step = row * self._seq_len * 8
        addresses = [tensor.data_ptr() + step for tensor in rows]
        self._stream.sample(begin, count, self._seq_len, self._pad_id, *addresses)


class PackedSampler(_Cutter):
    """Full windows of the stream. Errors: DataError when the corpus has fewer than two tokens."""

    def __init__(
        self, dataset: TokenDataset, *, seq_len: int, seed: int, shuffle: bool, eos_id: int | None, pad_id: int
    ) -> None:
        super().__init__(dataset, seq_len=seq_len, seed=seed, shuffle=shuffle, eos_id=eos_id, pad_id=pad_id)
        self._targets = self._stream.size - 1
        if self._targets < 1:
            have = f"has {self._stream.size} token(s)"
            raise DataError(f"{dataset.files[0].source}: the data {have}; a sample needs at least two")
        self.samples_per_epoch = -(-self._targets // seq_len)
        self.padding = self.samples_per_epoch * seq_len - self._targets

    def write(self, sample: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], row: int) -> None:
        epoch, window = divmod(sample, self.samples_per_epoch)
        begin = 0
        if self._shuffle:
            begin, order = self._epoch_order(epoch, self.samples_per_epoch)
            window = order.at(window)
        done = window * self._seq_len
        count = min(self._seq_len, self._targets - done) + 1
        self._cut((begin + done) % self._stream.size, count, rows, row)


class DocumentSampler(_Cutter):
    """One document a row, cut at ``seq_len + 1`` tokens; those without a label (fewer than two tokens) are left out.

    Memory: 8 bytes per 1024 documents. Opening reads the lengths of all documents, 8 bytes each.

    Attributes:
        cut_documents, lost_tokens: documents that are cut, and how many of their tokens are never used.

    Errors: DataError when no document has two tokens.
    """

    def __init__(
        self, dataset: TokenDataset, *, seq_len: int, seed: int, shuffle: bool, eos_id: int | None, pad_id: int
    ) -> None:
        super().__init__(dataset, seq_len=seq_len, seed=seed, shuffle=shuffle, eos_id=eos_id, pad_id=pad_id)
        self._dataset = dataset
        self._extra = 0 if eos_id is None else 1
        self.cut_documents = self.lost_tokens = 0
        usable = []
        for start in range(0, self._documents, _SCAN_DOCUMENTS):
            lengths = self._lengths(start, start + _SCAN_DOCUMENTS)
            lost = lengths - (seq_len + 1)
            self.cut_documents += int(np.count_nonzero(lost > 0))
            self.lost_tokens += int(lost[lost > 0].sum())
            blocks = np.arange(0, lengths.size, _BLOCK_DOCUMENTS)
            usable.append(np.add.reduceat(lengths >= 2, blocks, dtype=np.int64))
        # Usable documents before each block of documents, and their total.
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(usable))])
        self.samples_per_epoch, self.padding = int(self._before[-1]), 0
        if not self.samples_per_epoch:
            raise DataError("data.pack: false needs documents of at least two tokens; the data has none")

    def write(self, sample: int, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], row: int) -> None:
        epoch, number = divmod(sample, self.samples_per_epoch)
        if self._shuffle:
            number = self._epoch_order(epoch, self.samples_per_epoch)[1].at(number)
        document = self._usable(number)
        begin, end = self._stream.start_of(document), self._stream.start_of(document + 1)
        self._cut(begin, min(end - begin, self._seq_len + 1), rows, row)

    def _usable(self, number: int) -> int:
        """The document with ``number`` usable ones before it."""
        block = int(np.searchsorted(self._before, number, side="right")) - 1
        start = block * _BLOCK_DOCUMENTS
        lengths = self._lengths(start, start + _BLOCK_DOCUMENTS)
        return start + int(np.flatnonzero(lengths >= 2)[number - int(self._before[block])])

    def _lengths(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        return self._dataset.lengths(start, min(stop, self._documents)) + self._extra
