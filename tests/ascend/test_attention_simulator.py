"""FlashAttention of the simulated Ascend, through torch_npu, against attention in fp64 (attention_reference.py).

Every layout, sparse mode, type and ratio of heads, forward and gradient; dropout; sequences of different length; and
arguments that break a documented rule.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from in_process import use_simulator
from simulated import Run

use_simulator()

import torch  # noqa: E402 - see in_process.py
from attention_reference import Case, Problem, pack, unpack, unpack_softmax  # noqa: E402

# The operators compute in fp32 and round what they return, the gradient also reads a rounded output. Numbers are of
# order 1 and sums have at most 32 terms: a few units in the last place of each type.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 5e-2}

DENSE = ("BSH", "SBH", "BNSD", "BSND")
SQUARE = ((6, 6), (6, 6))
WIDE = ((5, 9), (5, 9))
TALL = ((9, 5), (9, 5))
UNEVEN = ((3, 3), (7, 7), (1, 1), (5, 5))
LONGER_KEYS = ((3, 4), (2, 7), (4, 4))
RAGGED = Case(layout="TND", lengths=UNEVEN)
MANY = 65536  # tokens, more than any sequence here has


def fusion_attention(problem: Problem, **changes) -> dict[str, list[torch.Tensor]]:
    """The operator and its gradient on the simulated card, per batch entry and in fp64."""
    import torch_npu

    case = problem.case
    arguments = problem.arguments() | changes
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            arguments[name] = value.npu()
    operator = torch_npu.npu_fusion_attention
    if "pse_type" in arguments:
        operator = torch_npu.npu_fusion_attention_v2
        arguments |= {name: arguments.pop(name.replace("tok", "tock")) for name in ("pre_tokens", "next_tokens")}
    sink = None
    if problem.sink is not None:
        arguments["sink"] = sink = problem.sink.float().npu().requires_grad_()
    q, k, v = (problem.packed(pieces).npu().requires_grad_() for pieces in (problem.q, problem.k, problem.v))
    out, high, total = operator(q, k, v, **arguments)[:3]
    assert out.dtype == case.dtype
    out.backward(problem.packed(problem.dy).npu())
    found = collect(case, out, q.grad, k.grad, v.grad, high, total)
    return found if sink is None else found | {"dsink": [sink.grad.cpu().double()]}


def collect(case: Case, out, dq, dk, dv, high, total) -> dict[str, list[torch.Tensor]]:
    queries, keys = ([pair[side] for pair in case.lengths] for side in (0, 1))
    n, m = case.heads

    def pieces(tensor: torch.Tensor, lengths: list[int], heads: int) -> list[torch.Tensor]:
        return unpack(case.layout, tensor.detach().cpu().double(), lengths, heads)

    return {
        "out": pieces(out, queries, n),
        "dq": pieces(dq, queries, n),
        "dk": pieces(dk, keys, m),
        "dv": pieces(dv, keys, m),
        "max": unpack_softmax(case, high.cpu()),
        "sum": unpack_softmax(case, total.cpu()),
    }


def compare(problem: Problem, found: dict[str, list[torch.Tensor]], kept: list[torch.Tensor] | None = None) -> None:
    expected = problem.solve(kept)
    tolerance = TOLERANCE[problem.case.dtype]
    for name, pieces in expected.items():
        for b, (piece, other) in enumerate(zip(pieces, found[name], strict=True)):
            if name in ("max", "sum"):  # of a row that sees nothing: not documented
                filled = problem.seen[b].any(-1) if problem.seen[b].numel() else torch.ones_like(piece).bool()
                piece, other = piece[filled], other[filled].double()
            torch.testing.assert_close(
                other, piece, rtol=tolerance, atol=tolerance, msg=lambda text, at=(name, b): f"{at}: {text}"
            )


def modes() -> list[Case]:
    """Sparse modes with the lengths and masks that they take, layouts without TND."""
    cases = [Case(lengths=lengths) for lengths in (SQUARE, WIDE, TALL)]
    cases += [Case(mode=0, lengths=WIDE, holes=0.3, mask_shape=shape) for shape in ("SK", "11SK", "B1SK", "BNSK")]
    cases += [Case(mode=0, pre=2, next=1, lengths=WIDE), Case(mode=0, next=0), Case(mode=0, pre=MANY, next=-1)]
    cases += [Case(mode=1, lengths=TALL, holes=0.3, mask_shape=shape) for shape in ("SK", "11SK", "B1SK", "BNSK")]
    cases += [Case(mode=1, holes=0.8, mask_shape="B1SK", inner_precise=2)]  # with rows that see nothing
    cases += [Case(mode=mode, lengths=lengths) for mode in (2, 3) for lengths in (SQUARE, WIDE, TALL)]
    cases += [Case(mode=4, pre=pre, next=n, lengths=WIDE) for pre, n in ((3, 0), (2, 2), (MANY, -2), (-1, 3))]
    cases += [Case(mode=4, pre=1, next=1, lengths=TALL)]
    cases += [Case(mode=5, prefix=(4, 6), lengths=WIDE, mask_shape=shape) for shape in ("B1SK", "BNSK")]
    cases += [Case(mode=6, prefix=(4, 6), lengths=WIDE), Case(mode=6, prefix=(0, 3), lengths=TALL)]
    return cases


def sequences() -> list[Case]:
    """Sparse modes that layout TND takes."""
    case = Case(layout="TND", lengths=UNEVEN)
    empty = ((3, 3), (0, 0), (4, 4), (0, 0))
    cases = [replace(case), replace(case, lengths=LONGER_KEYS), replace(case, lengths=empty)]
    cases += [replace(case, lengths=((3, 3), (0, 4), (2, 0), (4, 4)))]
    cases += [replace(case, mode=mode) for mode in (1, 2, 3)] + [replace(case, mode=0, next=0)]
    cases += [replace(case, mode=1, holes=0.3, mask_shape=shape) for shape in ("B1SK", "BNSK")]
    cases += [replace(case, mode=mode, lengths=empty) for mode in (2, 3)]
    cases += [replace(case, mode=3, lengths=LONGER_KEYS), replace(case, mode=4, pre=2, next=0)]
    cases += [replace(case, mode=6, prefix=(1, 7, 0, 3))]
    # Sequences cut in two, as in the documentation: 4 queries and 6 keys in mode 3 before, 5 and 4 in mode 2.
    cases += [replace(case, mode=7, pre=6, next=-2, lengths=((3, 3), (2, 6)))]
    cases += [replace(case, mode=7, pre=6, next=-2, lengths=((3, 3), (2, 6), (0, 0)))]
    cases += [replace(case, mode=8, pre=4, next=1, lengths=((3, 4), (5, 5), (4, 4)))]
    return cases


def name(case: Case) -> str:
    return str(case)


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("case", modes(), ids=name)
def test_sparse_mode(case: Case, layout: str) -> None:
    problem = Problem.make(replace(case, layout=layout))
    compare(problem, fusion_attention(problem))


@pytest.mark.parametrize("case", sequences(), ids=name)
def test_sequences(case: Case) -> None:
    problem = Problem.make(case)
    compare(problem, fusion_attention(problem))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)], ids="{0[0]}to{0[1]}".format)
@pytest.mark.parametrize(
    "case", [Case(layout=layout, mode=3, d=16, e=16) for layout in (*DENSE, "TND")], ids=lambda case: case.layout
)
def test_type_and_heads(case: Case, heads: tuple[int, int], dtype: torch.dtype) -> None:
    problem = Problem.make(replace(case, heads=heads, dtype=dtype))
    compare(problem, fusion_attention(problem))


@pytest.mark.parametrize("layout", DENSE)
@pytest.mark.parametrize("pse", ["BNSK", "BN1K", "1NSK"])
def test_pse(layout: str, pse: str) -> None:
    problem = Problem.make(Case(layout=layout, mode=2, lengths=WIDE, pse=pse))
    compare(problem, fusion_attention(problem))


@pytest.mark.parametrize("pse_type", [0, 2, 3])
def test_pse_type(pse_type: int) -> None:
    """Added after the scale; types 2 and 3 are made from slopes: -slope * |i + 5 - j - 2|, or its root."""
    problem = Problem.make(Case(mode=2, pse="BNSK"))
    problem.pse_after_scale = True
    changes: dict = {"pse_type": pse_type}
    if pse_type >= 2:
        slopes = torch.rand(2, 4, generator=torch.Generator().manual_seed(2))
        distance = (torch.arange(6).unsqueeze(1) + 5 - torch.arange(6) - 2).abs().double()
        distance = distance.sqrt() if pse_type == 3 else distance
        problem.pse = -slopes.double().view(2, 4, 1, 1) * distance
        changes |= {"pse": slopes, "q_start_idx": [5], "kv_start_idx": [2]}
    compare(problem, fusion_attention(problem, **changes))


def test_pse_of_the_last_1024_rows() -> None:
    """Numbers that depend on the distance only may be given as the last 1024 rows of the whole."""
    s = 1100
    problem = Problem.make(Case(heads=(2, 1), lengths=((s, s),), d=4, e=4, mode=2))
    distance = (torch.arange(s).unsqueeze(1) - torch.arange(s)).abs()
    slopes = torch.tensor([0.01, 0.02]).view(1, 2, 1, 1)
    problem.pse = (-slopes * distance).double()
    compare(problem, fusion_attention(problem, pse=problem.pse[:, :, -1024:].float()))


@pytest.mark.parametrize("case", [Case(mode=3, lengths=WIDE), Case(layout="TND", mode=3, lengths=UNEVEN)], ids=name)
def test_sink(case: Case) -> None:
    problem = Problem.make(case)
    problem.sink = torch.randn(4, generator=torch.Generator().manual_seed(4)).double()
    compare(problem, fusion_attention(problem))


def test_softmax_numbers_in_the_layout_of_the_query() -> None:
    problem = Problem.make(replace(RAGGED, mode=3, extra={"softmax_layout": "TND"}))
    compare(problem, fusion_attention(problem))


def test_long_sequences_go_block_by_block() -> None:
    """4200 keys: 998 rows of one pair of heads make the 4 Mi scores that are worked on at a time."""
    problem = Problem.make(Case(heads=(4, 2), lengths=((1500, 4200),), d=4, e=4, mode=1, holes=0.3))
    compare(problem, fusion_attention(problem))


@pytest.mark.parametrize("layout", (*DENSE, "TND"))
def test_dropout_is_the_same_in_the_gradient(layout: str) -> None:
    """With equal scores and the identity for V the output shows the mask: out[i, j] = kept[i, j] / (keep_prob * K)."""
    import torch_npu

    case = Case(layout=layout, lengths=((12, 16), (12, 16)), d=16, e=16, heads=(4, 2), extra={"keep_prob": 0.75})
    problem = Problem.make(case)
    flat = replace_inputs(problem)
    torch_npu.npu.manual_seed(11)
    shown = [piece * 16 for piece in fusion_attention(flat)["out"]]
    for piece in shown:
        share = piece.ne(0).double().mean().item()  # of 768: one standard deviation is 0.016
        assert 0.67 < share < 0.83
        torch.testing.assert_close(piece[piece != 0], torch.full_like(piece[piece != 0], 1 / 0.75))
    assert not torch.equal(shown[0], shown[1])
    torch_npu.npu.manual_seed(11)
    compare(problem, fusion_attention(problem), shown)


def replace_inputs(problem: Problem) -> Problem:
    q = [torch.zeros_like(piece) for piece in problem.q]
    v = [torch.eye(16, dtype=torch.float64).expand_as(piece) for piece in problem.v]
    return replace(problem, q=q, v=v)


@pytest.mark.parametrize("seeds", [(5, 5), (5, 6)])
def test_dropout_follows_the_seed(seeds: tuple[int, int]) -> None:
    import torch_npu

    problem = Problem.make(Case(extra={"keep_prob": 0.5}, lengths=((16, 16),)))
    results = []
    for seed in seeds:
        torch_npu.npu.manual_seed(seed)
        results.append(fusion_attention(problem)["out"][0])
    assert torch.equal(*results) == (seeds[0] == seeds[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["full", "causal", "mask"])
def test_scaled_dot_product_attention(form: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v, dy = (torch.randn(2, 4, 6, 16, generator=generator).to(dtype) for _ in range(4))
    mask = torch.rand(2, 1, 6, 6, generator=generator) < 0.6 if form == "mask" else None
    results = []
    for device, compute in (("cpu", torch.float64), ("npu", dtype)):
        leaves = [tensor.to(device, compute).requires_grad_() for tensor in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=None if mask is None else mask.to(device), is_causal=form == "causal"
        )
        out.backward(dy.to(device, compute))
        results.append([tensor.detach().cpu().double() for tensor in (out, *(leaf.grad for leaf in leaves))])
    rows = slice(None) if mask is None else mask.any(-1).expand(2, 4, 6)
    for index, (expected, found) in enumerate(zip(*results, strict=True)):
        if index == 0:  # torch itself disagrees with itself on rows that see nothing
            expected, found = expected[rows], found[rows]
        torch.testing.assert_close(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_gradient_uses_the_softmax_numbers_it_is_given() -> None:
    """P is recomputed as exp(score - max) / sum: half of the sum makes P, and so dV, twice as large."""
    import torch_npu

    problem = Problem.make(Case(mode=2))
    arguments = problem.arguments()
    arguments["atten_mask"] = arguments["atten_mask"].npu()
    arguments["scale_value"] = arguments.pop("scale")
    q, k, v, dy = (problem.packed(pieces).npu() for pieces in (problem.q, problem.k, problem.v, problem.dy))
    forward = {name: value for name, value in arguments.items() if name != "scale_value"}
    out, high, total = torch_npu.npu_fusion_attention(q, k, v, scale=problem.scale, **forward)[:3]
    dv = [
        torch_npu.npu_fusion_attention_grad(
            q, k, v, dy, softmax_max=high, softmax_sum=total * factor, attention_in=out, **arguments
        )[2].cpu()
        for factor in (1.0, 0.5)
    ]
    torch.testing.assert_close(dv[0].double(), pack("BNSD", problem.solve()["dv"]), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(dv[1], 2 * dv[0])


TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
ROUND = Case()

# case, arguments instead of its own (a function makes them from the problem), what the message must say
WRONG: list[tuple[str, Case, dict, str]] = [
    ("heads", ROUND, {"head_num": 3}, r"headNum is 3; query of shape \[2, 4, 6, 8\] has 4 heads"),
    ("ratio", replace(ROUND, heads=(4, 3)), {}, "query has 4 heads, key 3; .* must be a multiple"),
    ("divide", replace(ROUND, layout="BSH"), {"head_num": 5}, "H of query is 32; it must be a multiple of 5"),
    ("width", replace(ROUND, d=776, e=8), {}, r"D of query is 776; it must be in \[1, 768\]"),
    ("value", replace(ROUND, d=8, e=16), {}, "D of value is 16; it must not be more than D of key, 8"),
    ("square mask", replace(ROUND, mode=1), {"atten_mask": TRIANGLE[:6, :7]}, r"attenMask has shape \[6, 7\]"),
    (
        "compressed",
        replace(ROUND, mode=2),
        {"atten_mask": TRIANGLE[:6, :6]},
        r"a compressed mask has shape \[2048, 2048\]",
    ),
    ("mode 6", replace(ROUND, mode=6, prefix=(1, 1)), {"atten_mask": TRIANGLE}, r"has shape \[3072, 2048\]"),
    ("mask type", replace(ROUND, mode=2), {"atten_mask": TRIANGLE.float()}, "type of attenMask is Float"),
    (
        "tokens",
        replace(ROUND, mode=4, pre=2, next=-3),
        {},
        r"preTokens is 2, nextTokens -3; .* preTokens \+ nextTokens >= 0",
    ),
    ("outside", replace(ROUND, mode=4, next=-6), {}, "the band lies outside"),
    ("no prefix", replace(ROUND, mode=6, prefix=(1, 1)), {"prefix": None}, "prefix has 0 entries; .* B = 2"),
    ("prefix", replace(ROUND, mode=6, prefix=(1, 7)), {}, r"prefix\[1\] is 7; .* it must be in \[0, 6\]"),
    ("prefix least", Case(mode=6, lengths=WIDE, prefix=(3, 4)), {}, r"prefix\[0\] is 3; .*\[4, 9\]"),
    ("inner precise", ROUND, {"inner_precise": 3}, "innerPrecise is 3; it must be 0, 1 or 2"),
    ("pse", replace(ROUND, pse="BNSK"), {"pse": torch.zeros(2, 4, 6, 5)}, r"pse has shape \[2, 4, 6, 5\]"),
    ("pse type", replace(ROUND, pse="BNSK"), {"pse": torch.zeros(2, 4, 6, 6).half()}, "type of pse is Half"),
    (
        "decreasing",
        RAGGED,
        {"actual_seq_qlen": [3, 2, 11, 16]},
        r"actualSeqQLen is \[3, 2, 11, 16\]; .*must not decrease",
    ),
    ("too long", RAGGED, {"actual_seq_kvlen": [3, 10, 11, 17]}, "actualSeqKvLen ends at 17; key has only T = 16"),
    ("mode 3", replace(RAGGED, mode=3, lengths=((5, 3), (2, 2))), {}, "sequence 0 has Sq = 5, Skv = 3; .*Sq <= Skv"),
    (
        "mode 7",
        replace(RAGGED, mode=7, lengths=((3, 3), (2, 6)), pre=5, next=-2),
        {},
        "sparseMode 7 needs preTokens >= Skv",
    ),
    (
        "mode 7 next",
        replace(RAGGED, mode=7, lengths=((3, 3), (2, 6)), pre=6, next=1),
        {},
        "Sq - Skv <= nextTokens <= 0",
    ),
    ("mode 8", replace(RAGGED, mode=8, lengths=((3, 6), (2, 2)), pre=6, next=-4), {}, "nextTokens >= Sq - Skv"),
    ("blind row", replace(RAGGED, mode=4, lengths=((5, 3),), pre=1, next=0), {}, "hides all of row 0 of sequence 0"),
]


@pytest.mark.parametrize(("case", "changes", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_argument(case: Case, changes: dict, message: str) -> None:
    problem = Problem.make(case)
    with pytest.raises(RuntimeError, match=message):
        fusion_attention(problem, **changes)
        torch.npu.synchronize()


def test_types_must_be_equal() -> None:
    import torch_npu

    q = torch.zeros(2, 4, 6, 8).npu()
    with pytest.raises(RuntimeError, match="the type of key is Half, that of query Float; .* one type"):
        torch_npu.npu_fusion_attention(q, q.half(), q.half(), 4, "BNSD")


def test_without_a_mask_mode_and_tokens_mean_nothing() -> None:
    problem = Problem.make(ROUND)
    changes = {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": -5}
    compare(problem, fusion_attention(problem, **changes))


WRONG_CONTENT = {
    "triangle": (
        "torch.ones(2048, 2048).tril().bool()",
        2,
        {},
        "attenMask differs from the upper triangle in row 0 in sparseMode 2",
    ),
    "diagonal": (
        "torch.ones(2048, 2048).triu(0).bool()",
        3,
        {},
        "attenMask differs from the upper triangle in row 0 in sparseMode 3",
    ),
    "prefix block": (
        "torch.cat([torch.ones(2048, 2048).triu(1), torch.ones(1024, 2048)]).bool()",
        6,
        {"prefix": [1]},
        "attenMask has a wrong prefix block",
    ),
    "tokens": ("torch.zeros(6, 6).bool()", 0, {"next_tockens": 0}, "nextTokens 0 hide scores that attenMask shows"),
}


@pytest.mark.parametrize("wrong", WRONG_CONTENT)
def test_wrong_contents_of_a_mask(wrong: str, run: Run) -> None:
    """Known only when the operator runs. That error stays with the process, so it gets one of its own."""
    mask, mode, arguments, message = WRONG_CONTENT[wrong]
    program = f"""
        import torch, torch_npu
        q = torch.zeros(1, 2, 6, 8).npu()
        torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", atten_mask={mask}.npu(), sparse_mode={mode}, **{arguments})
        torch.npu.synchronize()
    """
    result = run(program)
    assert result.returncode != 0
    assert message in result.stderr
