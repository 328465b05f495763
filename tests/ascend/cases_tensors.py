"""Cases: indexing, shapes, fills, order."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from operator_maker import case, gradients, inplace

case("embedding", lambda m: gradients(lambda w: F.embedding(m.integers(10, 3, 4), w), m.normal(10, 6)))
case(
    "embedding with padding",
    lambda m: gradients(lambda w: F.embedding(m.integers(10, 3, 4), w, padding_idx=2), m.normal(10, 6)),
)
case("embedding_bag", lambda m: F.embedding_bag(m.integers(5, 3, 2), m.normal(5, 4), mode="sum"), (torch.float32,))
case(
    "index",
    lambda m: [
        (x := m.normal(4, 5, 6))[m.values([0, 3])],
        x[:, m.values([0, 3])],
        x[m.values([0, 3]), :, m.values([1, 2])],
        x[1],
        x[..., 2:4],
        x[m.values([[0], [1]]), m.values([1, 2])],
    ],
)
case(
    "index by mask",
    lambda m: [(x := m.normal(4, 5))[m.booleans(4, 5)], x[m.booleans(4)], torch.masked_select(x, m.booleans(4, 5))],
)
case("index gradient", lambda m: gradients(lambda x: x[m.values([0, 3, 0])], m.normal(4, 5)))
case(
    "index_put",
    lambda m: [
        inplace(m.normal(4, 5), "index_put_", (m.values([0, 2]),), m.normal(2, 5)),
        inplace(m.normal(4, 5), "index_put_", (m.values([0, 0]),), m.normal(2, 5), accumulate=True),
    ],
)
case(
    "assignment",
    lambda m: [
        inplace(m.normal(4, 5), "__setitem__", 1, 2.5),
        inplace(m.normal(4, 5), "__setitem__", (slice(None), m.values([0, 2])), m.normal(4, 2)),
        inplace(m.normal(4, 5), "__setitem__", m.booleans(4, 5), 0.5),
    ],
)
case("index_select", lambda m: gradients(lambda x: x.index_select(1, m.values([0, 3, 0])), m.normal(4, 5)))
case("index_add", lambda m: m.normal(4, 5).index_add(0, m.values([0, 2, 0]), m.normal(3, 5), alpha=2))
case("index_copy", lambda m: m.normal(4, 5).index_copy(0, m.values([2, 0]), m.normal(2, 5)))
case("index_fill", lambda m: m.normal(4, 5).index_fill(1, m.values([2, 0]), 1.5))
case("gather", lambda m: gradients(lambda x: x.gather(1, m.integers(5, 4, 3)), m.normal(4, 5)))
case(
    "scatter",
    lambda m: [
        m.normal(4, 5).scatter(1, m.values([[0, 1], [2, 3], [4, 0], [1, 2]]), m.normal(4, 2)),
        m.normal(4, 5).scatter(1, m.values([[0], [2], [4], [1]]), 2.5),
    ],
)
case("scatter_add", lambda m: m.normal(4, 5).scatter_add(1, m.integers(5, 4, 3), m.normal(4, 3)))
case(
    "scatter_reduce",
    lambda m: [m.normal(6).scatter_reduce(0, m.integers(6, 9), m.normal(9), r) for r in ("sum", "amax", "amin")],
    (torch.float32,),
)
case("take", lambda m: torch.take(m.normal(4, 5), m.integers(20, 3)))
case(
    "nonzero",
    lambda m: [torch.nonzero(m.booleans(4, 5)), *torch.nonzero(m.booleans(4, 5), as_tuple=True)],
    (torch.float32,),
)
case("masked_scatter", lambda m: m.normal(4, 5).masked_scatter(m.booleans(4, 5), m.normal(20)))

case(
    "cat and stack",
    lambda m: [
        torch.cat([m.normal(2, 3), m.normal(4, 3)]),
        torch.cat([m.normal(2, 3), m.normal(2, 1)], 1),
        torch.stack([m.normal(2, 3), m.normal(2, 3)], 1),
    ],
)
case(
    "split",
    lambda m: [
        *torch.split(m.normal(7, 3), [2, 5]),
        *m.normal(7, 3).chunk(3),
        *torch.split_with_sizes_copy(m.normal(7), [3, 4]),
    ],
)
case("chunk_cat", lambda m: torch._chunk_cat([m.normal(5, 3), m.normal(4)], 0, 2))
case(
    "copy strided",
    lambda m: [
        m.normal(4, 5).t().contiguous(),
        m.normal(4, 6)[:, ::2].clone(),
        inplace(m.normal(4, 6), "copy_", m.normal(6)),
    ],
)
case("views", lambda m: [m.normal(4, 6).view(2, 2, 6).permute(2, 0, 1).reshape(-1), m.normal(1, 5).expand(3, 5) + 1])
case(
    "flip roll repeat",
    lambda m: [(x := m.normal(3, 4)).flip(0), x.flip((0, 1)), x.roll(1, 0), x.repeat(2, 3), torch.tile(x, (2,))],
)
case(
    "repeat_interleave",
    lambda m: [
        (x := m.normal(3, 4)).repeat_interleave(2, 1),
        x.repeat_interleave(2),
        x.repeat_interleave(m.values([1, 0, 2]), 0),
    ],
)
case("tril triu", lambda m: [(x := m.normal(4, 5)).tril(), x.triu(1), x.tril(-1), inplace(x, "triu_")])
case("pad", lambda m: F.pad(m.normal(3, 4), (1, 2, 0, 1), value=2.5))
case(
    "pads that mirror and repeat",
    lambda m: [
        *gradients(lambda x: F.pad(x, (1, 2), mode="reflect"), m.normal(2, 3, 4)),
        *gradients(lambda x: F.pad(x, (1, 2, 1, 0), mode="replicate"), m.normal(1, 2, 3, 4)),
    ],
    (torch.float32,),
)
case("diag", lambda m: [torch.diag(m.normal(4)), torch.diagonal(m.normal(4, 4)).clone()])
case("unfold gradient", lambda m: gradients(lambda x: x.unfold(0, 3, 2), m.normal(9)), (torch.float32,))

case(
    "arange",
    lambda m: [
        torch.arange(7, device=m.device),
        torch.arange(1, 2, 0.25, device=m.device),
        torch.arange(9, 1, -3, device=m.device),
        torch.arange(5, dtype=m.dtype, device=m.device),
    ],
)
case(
    "fills",
    lambda m: [
        torch.zeros(3, dtype=m.dtype, device=m.device),
        torch.ones(3, dtype=m.dtype, device=m.device),
        torch.full((2, 3), 1.5, dtype=m.dtype, device=m.device),
        torch.eye(3, 4, device=m.device),
        torch.linspace(0, 1, 5, device=m.device),
        inplace(m.normal(3), "fill_", 2),
        inplace(m.normal(3), "zero_"),
        torch.ones_like(m.normal(2)),
        torch.full((2,), math.inf, device=m.device),
    ],
)
case("one_hot", lambda m: F.one_hot(m.integers(5, 4), 5), (torch.float32,))

case(
    "sort",
    lambda m: [
        *m.normal(4, 9).sort(1),
        *m.normal(9).sort(descending=True),
        m.normal(9).argsort(),
        *torch.sort(m.integers(5, 12), stable=True),
    ],
    (torch.float32,),
)
case("topk", lambda m: [*m.normal(4, 9).topk(3), *m.normal(9).topk(2, largest=False)], (torch.float32,))
case(
    "unique",
    lambda m: [
        m.integers(5, 12).unique(),
        *m.integers(5, 12).unique(return_inverse=True, return_counts=True),
        *torch.unique_consecutive(m.values([1, 1, 2, 2, 1]), return_counts=True),
    ],
    (torch.float32,),
)
case(
    "searchsorted",
    lambda m: [
        torch.searchsorted(m.values([1.0, 3.0, 5.0]), m.values([0.5, 3.0, 9.0])),
        torch.bucketize(m.values([0.5, 3.0]), m.values([1.0, 3.0]), right=True),
    ],
    (torch.float32,),
)
case(
    "histc bincount",
    lambda m: [torch.histc(m.values([1.0, 2.0, 1.0]), 4, 0, 3), torch.bincount(m.values([0, 1, 3, 1]))],
    (torch.float32,),
)
case("isin", lambda m: torch.isin(m.values([1, 2, 3]), 2), (torch.float32,))
