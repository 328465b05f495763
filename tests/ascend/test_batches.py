"""Batches on their way to a card: in pinned memory that is not used again before it has been copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import Run

PROGRAM = """
import sys
import torch
from torchtitan_npu.data import PackedLoader, open_dataset
from torchtitan_npu.ops import Documents

card = torch.device("npu", 1)
torch.npu.set_device(card)
data = open_dataset(sys.argv[1], 100)
options = dict(batch_size=2, seq_len=16, num_workers=int(sys.argv[2]), ahead=3)
here, there = PackedLoader(data, **options), PackedLoader(data, **options, device=card)
matrix = torch.ones(600, 600, device=card)
arrived = []
for _ in range(40):
    matrix @ matrix  # what the copy has to wait for, and the host has not
    batch = next(there)
    assert all(tensor.is_pinned() for tensor in (batch.inputs, batch.labels, batch.document_ids))
    documents = Documents.from_ids(batch.document_ids, card).ids_BT
    arrived.append([batch.inputs.to(card, non_blocking=True), batch.labels.to(card, non_blocking=True), documents])
    del batch
for tensors in arrived:
    batch = next(here)
    assert not batch.inputs.is_pinned()
    expected = [batch.inputs, batch.labels, Documents.from_ids(batch.document_ids).ids_BT]
    assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected, strict=True))
here.close()
there.close()
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_pinned_batches_arrive_as_they_were(run_well: Run, tmp_path: Path, workers: str) -> None:
    """40 batches while the card is busy; each one's memory is free for the next as soon as its copy is through."""
    lines = [json.dumps({"tokens": [(7 * d + 3 * i) % 100 for i in range(2 + d % 23)]}) for d in range(300)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    run_well(PROGRAM, str(tmp_path / "data.jsonl"), workers, TT_SIM_DELAY="4")
