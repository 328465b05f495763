"""Tensor parallelism of the Llama family, by DTensor: each rank of a group computes part of every layer.

Weights are cut as in Megatron-LM (arXiv:1909.08053): by heads and by feed-forward columns, the vocabulary by rows.
Between those products activations are cut along the sequence (sequence parallelism, arXiv:2205.05198), and the logits
stay cut by the vocabulary: ``ops.linear_cross_entropy`` computes the loss of the parts.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from torchtitan_npu.models.sequence_shapes import gather_input, gather_output, localize_tokens, scatter_output

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

_CUTS: dict[str, int | None] = {
    "tok_embeddings": 0,
    "layers.*.attention_norm": None,
    "layers.*.attention.wq": 0,
    "layers.*.attention.wk": 0,
    "layers.*.attention.wv": 0,
    "layers.*.attention.wo": 1,
    "layers.*.attention.q_norm": None,
    "layers.*.attention.k_norm": None,
    "layers.*.ffn_norm": None,
    "layers.*.feed_forward.w1": 0,
    "layers.*.feed_forward.w2": 1,
    "layers.*.feed_forward.w3": 0,
    "norm": None,
    "output": 0,
}
"""The dimension in which the weight of a module is cut; None: every rank has all of it."""

_GATHERED_INPUT = ("layers.*.attention", "layers.*.feed_forward")
"""Take their part of the sequence and read all of it."""
_SCATTERED_OUTPUT = ("tok_embeddings", "layers.*.attention.wo", "layers.*.feed_forward.w2")
"""Compute a summand of the whole sequence, of whose sum each rank gets its part."""
_GATHERED_OUTPUT = "norm"
"""What reads the last norm needs the whole sequence: the head, whether a module or the embedding's matrix."""


def weight_cuts(model: nn.Module) -> dict[str, int | None]:
    """For every parameter by name: the dimension that tensor-parallel ranks share out, or None.

    Raises:
        ValueError: the model has a parameter that tensor parallelism does not know.
    """
    cuts = {}
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        pattern = next((pattern for pattern in _CUTS if fnmatchcase(module, pattern)), None)
        if pattern is None:
            raise ValueError(
                f"not supported yet: parallel.tp_degree > 1 with a {type(model).__name__}, whose parameter '{name}' "
                "has no place in the tensor-parallel plan; set parallel.tp_degree to 1"
            )
        cuts[name] = _CUTS[pattern]
    return cuts


def parallelize_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of ``model`` (a ``Llama``) DTensors over ``mesh``, in place, and let its modules redistribute
    their inputs and outputs. Collective over the mesh, unless the model is on the meta device.

    The model then takes the whole tokens ``[B, T]`` on every rank, the same ones, T a multiple of the mesh's size, and
    returns a DTensor of logits that is cut by the vocabulary.

    Args:
        mesh: 1-D; its size divides the numbers of heads and of key/value heads, ``ffn_dim`` and ``vocab_size``.

    Raises:
        ValueError: as for ``weight_cuts``.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    paths = {name.rpartition(".")[0] for name in weight_cuts(model)}
    sequence = Shard(1)
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=sequence)
    plan: dict[str, ParallelStyle] = {
        **dict.fromkeys(_SCATTERED_OUTPUT, rows),
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=sequence),
        "layers.*.attention_norm": SequenceParallel(),
        # Gathered once for three products; the rotary embedding and the documents pass as they are.
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(sequence, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        **{f"layers.*.attention.{name}": columns for name in ("wq", "wk", "wv")},
        # Qwen3's, of [B, H, T, D]: each rank norms its heads.
        **{f"layers.*.attention.{name}": SequenceParallel(use_local_output=True) for name in ("q_norm", "k_norm")},
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=sequence, desired_input_layouts=Replicate()),
        **{f"layers.*.feed_forward.{name}": columns for name in ("w1", "w3")},
        "norm": SequenceParallel(),
        # Not gathered: the loss is computed of what each rank has of the vocabulary.
        "output": ColwiseParallel(use_local_output=False),
    }
    used = {p: s for p, s in plan.items() if p in _GATHERED_INPUT or any(fnmatchcase(path, p) for path in paths)}
    parallelize_module(model, mesh, used)
    whole = PrepareModuleOutput(output_layouts=sequence, desired_output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, {_GATHERED_OUTPUT: whole})


def cut_for_planning(model: nn.Module, tp_degree: int) -> nn.Module:
    """Give a model on the meta device the shapes that each of ``tp_degree`` ranks holds, in place; no ranks needed.

    Raises:
        ValueError: as for ``weight_cuts``.
    """
    for name, cut in weight_cuts(model).items():
        if cut is None:
            continue
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        whole = module.get_parameter(key)
        assert whole.is_meta and whole.shape[cut] % tp_degree == 0
        shape = list(whole.shape)
        shape[cut] //= tp_degree
        setattr(module, key, nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad))
    return model


def run_for_planning(model: nn.Module, tp_degree: int) -> nn.Module:
    """``cut_for_planning``, and let the modules redistribute shapes where ``parallelize_tensors`` lets them do so with
    inputs and outputs: forward and backward then allocate what they do on each of ``tp_degree`` ranks.

    The head gets the plain tensors that DTensors hold there: all hidden states, and the rank's rows of the matrix.

    Raises:
        ValueError: as for ``weight_cuts``.
    """
    cut_for_planning(model, tp_degree)
    for path, module in model.named_modules():
        if path == "tok_embeddings":
            localize_tokens(module)
        if any(fnmatchcase(path, pattern) for pattern in _GATHERED_INPUT):
            gather_input(module, tp_degree)
        if any(fnmatchcase(path, pattern) for pattern in _SCATTERED_OUTPUT):
            scatter_output(module, tp_degree)
        if path == _GATHERED_OUTPUT:
            gather_output(module, tp_degree)
    return model
