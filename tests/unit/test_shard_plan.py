"""The planner: who owns which element, where shards are cut, and what that costs in padding (R6)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_npu import _C

SIZE = {
    _C.DType.float32: 4,
    _C.DType.float16: 2,
    _C.DType.bfloat16: 2,
    _C.DType.float64: 8,
    _C.DType.bytes: 1,
}
Plan = Any


def spec(name: str, *shape: int, dtype: Any = _C.DType.float32, master: Any = None, **kwargs: Any) -> Any:
    rows, row_numel = (shape[0], 1) if shape else (1, 1)
    for size in shape[1:]:
        row_numel *= size
    master = dtype if master is None else master
    return _C.ParamSpec(name=name, rows=rows, row_numel=row_numel, param_dtype=dtype, master_dtype=master, **kwargs)


def one_unit(params: Sequence[Any], world_size: int, cap: int | None = None) -> Plan:
    unit = _C.UnitSpec(name="layer", params=list(range(len(params))))
    return _C.ShardPlan(params=list(params), units=[unit], world_size=world_size, cap_bytes=cap)


def byte_unit(param: Any) -> int:
    """Bytes parameters are cut and placed at multiples of this, so that no element is cut whatever its type."""
    if param.param_dtype != _C.DType.bytes or param.row_numel == 0:
        return 1
    return next(u for u in (16, 8, 4, 2, 1) if param.row_numel % u == 0)


def padding_limit(params: Sequence[Any], world_size: int, bucket: Any) -> int:
    """max(1 %, 4 KiB, what the smallest shard forces), in elements; see the top of bucket_layout.h."""
    end, unit = 0, 1
    for i in bucket.params:
        param = params[i]
        if param.rows * param.row_numel:
            u = byte_unit(param)
            end = -(-end // u) * u + param.rows * param.row_numel
            unit = max(unit, u)
    smallest = -(-end // world_size)
    smallest = -(-smallest // unit) * unit
    payload = bucket.payload_numel
    if payload == 0:
        return 0
    return max(payload // 100, 4096 // SIZE[bucket.param_dtype], world_size * smallest - payload)


def check(plan: Plan, cap: int | None) -> None:
    """Everything that must hold for every plan."""
    n = plan.world_size
    params, buckets = plan.params, plan.buckets  # each access makes a new list
    seen: list[int] = []
    assert sum(plan.unit_buckets, []) == list(range(len(buckets)))
    for index, bucket in enumerate(buckets):
        shard = bucket.shard_numel
        total = plan.bucket_numel(index)
        size = SIZE[bucket.param_dtype]
        assert total == n * shard
        assert bucket.payload_numel == sum(params[i].rows * params[i].row_numel for i in bucket.params)
        assert 0 <= total - bucket.payload_numel <= padding_limit(params, n, bucket)
        if cap is not None and sum(plan.placement(i).numel > 0 for i in bucket.params) > 1:
            assert total * size <= cap

        end = 0
        for i in bucket.params:
            param, at = params[i], plan.placement(i)
            assert at.bucket == index
            assert at.numel == param.rows * param.row_numel
            assert end <= at.offset and at.offset + at.numel <= total
            end = at.offset + at.numel
            if at.numel == 0:
                continue
            assert at.offset % byte_unit(param) == 0 and at.atom_numel % byte_unit(param) == 0
            cuts = [b - at.offset for b in range(0, total, shard) if at.offset < b < end]
            assert all(cut % at.atom_numel == 0 for cut in cuts)
            assert plan.row_aligned(i) == all(cut % param.row_numel == 0 for cut in cuts)
        seen += bucket.params
    assert sorted(seen) == list(range(len(params)))

    # Every element has exactly one owner: the ranks' pieces tile the parameter, and each lies where the bucket says.
    pieces = [plan.pieces(rank) for rank in range(n)]
    for i in range(len(params)):
        at = plan.placement(i)
        shard = buckets[at.bucket].shard_numel
        next_element = 0
        for rank in range(n):
            piece = pieces[rank][i]
            assert piece.start == next_element
            next_element += piece.numel
            assert piece.shard_offset >= 0 and piece.shard_offset + piece.numel <= shard
            if piece.numel:
                assert rank * shard + piece.shard_offset == at.offset + piece.start
        assert next_element == at.numel


dtypes = st.sampled_from([_C.DType.float32, _C.DType.bfloat16, _C.DType.bytes])
dims = st.one_of(st.integers(0, 12), st.integers(0, 400), st.sampled_from([64, 128, 512, 1000, 1376]))


@st.composite
def param_specs(draw: st.DrawFn) -> Any:
    dtype = draw(dtypes)
    return _C.ParamSpec(
        name="p",
        rows=draw(dims),
        row_numel=draw(dims),
        param_dtype=dtype,
        master_dtype=dtype if dtype == _C.DType.bytes else draw(st.sampled_from([_C.DType.float32, dtype])),
        requires_grad=draw(st.booleans()),
        granularity=draw(st.sampled_from([1, 1, 1, 3, 128, 10**9])),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, int | None]:
    params = draw(st.lists(param_specs(), max_size=12))
    order = draw(st.permutations(range(len(params))))
    cut = draw(st.integers(0, len(params)))
    units = [_C.UnitSpec(name="a", params=order[:cut]), _C.UnitSpec(name="b", params=order[cut:])]
    cap = draw(st.one_of(st.none(), st.integers(1, 5000), st.integers(1, 4_000_000)))
    world_size = draw(st.one_of(st.integers(1, 9), st.sampled_from([64, 1000])))
    return _C.ShardPlan(params=params, units=units, world_size=world_size, cap_bytes=cap), cap


@settings(max_examples=100, deadline=None)
@given(plans())
def test_every_plan_keeps_the_rules(drawn: tuple[Plan, int | None]) -> None:
    check(*drawn)


@settings(max_examples=50, deadline=None)
@given(plans())
def test_buckets_hold_one_kind_each_and_keep_the_order(drawn: tuple[Plan, int | None]) -> None:
    plan, cap = drawn
    params, all_buckets, unit_buckets = plan.params, plan.buckets, plan.unit_buckets
    for u, unit in enumerate(plan.units):
        kinds: dict[Any, list[int]] = {}
        for i in unit.params:
            p = params[i]
            kinds.setdefault((p.param_dtype, p.master_dtype, p.requires_grad), []).append(i)
        buckets = [all_buckets[b] for b in unit_buckets[u]]
        assert all(b.unit == u for b in buckets)
        # Kinds in order of first appearance, parameters in the unit's order within a kind.
        assert sum([b.params for b in buckets], []) == sum(kinds.values(), [])
        for b in buckets:
            for i in b.params:
                p = params[i]
                assert (p.param_dtype, p.master_dtype, p.requires_grad) == (
                    b.param_dtype,
                    b.master_dtype,
                    b.requires_grad,
                )
        if cap is None:
            assert len(buckets) == len(kinds)


def whole_row_layout_exists(shapes: Sequence[tuple[int, int]], world_size: int, most: int) -> bool:
    """Brute force: is there a shard size with N * S <= most that cuts no row? The earliest place is the best."""
    payload = sum(r * c for r, c in shapes)
    for shard in range(-(-payload // world_size), most // world_size + 1):
        cursor = 0
        for rows, row in shapes:
            numel = rows * row
            while cursor + numel <= world_size * shard and any(
                (b - cursor) % row for b in range(shard, world_size * shard, shard) if cursor < b < cursor + numel
            ):
                cursor += 1
            cursor += numel
        if cursor <= world_size * shard:
            return True
    return False


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 60)), min_size=1, max_size=4),
    st.sampled_from([2, 3, 5, 16, 60]),
)
def test_rows_are_whole_whenever_the_padding_allows_it(shapes: list[tuple[int, int]], world_size: int) -> None:
    plan = one_unit([spec(f"p{i}", *s, dtype=_C.DType.float64) for i, s in enumerate(shapes)], world_size)
    most = plan.buckets[0].payload_numel + padding_limit(plan.params, world_size, plan.buckets[0])
    aligned = all(plan.row_aligned(i) for i in range(len(shapes)))
    assert aligned == whole_row_layout_exists(shapes, world_size, most)


def test_matrices_are_cut_between_rows() -> None:
    # 10 rows of 300 and 7 rows of 200 on 2 ranks: 4,400 elements, so S >= 2,200, which falls into row 7 of `a`
    # (7 * 300 = 2,100). Moving the cut to 8 rows takes S = 2,400: 400 elements of padding, 1,600 bytes of the 4 KiB.
    plan = one_unit([spec("a", 10, 300), spec("b", 7, 200)], 2)
    check(plan, None)
    rows = [[p.numel // plan.params[i].row_numel for i, p in enumerate(plan.pieces(rank))] for rank in range(2)]
    assert [sum(column) for column in zip(*rows, strict=True)] == [10, 7]
    assert plan.row_aligned(0) and plan.row_aligned(1)
    assert plan.bucket_numel(0) - 4400 <= 1024


def test_rows_are_cut_where_padding_would_pass_one_percent() -> None:
    # 3 rows of 1,000,000 on 2 ranks: whole rows need S = 2,000,000, 33 % padding. Cut in the middle: 1,500,000.
    plan = one_unit([spec("w", 3, 1_000_000)], 2)
    check(plan, None)
    assert not plan.row_aligned(0)
    assert plan.buckets[0].shard_numel == 1_500_000
    assert plan.placement(0).atom_numel < 1_000_000


def test_only_the_offending_parameter_loses_its_rows() -> None:
    # Long rows of `w` cannot be cut evenly (33 %), the rows of `v` (16 elements) can.
    plan = one_unit([spec("v", 62_500, 16), spec("w", 3, 1_000_000), spec("u", 62_500, 16)], 4)
    check(plan, None)
    assert [plan.row_aligned(i) for i in range(3)] == [True, False, True]


def test_a_scalar_on_many_ranks_costs_one_element_per_rank_at_least() -> None:
    # 1 element on 1,024 ranks forces S = 1 and 1,023 elements of padding; float32 allows 1,024 (4 KiB), so S stays 1.
    plan = one_unit([spec("scale")], 1024)
    check(plan, None)
    assert plan.buckets[0].shard_numel == 1
    assert [p[0].numel for p in (plan.pieces(0), plan.pieces(1))] == [1, 0]


def test_granularity_keeps_blocks_of_rows_together() -> None:
    # 6 blocks of 128 rows of 64 (8,192 elements each) and 16,384 more on 4 ranks: S = 16,384 is two blocks.
    plan = one_unit([spec("w", 768, 64, granularity=128), spec("v", 256, 64)], 4)
    check(plan, None)
    assert plan.placement(0).atom_numel == 128 * 64
    assert [plan.piece(0, rank).numel // 8192 for rank in range(4)] == [2, 2, 2, 0]


def test_granularity_gives_way_before_rows_do() -> None:
    # 8 such blocks on 3 ranks need 3 per shard, 12.5 % padding. Rows need ceil(1,024 / 3) = 342 per shard, 0.2 %.
    plan = one_unit([spec("w", 1024, 64, granularity=128)], 3)
    check(plan, None)
    assert plan.placement(0).atom_numel < 128 * 64
    assert plan.row_aligned(0)
    assert plan.buckets[0].shard_numel == 342 * 64


def test_whole_matrices_stay_whole() -> None:
    # Four matrices of equal size on 4 ranks with "the whole matrix" as atom: one each.
    plan = one_unit([spec(f"w{i}", 256, 256, granularity=256) for i in range(4)], 4)
    check(plan, None)
    assert [[p.numel for p in plan.pieces(rank)].count(256 * 256) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_shards_and_starts_lie_on_cache_lines(world_size: int) -> None:
    # bf16 parameters with a bf16 master copy: 64 bytes are 32 elements. `b` ends between two lines.
    b = _C.DType.bfloat16
    plan = one_unit([spec("a", 333, 64, dtype=b), spec("b", 77, dtype=b), spec("c", 500, 96, dtype=b)], world_size)
    check(plan, None)
    assert plan.buckets[0].shard_numel % 32 == 0
    assert all(plan.placement(i).offset % 32 == 0 for i in range(3))


def test_bytes_are_never_cut_inside_an_element() -> None:
    # 5 int64 (8 bytes each) on 3 ranks: 40 bytes, S = 14 would cut the second one; S = 16 is the smallest legal shard.
    plan = one_unit([spec("flags", 3, dtype=_C.DType.bytes), spec("steps", 5, 8, dtype=_C.DType.bytes)], 3)
    check(plan, None)
    assert all(plan.piece(1, rank).numel % 8 == 0 for rank in range(3))
    assert all(plan.piece(1, rank).start % 8 == 0 for rank in range(3))


def test_zero_sized_parameters_have_empty_pieces() -> None:
    plan = one_unit([spec("none", 0, 4), spec("w", 16, 4), spec("no_columns", 3, 0)], 2)
    check(plan, None)
    assert [[p.numel for p in plan.pieces(rank)] for rank in range(2)] == [[0, 32, 0], [0, 32, 0]]
    empty = one_unit([spec("none", 0, 4)], 2)
    assert empty.buckets[0].shard_numel == 0 and empty.padding_fraction() == 0.0


def test_cap_packs_in_order_and_lets_a_large_parameter_stand_alone() -> None:
    # float32, cap 4 KiB = 1,024 elements on 2 ranks: 512 + 512 fit, 2,048 is alone, 256 starts anew.
    plan = one_unit([spec("a", 512), spec("b", 512), spec("big", 2048), spec("c", 256)], 2, cap=4096)
    check(plan, 4096)
    assert [b.params for b in plan.buckets] == [[0, 1], [2], [3]]


def test_padding_never_pushes_a_bucket_over_the_cap() -> None:
    # 340 + 341 + 341 = 1,022 elements elements, but 3 ranks need 3 * 341 = 1,023: with a cap of 1,022 the last must go.
    params = [spec("a", 340), spec("b", 341), spec("c", 341)]
    assert [b.params for b in one_unit(params, 3, cap=1024 * 4).buckets] == [[0, 1, 2]]
    assert [b.params for b in one_unit(params, 3, cap=1022 * 4).buckets] == [[0, 1], [2]]


def test_one_rank_owns_everything_without_padding() -> None:
    plan = one_unit([spec("a", 512, 32), spec("b", 64)], 1)
    check(plan, None)
    assert plan.padding_fraction() == 0.0
    assert [p.numel for p in plan.pieces(0)] == [512 * 32, 64]


def llama(dim: int, ffn: int, n_layers: int, kv_dim: int, vocab: int) -> tuple[list[Any], list[Any]]:
    params: list[Any] = []
    units: list[Any] = []

    def add(unit: str, shapes: dict[str, tuple[int, ...]]) -> None:
        first = len(params)
        for name, shape in shapes.items():
            params.append(spec(f"{unit}.{name}", *shape, dtype=_C.DType.bfloat16, master=_C.DType.float32))
        units.append(_C.UnitSpec(name=unit, params=list(range(first, len(params)))))

    attention = {"wq": (dim, dim), "wk": (kv_dim, dim), "wv": (kv_dim, dim), "wo": (dim, dim)}
    ffn_shapes = {"w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}
    for i in range(n_layers):
        add(f"layers.{i}", {**attention, **ffn_shapes, "attention_norm": (dim,), "ffn_norm": (dim,)})
    add("root", {"tok_embeddings": (vocab, dim), "norm": (dim,), "output": (vocab, dim)})
    return params, units


LLAMA = {
    "7B": ((4096, 11008, 32, 4096, 128256), 7_526_944_768),
    "8B": ((4096, 14336, 32, 1024, 128256), 8_030_261_248),
    "70B": ((8192, 28672, 80, 1024, 128256), 70_553_706_496),
}


@pytest.mark.parametrize("cap", [25 * 2**20, None], ids=["25MiB", "no_cap"])
@pytest.mark.parametrize("size", LLAMA)
def test_llama_padding_is_below_one_percent(size: str, cap: int | None) -> None:
    shape, parameters = LLAMA[size]
    params, units = llama(*shape)
    assert sum(p.rows * p.row_numel for p in params) == parameters
    for world_size in (2, 3, 4, 8, 16, 64, 256, 1000, 1024):
        plan = _C.ShardPlan(params=params, units=units, world_size=world_size, cap_bytes=cap)
        assert plan.padding_fraction() <= 0.01
        for index, bucket in enumerate(plan.buckets):
            assert plan.bucket_numel(index) - bucket.payload_numel <= padding_limit(params, world_size, bucket)
            assert cap is None or len(bucket.params) == 1 or plan.bucket_numel(index) * 2 <= cap
        if world_size <= 64:  # ordinary sizes never cut a row
            assert all(plan.row_aligned(i) for i in range(len(params)))


# dim, ffn, layers, kv_dim, vocabulary: other models' shapes, and some that divide by nothing.
AWKWARD = [
    (1536, 4103, 3, 256, 151_936),
    (2048, 5461, 3, 2048, 50_257),
    (2304, 5760, 3, 384, 49_155),
    (3584, 18_944, 3, 512, 152_064),
    (5120, 13_824, 3, 5120, 32_003),
    (7168, 20_480, 3, 1025, 129_280),
]


@pytest.mark.parametrize("cap", [5 * 2**20, 25 * 2**20, 100 * 2**20, None], ids=["5MiB", "25MiB", "100MiB", "no_cap"])
@pytest.mark.parametrize("shape", AWKWARD, ids=str)
def test_padding_of_awkward_shapes_is_below_one_percent(shape: tuple[int, ...], cap: int | None) -> None:
    """Over all buckets, for numbers of ranks that divide nothing either."""
    params, units = llama(*shape)
    for world_size in (2, 3, 5, 7, 12, 24, 48, 96, 100, 384, 768, 1000, 1024):
        plan = _C.ShardPlan(params=params, units=units, world_size=world_size, cap_bytes=cap)
        assert plan.padding_fraction() <= 0.01, (world_size, plan.padding_fraction())


def test_pieces_of_a_llama_block_tile_it() -> None:
    params, units = llama(512, 1376, 2, 512, 8192)
    for world_size, cap in itertools.product((2, 3, 4, 16), (None, 2**20)):
        check(_C.ShardPlan(params=params, units=units, world_size=world_size, cap_bytes=cap), cap)


def test_equal_inputs_hash_equal() -> None:
    params, units = llama(512, 1376, 2, 512, 8192)
    one = _C.ShardPlan(params=params, units=units, world_size=4, cap_bytes=2**20)
    params_again, units_again = llama(512, 1376, 2, 512, 8192)
    two = _C.ShardPlan(params=params_again, units=units_again, world_size=4, cap_bytes=2**20)
    assert one.hash() == two.hash()


def test_any_change_changes_the_hash() -> None:
    f, b = _C.DType.float32, _C.DType.bfloat16
    changed = [
        one_unit([spec("a", 8, 4), spec("b", 4)], 2),
        one_unit([spec("a", 4, 8), spec("b", 4)], 2),
        one_unit([spec("a", 8, 4), spec("b", 5)], 2),
        one_unit([spec("ab", 8, 4), spec("", 4)], 2),
        one_unit([spec("b", 4), spec("a", 8, 4)], 2),
        one_unit([spec("a", 8, 4), spec("b", 4)], 3),
        one_unit([spec("a", 8, 4), spec("b", 4)], 2, cap=128),
        one_unit([spec("a", 8, 4, dtype=b), spec("b", 4)], 2),
        one_unit([spec("a", 8, 4, dtype=b, master=f), spec("b", 4)], 2),
        one_unit([spec("a", 8, 4, requires_grad=False), spec("b", 4)], 2),
        one_unit([spec("a", 8, 4, granularity=2), spec("b", 4)], 2),
        _C.ShardPlan(
            params=[spec("a", 8, 4), spec("b", 4)],
            units=[_C.UnitSpec(name="layer", params=[0]), _C.UnitSpec(name="root", params=[1])],
            world_size=2,
        ),
    ]
    hashes = [plan.hash() for plan in changed]
    assert len(set(hashes)) == len(changed)
    assert hashes[0] == one_unit([spec("a", 8, 4), spec("b", 4)], 2).hash()


@pytest.mark.parametrize(
    ("params", "units", "options", "message"),
    [
        ([spec("w", 4)], [[0]], {"world_size": 0}, "world_size is 0"),
        ([spec("w", 4)], [[0]], {"cap_bytes": 0}, "cap_bytes is 0"),
        ([spec("w", -4)], [[0]], {}, "parameter 'w'.*negative"),
        ([spec("w", 4, granularity=0)], [[0]], {}, "parameter 'w': granularity is 0"),
        ([spec("w", 4, dtype=_C.DType.bytes, master=_C.DType.float32)], [[0]], {}, "'w'.*bytes.*float32"),
        ([spec("w", 2**40, 2**40)], [[0]], {}, "parameter 'w'.*2\\^55"),
        ([spec("w", 4), spec("v", 4)], [[0]], {}, "parameter 'v' is in no unit"),
        ([spec("w", 4)], [[0], [0]], {}, "parameter 'w' is in unit 'u0' and again in unit 'u1'"),
        ([spec("w", 4)], [[0, 0]], {}, "parameter 'w' is in unit 'u0' and again in unit 'u0'"),
        ([spec("w", 4)], [[0, 7]], {}, "unit 'u0': parameter index 7 is out of range; there are 1"),
    ],
)
def test_bad_specs_are_refused_by_name(
    params: list[Any], units: list[list[int]], options: dict[str, int], message: str
) -> None:
    named = [_C.UnitSpec(name=f"u{i}", params=members) for i, members in enumerate(units)]
    with pytest.raises(ValueError, match=message):
        _C.ShardPlan(**{"params": params, "units": named, "world_size": 2, **options})


def test_questions_out_of_range_are_refused() -> None:
    plan = one_unit([spec("w", 4)], 2)
    with pytest.raises(ValueError, match="rank 2 is out of range"):
        plan.piece(0, 2)
    with pytest.raises(ValueError, match="parameter 1 is out of range"):
        plan.piece(1, 0)
    with pytest.raises(ValueError, match="parameter -1 is out of range"):
        plan.placement(-1)
    with pytest.raises(ValueError, match="bucket 1 is out of range"):
        plan.bucket_numel(1)
