"""Every token once an epoch, whatever the ranks, threads, kills and resumes; the orders and mixtures behind it."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu import _data
from torchtitan_npu.data import IGNORE_INDEX, Batch, Corpus, DataError, FileIndex, PackedLoader, TokenDataset
from torchtitan_npu.data import dataset as dataset_module
from torchtitan_npu.data.mixture import Mixture

Row = tuple[list[int], list[int], list[int]]
EOS = 60_000


def in_memory(files: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> TokenDataset:
    """A dataset of these documents, by file, without a disk."""
    tokens = {str(n): np.array([t for d in documents for t in d], np.uint16) for n, documents in enumerate(files)}
    offsets = {str(n): np.cumsum([0, *map(len, documents)], dtype=np.int64) for n, documents in enumerate(files)}
    indices = [
        FileIndex(Path(n), Path(n), Path(n), np.dtype("u2"), len(documents), tokens[n].size, 0, f"{hash(str(files))}")
        for n, documents in zip(tokens, files, strict=True)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(dataset_module, "map_tokens", lambda file: tokens[str(file.source)])
        patch.setattr(dataset_module, "map_offsets", lambda file: offsets[str(file.source)])
        return TokenDataset(indices, 1 << 16)


def numbered(lengths: list[list[int]], first: int = 0) -> list[list[list[int]]]:
    """Files of documents whose tokens are first, first + 1, …: an id names (document, position)."""
    files = []
    for file in lengths:
        files.append([])
        for length in file:
            files[-1].append(list(range(first, first + length)))
            first += length
    return files


def pairs_of(files: list[list[list[int]]], *, eos: bool) -> Counter[tuple[int, int]]:
    """(token, next token) of all documents: what an epoch has to serve, each once."""
    documents = [[*document, EOS] if eos else document for file in files for document in file]
    return Counter(pair for d in documents for pair in zip(d, d[1:], strict=False))


def pairs_in(rows: list[Row]) -> Counter[tuple[int, int]]:
    return Counter(
        (token, label)
        for inputs, labels, _ in rows
        for token, label in zip(inputs, labels, strict=True)
        if label != IGNORE_INDEX
    )


def read(loader: PackedLoader, into: dict[int, Row]) -> None:
    """One batch, by global sample number. A sample that was read before must be what it was."""
    first = loader.global_sample
    batch = next(loader)
    for b in range(loader.batch_size):
        sample = first + b * loader.dp_size + loader.dp_rank
        row = (batch.inputs[b].tolist(), batch.labels[b].tolist(), batch.document_ids[b].tolist())
        assert into.setdefault(sample, row) == row


LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=3).filter(
    lambda files: max(map(max, files)) >= 2
)
# (dp_size, batch_size, threads, batches until the checkpoint, batches after it that are lost to a kill)
SESSIONS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 4), st.integers(0, 2)),
    min_size=1,
    max_size=5,
)


def run(corpora: list[Corpus], samples: int, sessions: list[tuple[int, int, int, int, int]], **options: object):
    """All global samples up to ``samples``, read in sessions that are killed and resumed at other sizes."""
    rows: dict[int, Row] = {}
    state = "{}"
    while json.loads(state).get("global_sample", 0) < samples:
        for dp_size, batch_size, threads, saved_after, lost in sessions:
            states = set()
            for rank in range(dp_size):
                loader = PackedLoader(
                    corpora,
                    batch_size=batch_size,
                    dp_rank=rank,
                    dp_size=dp_size,
                    num_workers=threads,
                    ahead=1 + lost,
                    **options,  # type: ignore[arg-type]
                )
                loader.load_state_dict(json.loads(state))
                for _ in range(saved_after):
                    read(loader, rows)
                states.add(json.dumps(loader.state_dict()))
                for _ in range(lost):
                    read(loader, rows)
                loader.close()
            (state,) = states
    assert set(range(samples)) <= rows.keys()
    return rows


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 2**64 - 1), SESSIONS)
def test_every_token_once_an_epoch(
    lengths: list[list[int]],
    seq_len: int,
    eos: bool,
    shuffle: bool,
    seed: int,
    sessions: list[tuple[int, int, int, int, int]],
) -> None:
    files = numbered(lengths)
    with pytest.MonkeyPatch.context() as patch:
        data = in_memory(files, patch)
    options = {"seq_len": seq_len, "shuffle": shuffle, "seed": seed, "append_eos": eos, "eos_id": EOS}
    samples = PackedLoader(data, batch_size=1, **options).samples_per_epoch  # type: ignore[arg-type]
    positions = sum(map(sum, lengths)) + eos * sum(map(len, lengths))
    assert samples == -(-(positions - 1) // seq_len)
    rows = run([Corpus(data)], 2 * samples, sessions, **options)
    for epoch in range(2):
        served = pairs_in([rows[sample] for sample in range(epoch * samples, (epoch + 1) * samples)])
        assert served == pairs_of(files, eos=eos)


@settings(max_examples=30, deadline=None)
@given(LENGTHS, LENGTHS, st.sampled_from([(1.0, 1.0), (0.7, 0.3), (1.0, 3.5)]), st.integers(1, 5), SESSIONS)
def test_every_token_of_every_corpus_once_an_epoch_of_it(
    first: list[list[int]],
    second: list[list[int]],
    weights: tuple[float, float],
    seq_len: int,
    sessions: list[tuple[int, int, int, int, int]],
) -> None:
    parts = [numbered(first), numbered(second, first=10_000)]
    with pytest.MonkeyPatch.context() as patch:
        corpora = [Corpus(in_memory(part, patch), weight) for part, weight in zip(parts, weights, strict=True)]
    epochs = [PackedLoader(c.dataset, batch_size=1, seq_len=seq_len).samples_per_epoch for c in corpora]
    mixture = Mixture(weights)
    total = next(g for g in range(10**6) if all(n >= e for n, e in zip(mixture.counts(g), epochs, strict=True)))
    rows = run(corpora, total, sessions, seq_len=seq_len, seed=5)
    for corpus, (files, epoch) in enumerate(zip(parts, epochs, strict=True)):
        mine = [rows[g] for g in range(total) if mixture.locate(g)[0] == corpus]
        assert pairs_in(mine[:epoch]) == pairs_of(files, eos=False)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_document_once_an_epoch_where_each_has_a_row(monkeypatch: pytest.MonkeyPatch, shuffle: bool) -> None:
    """5,000 documents over three files, of 0 to 4 tokens: several blocks of the table of usable ones."""
    lengths = np.random.default_rng(0).integers(0, 5, 5000).tolist()
    files = numbered([lengths[:1500], lengths[1500:1501], lengths[1501:]])
    data = in_memory(files, monkeypatch)
    loader = PackedLoader(data, batch_size=7, seq_len=4, pack=False, shuffle=shuffle)
    usable = [document for file in files for document in file if len(document) >= 2]
    assert loader.samples_per_epoch == len(usable)
    rows: dict[int, Row] = {}
    while loader.global_sample < len(usable):
        read(loader, rows)
    found = [rows[sample] for sample in range(len(usable))]
    assert pairs_in(found) == pairs_of(files, eos=False)
    order = [row[0][0] for row in found]
    assert sorted(order) == [document[0] for document in usable] and (order == sorted(order)) != shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64, 65, 1000, 4097])
def test_permutation_is_one(size: int) -> None:
    permutation = _data.Permutation(size=size, seed=3, stream=4)
    assert sorted(map(permutation.at, range(size))) == list(range(size))
    for index in (-1, size):
        with pytest.raises(ValueError, match=f"index {index} of a permutation of {size}"):
            permutation.at(index)


def test_permutations_of_huge_corpora() -> None:
    permutation = _data.Permutation(size=2**62 + 1, seed=0, stream=0)
    values = [permutation.at(index) for index in range(1000)]
    assert len(set(values)) == 1000 and min(values) >= 0 and max(values) <= 2**62
    with pytest.raises(ValueError, match="at least 1"):
        _data.Permutation(size=0, seed=0, stream=0)


@pytest.mark.parametrize("size", [3, 10, 100])
def test_permutations_are_evenly_random(size: int) -> None:
    """Where index 0 and a later one go over 4,000 epochs: chi-square below its mean + 6 standard deviations."""
    for index in (0, size // 2):
        counts = np.bincount(
            [_data.Permutation(size=size, seed=11, stream=2 * epoch).at(index) for epoch in range(4000)], minlength=size
        )
        expected = 4000 / size
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < (size - 1) + 6 * (2 * (size - 1)) ** 0.5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 10**12))
def test_a_mixture_keeps_its_shares(weights: list[float], start: int) -> None:
    mixture = Mixture(weights)
    assert sum(mixture.shares) == 1 and mixture.shares[0] == Fraction(repr(weights[0])) / sum(
        Fraction(repr(weight)) for weight in weights
    )
    counts = mixture.counts(start)
    for sample in range(start, start + 50):
        corpus, number = mixture.locate(sample)
        assert number == counts[corpus]
        counts[corpus] += 1
        assert mixture.counts(sample + 1) == counts
    for count, share in zip(counts, mixture.shares, strict=True):
        assert abs(count - share * (start + 50)) < len(weights)


def test_epochs_of_a_mixture_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Small has 4 samples, large 40; one of two samples each: small's epochs end at sample 8, 16, 24, large's at 80."""
    small, large = (in_memory(numbered([[5] * 5 * n]), monkeypatch) for n in (1, 10))
    corpora = [Corpus(small, 1, "small"), Corpus(large, 1, "large")]
    caplog.set_level("INFO")
    loader = PackedLoader(corpora, batch_size=2, seq_len=6)
    for _ in range(12):
        next(loader)
    assert [message for message in caplog.messages if "is done" in message] == [
        "epoch 1 of small is done; epoch 2 begins within global samples 8 to 9 with a new order of samples",
        "epoch 2 of small is done; epoch 3 begins within global samples 16 to 17 with a new order of samples",
    ]
    assert "small: 25 tokens in 5 documents: 4 samples of 6 tokens per epoch; 0.5 of all samples" in caplog.text


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    data = in_memory(numbered([[50]]), monkeypatch)
    loader = PackedLoader(data, batch_size=1, seq_len=7, num_workers=1, ahead=3)
    right = loader._batch

    def broken(samples: list[int]) -> Batch:
        if samples[0] >= 2:
            raise OSError(5, "Input/output error", "train.jsonl.bin")
        return right(samples)

    monkeypatch.setattr(loader, "_batch", broken)
    for _ in range(2):
        next(loader)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            next(loader)
        assert loader.global_sample == 2
    monkeypatch.setattr(loader, "_batch", right)
    plain = PackedLoader(data, batch_size=1, seq_len=7)
    plain.load_state_dict(loader.state_dict())
    assert torch.equal(next(loader).inputs, next(plain).inputs)
    loader.close()
    assert torch.equal(next(loader).inputs, next(plain).inputs)  # closed: without threads
    loader.close()


def test_a_damaged_index_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = in_memory(numbered([[4, 4, 4]]), monkeypatch)
    data._offsets[0][1] = 2**40
    with pytest.raises(_data.Error, match="the index is damaged: document 0"):
        next(PackedLoader(data, batch_size=1, seq_len=3, shuffle=False))
    data._offsets[0][3] = 13
    with pytest.raises(ValueError, match="3 documents do not span 12 tokens"):
        PackedLoader(data, batch_size=1, seq_len=3)
    with pytest.raises(DataError, match=r"has 1 token\(s\)"):
        PackedLoader(in_memory([[[1]]], monkeypatch), batch_size=1, seq_len=3)
