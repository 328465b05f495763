"""Which corpora a run reads: --data_dir, or data.mixture below it."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_npu.config import DataConfig
from torchtitan_npu.config.schema import MixturePart
from torchtitan_npu.data.errors import DataError
from torchtitan_npu.data.sources import Source, training_sources


def test_one_corpus() -> None:
    assert training_sources(DataConfig(), "x/*.jsonl") == [Source("x/*.jsonl", 1.0, "the data", "--data_dir")]
    with pytest.raises(DataError, match="give --data_dir, or name corpora in data.mixture"):
        training_sources(DataConfig(), None)


def test_a_mixture_lies_in_the_data_directory(tmp_path: Path) -> None:
    parts = (MixturePart(path="web", weight=3.0), MixturePart(path="/books.jsonl", name="books"))
    expected = [("web", 3.0, "web", "data.mixture, item 1"), ("/books.jsonl", 1.0, "books", "data.mixture, item 2")]
    for data_dir, first in ((None, "web"), (str(tmp_path), f"{tmp_path}/web")):
        found = training_sources(DataConfig(mixture=parts), data_dir)
        assert found == [Source(first, *expected[0][1:]), Source(*expected[1])]
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="must be a directory"):
        training_sources(DataConfig(mixture=parts), str(tmp_path / "file"))
    with pytest.raises(DataError, match="web stands there more than once; add up the weights"):
        training_sources(DataConfig(mixture=(*parts, MixturePart(path="web"))), None)
