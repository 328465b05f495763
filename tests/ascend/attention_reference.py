"""Attention in fp64, written out from the documented rules: what the simulated operators are compared with.

Shape letters: B batch, N heads of the query, M heads of key and value, S tokens of the query, K tokens of key and
value, D and E width of a head of query and value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

FAR = 2147483647


@dataclass(frozen=True)
class Case:
    """One call of npu_fusion_attention."""

    layout: str = "BNSD"
    heads: tuple[int, int] = (4, 2)
    """(N, M)"""
    lengths: tuple[tuple[int, int], ...] = ((6, 6), (6, 6))
    """(S, K) of every batch entry or sequence; all the same unless the layout is TND."""
    d: int = 8
    e: int = 8
    dtype: torch.dtype = torch.float32
    mode: int | None = None
    """sparse_mode; None passes no mask"""
    pre: int = FAR
    next: int = FAR
    prefix: tuple[int, ...] = ()
    mask_shape: str = "SK"
    """of a mask that is not compressed: SK, 11SK, B1SK or BNSK"""
    holes: float = 0.0
    """share of the scores that such a mask hides beyond what the mode asks for"""
    inner_precise: int = 0
    pse: str = ""
    """"", BNSK, BN1K or 1NSK"""
    extra: dict = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        parts = [self.layout, f"{self.heads[0]}to{self.heads[1]}", str(self.dtype).removeprefix("torch.")]
        parts += ["x".join(map(str, pair)) for pair in dict.fromkeys(self.lengths)]
        parts += [f"mode{self.mode}" + (self.mask_shape if self.mode in (0, 1, 5) else "")]
        parts += [f"{name}{value}" for name, value in (("pre", self.pre), ("next", self.next)) if value != FAR]
        parts += [f"e{self.e}"] * (self.e != self.d) + [self.pse] * bool(self.pse)
        return "-".join(parts)


def pack(layout: str, pieces: list[torch.Tensor]) -> torch.Tensor:
    """[N, S, D] of every batch entry -> one tensor in a layout."""
    if layout == "TND":
        return torch.cat([piece.transpose(0, 1) for piece in pieces])
    bnsd = torch.stack(pieces)
    if layout == "BNSD":
        return bnsd
    bsnd = bnsd.transpose(1, 2).contiguous()
    return {"BSND": bsnd, "BSH": bsnd.flatten(2), "SBH": bsnd.flatten(2).transpose(0, 1).contiguous()}[layout]


def unpack(layout: str, tensor: torch.Tensor, lengths: list[int], heads: int) -> list[torch.Tensor]:
    """The inverse of `pack`."""
    if layout == "TND":
        return [piece.transpose(0, 1) for piece in tensor.split(lengths)]
    if layout == "SBH":
        tensor = tensor.transpose(0, 1)
    if layout in ("SBH", "BSH"):
        tensor = tensor.unflatten(2, (heads, -1))
    if layout != "BNSD":
        tensor = tensor.transpose(1, 2)
    return list(tensor)


def unpack_softmax(case: Case, tensor: torch.Tensor) -> list[torch.Tensor]:
    """softmaxMax or softmaxSum -> [N, S] of every batch entry.

    With layout TND, [N, S, 8] of a sequence lies behind that of the one before, although the shape is [T, N, 8]; with
    softmax_layout TND too the numbers lie as the shape says.
    """
    assert tensor.dtype == torch.float32 and tensor.shape[-1] == 8
    assert torch.equal(tensor, tensor[..., :1].expand_as(tensor)), "one value, eight times"
    if case.layout != "TND":
        return list(tensor[..., 0])
    if case.extra.get("softmax_layout") == "TND":
        return [piece.transpose(0, 1) for piece in tensor[..., 0].split([pair[0] for pair in case.lengths])]
    rows = [case.heads[0] * pair[0] for pair in case.lengths]
    return [piece.view(case.heads[0], -1) for piece in tensor.reshape(-1, 8)[:, 0].split(rows)]


def band_entry(case: Case) -> int:
    """The sequence that is a band in modes 7 and 8: the last or first that is not empty."""
    filled = [b for b, pair in enumerate(case.lengths) if pair[0] and pair[1]]
    return filled[-1] if case.mode == 7 else filled[0]


def sees(case: Case, mode: int | None, s: int, k: int, prefix: int) -> torch.Tensor:
    """[S, K], whether a sparse mode lets query i look at key j."""
    i, j = torch.arange(s).unsqueeze(1), torch.arange(k)
    if mode == 0:
        return (j - i >= -case.pre) & (j - i <= case.next)
    if mode == 2:
        return j <= i
    if mode == 3:
        return j <= i + k - s
    if mode == 4:
        return (j - i - (k - s) >= -case.pre) & (j - i - (k - s) <= case.next)
    if mode in (5, 6):
        return (j <= i + k - s) | (j < prefix)
    return torch.ones(s, k, dtype=torch.bool)


def visible(case: Case, b: int, generator: torch.Generator) -> torch.Tensor:
    """[N, S, K], true where query i of entry b may look at key j."""
    s, k = case.lengths[b]
    mode = case.mode
    if mode in (7, 8):
        mode = 4 if b == band_entry(case) else {7: 3, 8: 2}[mode]
    see = sees(case, mode, s, k, case.prefix[b] if case.prefix else 0).repeat(case.heads[0], 1, 1)
    if case.holes:
        hidden = torch.rand(see.shape, generator=generator) < case.holes
        if "N" not in case.mask_shape:
            hidden = hidden[:1].expand_as(hidden)
        see &= ~hidden
        if case.inner_precise != 2:
            see |= torch.eye(s, k, dtype=torch.bool) & (see.sum(-1, keepdim=True) == 0)  # no row without a score
    return see


def mask_tensor(case: Case, seen: list[torch.Tensor]) -> torch.Tensor | None:
    """What has to be passed as atten_mask; 1 hides."""
    if case.mode is None:
        return None
    triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    if case.mode == 6:
        return torch.cat([triangle, (torch.arange(2048) >= 1024).expand(1024, 2048)])
    if case.mode not in (0, 1, 5):
        return triangle
    if case.layout == "TND":  # each sequence takes the upper left corner
        s, k = (max(pair[side] for pair in case.lengths) for side in (0, 1))
        hidden = [torch.ones(case.heads[0], s, k, dtype=torch.bool) for _ in seen]
        for whole, see in zip(hidden, seen, strict=True):
            whole[:, : see.shape[1], : see.shape[2]] = ~see
    else:
        hidden = [~see for see in seen]
    full = torch.stack(hidden)
    shared = full.all(0).all(0)
    return {"SK": shared, "11SK": shared[None, None], "B1SK": full[:, :1], "BNSK": full}[case.mask_shape]


@dataclass
class Problem:
    """Inputs of a case, in fp64 per batch entry and packed for the operator."""

    case: Case
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    dy: list[torch.Tensor]
    seen: list[torch.Tensor]
    pse: torch.Tensor | None
    scale: float
    pse_after_scale: bool = False
    sink: torch.Tensor | None = None
    """[N], a score without a value that takes part in the softmax"""

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Problem:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, side: int, width: int) -> list[torch.Tensor]:
            shapes = [(heads, pair[side], width) for pair in case.lengths]
            return [torch.randn(shape, generator=generator).to(case.dtype).double() for shape in shapes]

        n, m = case.heads
        q, k, v = draw(n, 0, case.d), draw(m, 1, case.d), draw(m, 1, case.e)
        dy = draw(n, 0, case.e)
        # A mask without an axis of batch is the same for all entries.
        alike = case.holes and case.mask_shape in ("SK", "11SK")
        seen = []
        for b in range(len(case.lengths)):
            seen.append(visible(case, b, torch.Generator().manual_seed(seed + (0 if alike else b))))
        pse = None
        if case.pse:
            s, keys = case.lengths[0]
            shape = {"B": len(case.lengths), "N": n, "S": s, "K": keys, "1": 1}
            pse = torch.randn([shape[letter] for letter in case.pse], generator=generator).to(case.dtype).double()
        return cls(case, q, k, v, dy, seen, pse, 1 / math.sqrt(case.d))

    def packed(self, pieces: list[torch.Tensor]) -> torch.Tensor:
        return pack(self.case.layout, pieces).to(self.case.dtype)

    def arguments(self) -> dict:
        """Keyword arguments of npu_fusion_attention besides query, key and value; tensors on the CPU."""
        case = self.case
        arguments = {
            "head_num": case.heads[0],
            "input_layout": case.layout,
            "scale": self.scale,
            "sparse_mode": case.mode or 0,
            "pre_tockens": case.pre,
            "next_tockens": case.next,
            "inner_precise": case.inner_precise,
            "atten_mask": mask_tensor(case, self.seen),
            "pse": None if self.pse is None else self.pse.to(case.dtype),
            "prefix": list(case.prefix) or None,
        }
        if case.layout == "TND":
            ends = torch.tensor(case.lengths).cumsum(0)
            arguments |= {"actual_seq_qlen": ends[:, 0].tolist(), "actual_seq_kvlen": ends[:, 1].tolist()}
        return arguments | case.extra

    def solve(self, kept: list[torch.Tensor] | None = None) -> dict[str, list[torch.Tensor]]:
        """out, dq, dk, dv, max, sum of every batch entry; `kept` holds [N, S, K], 0 or 1 / keep_prob, after dropout."""
        group = self.case.heads[0] // self.case.heads[1]
        results: dict[str, list[torch.Tensor]] = {name: [] for name in ("out", "dq", "dk", "dv", "max", "sum")}
        sink = None if self.sink is None else self.sink.clone().requires_grad_()
        for b, see in enumerate(self.seen):
            q, k, v = (pieces[b].clone().requires_grad_() for pieces in (self.q, self.k, self.v))
            scores = q @ k.repeat_interleave(group, 0).transpose(1, 2)
            pse = 0 if self.pse is None else self.pse[b if self.pse.shape[0] > 1 else 0]
            scores = scores * self.scale + pse if self.pse_after_scale else (scores + pse) * self.scale
            scores = scores.masked_fill(~see, -math.inf)
            blind = ~see.any(-1, keepdim=True)  # rows without a score give zero
            columns = scores
            if sink is not None:
                columns = torch.cat([scores, sink.view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
            weights = columns.masked_fill(blind, 0.0).softmax(-1)[..., : see.shape[-1]].masked_fill(blind, 0.0)
            if kept is not None:
                weights = weights * kept[b]
            out = weights @ v.repeat_interleave(group, 0)
            out.backward(self.dy[b])
            results["out"].append(out.detach())
            results["dq"].append(q.grad)
            results["dk"].append(k.grad)
            results["dv"].append(v.grad)
            if see.numel():
                high = columns.detach().amax(-1)
                results["max"].append(high)
                results["sum"].append((columns.detach() - high.unsqueeze(-1)).exp().sum(-1))
            else:
                results["max"].append(torch.zeros(see.shape[:2], dtype=torch.float64))
                results["sum"].append(torch.zeros(see.shape[:2], dtype=torch.float64))
        if sink is not None:
            results["dsink"] = [sink.grad]
        return results
