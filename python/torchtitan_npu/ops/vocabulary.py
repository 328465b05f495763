"""The output matrix in parts: tensor-parallel ranks that have some rows of it each, and so some of the logits.

Letters of the shape suffixes:

    R ranks of the group    N tokens    V vocabulary of this rank
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from torchtitan_npu.ops.cross_entropy import IGNORE_INDEX


@dataclass(frozen=True)
class VocabularyPart:
    """The rows that this rank has: part ``index`` of ``parts`` equal ones."""

    group: dist.ProcessGroup | None = None
    """Of the ranks that have the others, in their order; None: this one has all rows."""
    index: int = 0
    parts: int = 1

    def local_labels(self, labels_N: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Where this rank has the logit of a token's label, bool ``[N]``, and in which of its ``rows``, int64 ``[N]``.

        Of labels that no rank has, the outermost ranks take care, where indexing with them fails.
        """
        first = self.index * rows
        here_N = labels_N != IGNORE_INDEX
        if self.index > 0:
            here_N = here_N & (labels_N >= first)
        if self.index < self.parts - 1:
            here_N = here_N & (labels_N < first + rows)
        return here_N, torch.where(here_N, labels_N - first if first else labels_N, 0)

    def combine(self, softmax_3N: Tensor) -> Tensor:
        """From what each rank's rows give for the same tokens to what all rows give, the same bits on every rank.

        ``softmax_3N``, fp32 ``[3, N]`` or ``[3, N, 1]``: the largest logit; the sum of ``exp(logit - largest)``; the
        label's logit, 0 where another rank has it. One collective over ``group``.
        """
        if self.group is None:
            return softmax_3N
        softmax_R3N = softmax_3N.new_empty(self.parts, *softmax_3N.shape)
        dist.all_gather(list(softmax_R3N.unbind()), softmax_3N, group=self.group)
        top_RN, sum_RN, label_RN = softmax_R3N.unbind(1)
        top_N = top_RN.amax(0)
        return torch.stack((top_N, (sum_RN * (top_RN - top_N).exp()).sum(0), label_RN.sum(0)))


def part_of_vocabulary(hidden: Tensor, weight_VM: Tensor) -> tuple[Tensor, Tensor, VocabularyPart]:
    """The local tensors of an output layer's factors, and the rows that ``weight_VM`` has there.

    DTensors must be the whole ``hidden`` on every rank, and rows of ``weight_VM`` over a mesh of one dimension. Of the
    gradient with respect to ``hidden`` each rank is then asked for its summand.

    Raises:
        ValueError: they are cut otherwise.
    """
    if not isinstance(weight_VM, DTensor) and not isinstance(hidden, DTensor):
        return hidden, weight_VM, VocabularyPart()
    if not isinstance(weight_VM, DTensor) or not isinstance(hidden, DTensor):
        raise ValueError("hidden and weight must both be DTensors, or none of them")
    mesh = weight_VM.device_mesh
    whole_here = hidden.device_mesh == mesh and all(p.is_replicate() for p in hidden.placements)
    if mesh.ndim != 1 or not weight_VM.placements[0].is_shard(0) or not whole_here or weight_VM.shape[0] % mesh.size():
        raise ValueError(
            f"not supported: hidden with {hidden.placements} and weight {tuple(weight_VM.shape)} with "
            f"{weight_VM.placements} over {mesh}; cut the weight into equal rows over a mesh of one dimension, and "
            "hidden not at all"
        )
    part = VocabularyPart(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    return hidden.to_local(grad_placements=[Partial()]), weight_VM.to_local(), part
