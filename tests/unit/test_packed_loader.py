"""R46, R48: packed samples, their labels, their order, and the position in the checkpoint."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.data import IGNORE_INDEX, Batch, DataError, PackedLoader, TokenDataset, open_dataset

VOCAB = 1000


def corpus(tmp_path: Path, *documents: list[int]) -> TokenDataset:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps({"tokens": d}) + "\n" for d in documents))
    return open_dataset(path, VOCAB)


def distinct(lengths: list[int]) -> list[list[int]]:
    """Documents whose tokens are 0, 1, 2 … over the whole corpus, so that an id names (document, position)."""
    ends = np.cumsum(lengths)
    return [list(range(end - n, end)) for end, n in zip(ends.tolist(), lengths, strict=True)]


def rows(loader: PackedLoader, batches: int) -> dict[int, tuple[list[int], list[int], list[int]]]:
    """Row contents by global sample number."""
    found = {}
    for _ in range(batches):
        first = loader.global_sample
        batch = next(loader)
        for b in range(loader.batch_size):
            sample = first + b * loader.dp_size + loader.dp_rank
            found[sample] = (batch.inputs[b].tolist(), batch.labels[b].tolist(), batch.document_ids[b].tolist())
    return found


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("inputs", "labels", "document_ids"))


def test_samples_labels_and_document_ids(tmp_path: Path) -> None:
    """Stream 0 1 2 | 3 | 4 5 6 7 8 with T = 4: samples [0..4], [4..8]; (9 - 1) // 4 = 2, nothing left out."""
    data = corpus(tmp_path, [0, 1, 2], [], [3], [4, 5, 6, 7, 8])
    loader = PackedLoader(data, batch_size=2, seq_len=4, shuffle=False)
    assert loader.samples_per_epoch == 2
    batch = next(loader)
    for tensor in (batch.inputs, batch.labels, batch.document_ids):
        assert tensor.shape == (2, 4) and tensor.dtype == torch.int64
    assert batch.inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batch.labels.tolist() == [[1, 2, IGNORE_INDEX, IGNORE_INDEX], [5, 6, 7, 8]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]
    assert equal(next(loader), batch)  # not shuffled: the next epoch is the same


def test_appended_eos_is_the_last_label_of_its_document(tmp_path: Path) -> None:
    """Stream 1 2 E | E | 3 E with E = 9; T = 5. The empty document becomes a lone EOS."""
    data = corpus(tmp_path, [1, 2], [], [3])
    batch = next(PackedLoader(data, batch_size=1, seq_len=5, shuffle=False, append_eos=True, eos_id=9))
    assert batch.inputs.tolist() == [[1, 2, 9, 9, 3]]
    assert batch.labels.tolist() == [[2, 9, IGNORE_INDEX, IGNORE_INDEX, 9]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 2]]


