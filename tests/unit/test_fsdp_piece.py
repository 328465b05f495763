"""Pieces: how a run of elements is cut into rectangles, and what they tell torch.distributed.checkpoint."""

from __future__ import annotations

import copy
import io
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu.fsdp import Piece
from torchtitan_npu.fsdp.piece import rectangles


@pytest.mark.parametrize(
    ("shape", "start", "numel", "expected"),
    [
        ((), 0, 1, [((), ())]),
        ((), 0, 0, []),
        ((7,), 2, 3, [((2,), (3,))]),
        ((5, 4), 4, 8, [((1, 0), (2, 4))]),
        ((5, 4), 5, 2, [((1, 1), (1, 2))]),
        ((5, 4), 2, 12, [((0, 2), (1, 2)), ((1, 0), (2, 4)), ((3, 0), (1, 2))]),
        ((5, 4), 3, 2, [((0, 3), (1, 1)), ((1, 0), (1, 1))]),
        ((2, 3, 4), 0, 24, [((0, 0, 0), (2, 3, 4))]),
        (
            (2, 3, 4),
            6,
            12,
            [((0, 1, 2), (1, 1, 2)), ((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 1, 4)), ((1, 1, 0), (1, 1, 2))],
        ),
    ],
)
def test_rectangles(shape: tuple[int, ...], start: int, numel: int, expected: list) -> None:
    assert rectangles(shape, start, numel) == expected


@settings(max_examples=300, deadline=None)
@given(shape=st.lists(st.integers(1, 5), max_size=4), data=st.data())
def test_rectangles_cover_the_run_in_order(shape: list[int], data: st.DataObject) -> None:
    """Laid end to end, the rectangles are the run itself, and there are at most 2 * ndim - 1."""
    total = prod(shape)
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    whole = torch.arange(total).view(shape)
    found = rectangles(tuple(shape), start, numel)
    parts = [whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] for offsets, sizes in found]
    flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
    assert torch.equal(flat, torch.arange(start, start + numel))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def piece(start: int = 5, numel: int = 10, rank: int = 1, shape: tuple[int, ...] = (5, 4)) -> Piece:
    data = torch.arange(start, start + numel, dtype=torch.float32)
    return Piece(data, fqn="layer.weight", shape=torch.Size(shape), start=start, rank=rank, world_size=3)


def test_what_the_checkpoint_asks() -> None:
    """Elements 5..14 of a 5x4 tensor: the rest of row 1, row 2, and three of row 3."""
    p = piece()
    whole = torch.arange(20, dtype=torch.float32).view(5, 4)
    items = p.__create_write_items__("model.layer.weight", p)
    assert [item.index.offset for item in items] == [(1, 1), (2, 0), (3, 0)]
    assert {item.tensor_data.size for item in items} == {torch.Size([5, 4])}
    assert [chunk.sizes for chunk in p.__create_chunk_list__()] == [(1, 3), (1, 4), (1, 3)]
    for item in items:
        (y, x), (h, w) = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
        shard = p.__get_tensor_shard__(item.index)
        assert torch.equal(shard, whole[y : y + h, x : x + w])
        assert shard.untyped_storage().data_ptr() == p.untyped_storage().data_ptr(), "no copy: loading writes into it"


def test_an_empty_piece_and_an_empty_tensor() -> None:
    """A piece of no rows has nothing to save; a tensor without elements is in the checkpoint once, by rank 0."""
    assert piece(numel=0).__create_write_items__("x", None) == []
    empty = [piece(0, 0, rank, (0, 4)).__create_chunk_list__() for rank in range(3)]
    assert [len(chunks) for chunks in empty] == [1, 0, 0]
    assert (empty[0][0].offsets, empty[0][0].sizes) == ((0, 0), (0, 4))


def test_behaves_like_a_tensor_and_is_saved_as_one() -> None:
    p = piece()
    assert isinstance(p + 1, torch.Tensor) and torch.equal((p + 1), torch.arange(6.0, 16.0))
    assert "elements 5..15 of 'layer.weight' (5, 4), shard 1 of 3" in repr(p)
    file = io.BytesIO()
    torch.save({"p": p}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["p"]
    assert type(loaded) is torch.Tensor and torch.equal(loaded, p.plain())


def test_deepcopy_keeps_its_place() -> None:
    p = piece()
    other = copy.deepcopy(p)
    assert (other.fqn, other.start, other.rank, other.whole_shape) == (p.fqn, p.start, p.rank, p.whole_shape)
    other.plain().zero_()
    assert p.plain()[0] == 5