def test_doubled_eos_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    PackedLoader(corpus(tmp_path, [1, 9], [2, 9]), batch_size=1, seq_len=2, append_eos=True, eos_id=9)
    assert "already end with id 9" in caplog.text


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(lambda n: sum(n) >= 2),
    seq_len=st.integers(1, 10),
    eos=st.booleans(),
)
def test_packing_equals_a_plain_concatenation(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_len: int, eos: bool
) -> None:
    data = corpus(tmp_path_factory.mktemp("c"), *distinct(lengths))
    stream, owners = [], []
    for number, document in enumerate(distinct(lengths)):
        document = [*document, 999] if eos else document
        stream += document
        owners += [number] * len(document)
    kwargs = {"append_eos": True, "eos_id": 999} if eos else {}
    loader = PackedLoader(data, batch_size=1, seq_len=seq_len, shuffle=False, **kwargs)  # type: ignore[arg-type]
    samples = loader.samples_per_epoch
    assert samples == -(-(len(stream) - 1) // seq_len)
    # Padding has the id 0 and is a document of its own.
    length = samples * seq_len + 1
    stream += [0] * (length - len(stream))
    owners += [-1] * (length - len(owners))
    for sample, (inputs, labels, ids) in rows(loader, samples).items():
        at = sample * seq_len
        assert inputs == stream[at : at + seq_len]
        for t in range(seq_len):
            same = owners[at + t] == owners[at + t + 1] >= 0
            assert labels[t] == (stream[at + t + 1] if same else IGNORE_INDEX)
        assert [b - a for a, b in zip(ids, ids[1:], strict=False)] == [
            int(a != b) for a, b in zip(owners[at : at + seq_len], owners[at + 1 : at + seq_len], strict=False)
        ]


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = corpus(tmp_path, *distinct([3] * 20))  # 60 tokens, T = 59: one sample is the whole epoch
    with caplog.at_level(logging.INFO):
        loader = PackedLoader(data, batch_size=1, seq_len=59, seed=1)
        epochs = [next(loader).inputs[0].tolist() for _ in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert "epoch 1 of the data is done; epoch 2 begins within global samples 1 to 1 with a new order" in caplog.text
    repeated = PackedLoader(data, batch_size=1, seq_len=59, seed=1)
    assert [next(repeated).inputs[0].tolist() for _ in range(3)] == epochs
    other = PackedLoader(data, batch_size=1, seq_len=59, seed=2)
    assert next(other).inputs[0].tolist() != epochs[0]
    # Each epoch goes round the same circle, from the start of another document.
    assert [[(token - epoch[0]) % 60 for token in epoch] for epoch in epochs] == [list(range(59))] * 3


def test_the_order_stays_as_it_is(tmp_path: Path) -> None:
    """A resumed run depends on this order in every release: a change needs another ORDER_VERSION."""
    data = corpus(tmp_path, *distinct([3] * 20))
    loader = PackedLoader(data, batch_size=10, seq_len=6, seed=1)  # 59 targets: ten samples an epoch
    assert [next(loader).inputs[:, 0].tolist() for _ in range(2)] == [
        [9, 27, 3, 21, 33, 51, 57, 39, 15, 45],
        [9, 27, 57, 39, 15, 51, 21, 33, 3, 45],
    ]
    assert loader.state_dict()["order"] == 2


def test_an_optimizer_step_takes_the_same_samples_however_it_is_cut(tmp_path: Path) -> None:
    """12 sequences per step as dp × batch × micro-batches, two steps: samples 0–11, then 12–23."""
    data = corpus(tmp_path, *distinct([7] * 30))
    reference: list[dict[int, tuple[list[int], list[int], list[int]]]] = []
    for dp_size, batch_size, accumulation in ((1, 1, 12), (1, 12, 1), (2, 3, 2), (3, 2, 2), (4, 1, 3)):
        loaders = [
            PackedLoader(data, batch_size=batch_size, seq_len=5, dp_rank=r, dp_size=dp_size, seed=4)
            for r in range(dp_size)
        ]
        steps = []
        for step in range(2):
            taken = {}
            for loader in loaders:
                taken.update(rows(loader, accumulation))
            assert sorted(taken) == list(range(12 * step, 12 * step + 12))
            steps.append(taken)
        reference = reference or steps
        assert steps == reference


@pytest.mark.parametrize(("new_dp", "new_batch"), [(1, 1), (2, 3), (3, 1), (4, 2)])
def test_resume_goes_on_at_the_same_global_sample(tmp_path: Path, new_dp: int, new_batch: int) -> None:
    """Saved after 3 batches of 2 × 2 ranks = 12 samples; 41 samples per epoch, read on over its end."""
    data = corpus(tmp_path, *distinct([7] * 30))  # 210 tokens, T = 5: 209 // 5 = 41
    whole = rows(PackedLoader(data, batch_size=1, seq_len=5, seed=4), 100)
    saved = []
    for rank in range(2):
        old = PackedLoader(data, batch_size=2, seq_len=5, dp_rank=rank, dp_size=2, seed=4)
        for _ in range(3):
            next(old)
        saved.append(json.loads(json.dumps(old.state_dict())))
    assert saved[0] == saved[1] and saved[0]["global_sample"] == 12
    taken = {}
    for rank in range(new_dp):
        loader = PackedLoader(data, batch_size=new_batch, seq_len=5, dp_rank=rank, dp_size=new_dp, seed=4)
        next(loader)
        loader.load_state_dict(saved[0])
        taken.update(rows(loader, 48 // (new_dp * new_batch)))
    assert taken == {sample: whole[sample] for sample in range(12, 60)}


def test_a_state_of_other_data_or_settings_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    data, other = corpus(tmp_path, [1, 2, 3, 4, 5]), corpus(tmp_path / "other", [1, 2, 3, 4, 6])
    loader = PackedLoader(data, batch_size=1, seq_len=2, seed=1)
    next(loader)
    state = loader.state_dict()
    for changed, name in (
        (PackedLoader(other, batch_size=1, seq_len=2, seed=1), "fingerprint"),
        (PackedLoader(data, batch_size=1, seq_len=2, seed=2), "training.seed was 1, is 2"),
        (PackedLoader(data, batch_size=1, seq_len=3, seed=1), "training.seq_len was 2, is 3"),
        (PackedLoader(data, batch_size=1, seq_len=2, seed=1, shuffle=False), "data.shuffle was True, is False"),
        (PackedLoader(data, batch_size=1, seq_len=2, seed=1, pack=False), "data.pack was True"),
        (PackedLoader(data, batch_size=1, seq_len=2, seed=1, append_eos=True, eos_id=7), "EOS id"),
    ):
        with pytest.raises(ValueError, match=name) as caught:
            changed.load_state_dict(state)
        assert "global sample 1" in str(caught.value) and "without resuming" in str(caught.value)
        assert changed.global_sample == 0
    old = {key: state[key] for key in ("global_sample", "seed", "seq_len", "shuffle", "pack", "eos_id")}
    for broken, message in (
        ({**old, "fingerprint": data.fingerprint}, "global sample 1.*another order.*without resuming"),
        ({"order": 2, "global_sample": 3}, "lacks fingerprints"),
        ({**state, "order": 3}, "the version of the order of samples was 3, is 2"),
        ({**state, "global_sample": -1}, "is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            loader.load_state_dict(broken)


def test_one_document_per_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T = 3: [1] has no label and is left out; [4..8] is cut at 4 tokens, losing 1."""
    data = corpus(tmp_path, [1], [2, 3], [4, 5, 6, 7, 8])
    loader = PackedLoader(data, batch_size=2, seq_len=3, shuffle=False, pack=False, pad_id=99)
    assert loader.samples_per_epoch == 2
    batch = next(loader)
    assert batch.inputs.tolist() == [[2, 3, 99], [4, 5, 6]]
    assert batch.labels.tolist() == [[3, IGNORE_INDEX, IGNORE_INDEX], [5, 6, 7]]
    assert batch.document_ids.tolist() == [[0, 0, 1], [0, 0, 0]]
    assert "cuts 1 of 3 documents" in caplog.text and "4 tokens: 1 tokens" in caplog.text
    with_eos = PackedLoader(
        data, batch_size=3, seq_len=3, shuffle=False, pack=False, append_eos=True, eos_id=9, pad_id=99
    )
    assert next(with_eos).labels.tolist() == [[9, IGNORE_INDEX, IGNORE_INDEX], [3, 9, IGNORE_INDEX], [5, 6, 7]]


def test_arguments_and_corpora_that_cannot_work(tmp_path: Path) -> None:
    data = corpus(tmp_path, [1, 2, 3])
    base: dict[str, Any] = {"batch_size": 1, "seq_len": 2}
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"batch_size": 0}, "batch_size = 0"),
        ({"seq_len": 0}, "seq_len = 0"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank = 2"),
        ({"seed": -1}, "seed = -1"),
        ({"append_eos": True}, "eos_id is not"),
        ({"append_eos": True, "eos_id": VOCAB}, f"eos_id = {VOCAB}"),
        ({"pad_id": -1}, "pad_id = -1"),
        ({"ahead": 0}, "ahead = 0"),
    )
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            PackedLoader(data, **{**base, **change})
    (tmp_path / "short").mkdir()
    with pytest.raises(DataError, match="at least two tokens"):
        PackedLoader(corpus(tmp_path / "short", [1], [2]), batch_size=1, seq_len=1, pack=False)
    with pytest.raises(DataError, match=r"has 1 token\(s\)"):
        PackedLoader(corpus(tmp_path / "short", [1]), batch_size=1, seq_len=1)
