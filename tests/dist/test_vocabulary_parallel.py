"""``linear_cross_entropy`` of an output matrix whose rows tensor-parallel ranks share, against one process's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from allocations import peak_bytes
from pool import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from torchtitan_npu.ops import IGNORE_INDEX, cross_entropy, linear_cross_entropy, z_loss

B, T, M, V = 3, 8, 24, 68
CHUNKS = [1, 5, 24, 1000]  # of 24 tokens
# Relative to the largest element. Of 16 bits: products, partial sums over ranks and chunks are rounded one by one.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The same on every rank; labels of every rank's rows, the first and the last of them, and none."""
    generator = torch.Generator().manual_seed(0)
    hidden_BTM = torch.randn(B, T, M, generator=generator).to(dtype)
    weight_VM = (0.3 * torch.randn(V, M, generator=generator)).to(dtype)
    labels_BT = torch.randint(0, V, (B, T), generator=generator)
    labels_BT[1] = torch.tensor([0, V // 4 - 1, V // 4, V // 2 - 1, V // 2, V - 1, IGNORE_INDEX, IGNORE_INDEX])
    labels_BT[2, 5:] = IGNORE_INDEX
    return hidden_BTM, weight_VM, labels_BT


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def cut(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """This rank's part, as a leaf."""
    local = whole
    if isinstance(placement, Shard):
        local = whole.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(local, mesh, [placement], run_check=False).requires_grad_()


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert (got.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@on_ranks(2, 4)
def test_equals_the_plain_loss(dtype: torch.dtype) -> None:
    """Values and gradients, also where the hidden states were cut along the sequence; the same bits on all ranks."""
    mesh, scale = mesh_of_all(), 512.0 / 17
    for chunk in CHUNKS:
        for weight_of_z in (0.0, 1e-2):
            hidden, weight, labels = inputs(dtype)
            hidden.requires_grad_()
            weight.requires_grad_()
            logits = hidden @ weight.t()
            want_total = cross_entropy(logits, labels)
            want = want_total + weight_of_z * z_loss(logits, labels)
            (scale * want).backward()

            sequence, rows = cut(hidden.detach(), mesh, Shard(1)), cut(weight.detach(), mesh, Shard(0))
            whole = sequence.redistribute(placements=[Replicate()])
            objective, total = linear_cross_entropy(
                whole, rows, labels, chunk_tokens=chunk, z_loss_weight=weight_of_z, gradient_scale=scale
            )
            (scale * objective).backward()
            assert objective.dtype == total.dtype == torch.float32 and not total.requires_grad
            assert not isinstance(objective, DTensor) and not isinstance(total, DTensor)
            assert float(objective.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
            assert float(total) == pytest.approx(float(want_total.detach()), rel=1e-6)
            for got, expected in ((sequence, hidden), (rows, weight)):
                assert got.grad is not None and expected.grad is not None
                assert got.grad.placements == got.placements
                assert_close(got.grad.full_tensor(), expected.grad, TOLERANCE[dtype])
            results: list[tuple[float, float]] = [(0.0, 0.0)] * mesh.size()
            dist.all_gather_object(results, (float(objective.detach()), float(total)))
            assert len(set(results)) == 1, results


@on_ranks(2)
def test_collectives() -> None:
    """In training one per chunk, and one more for the gradient of the hidden states; without gradients one in all."""
    mesh = mesh_of_all()
    hidden_BTM, weight_VM, labels_BT = inputs()
    weight = cut(weight_VM, mesh, Shard(0))
    hidden = cut(hidden_BTM, mesh, Shard(1)).redistribute(placements=[Replicate()])
    with CommDebugMode() as training:
        linear_cross_entropy(hidden, weight, labels_BT, chunk_tokens=5)[0].backward()
    assert sorted(training.get_comm_counts().values()) == [1, 5], training.get_comm_counts()
    with CommDebugMode() as evaluation, torch.no_grad():
        linear_cross_entropy(hidden, weight, labels_BT, chunk_tokens=5)
    assert evaluation.get_total_counts() == 1


@on_ranks(2)
def test_large_and_distant_logits() -> None:
    """A rank whose logits are all far below the other's adds nothing, and nothing overflows on the way."""
    mesh = mesh_of_all()
    hidden = torch.ones(4, 2)
    weight = torch.cat([torch.full((3, 2), 200.0), torch.full((3, 2), -200.0)])
    labels = torch.tensor([0, 1, 5, IGNORE_INDEX])
    parts = cut(hidden, mesh, Replicate()), cut(weight, mesh, Shard(0))
    objective, total = linear_cross_entropy(*parts, labels, chunk_tokens=3, z_loss_weight=1.0)
    objective.backward()
    lse = 400 + float(torch.tensor(3.0).log())
    assert float(total) == pytest.approx(2 * (lse - 400) + (lse + 400), rel=1e-6)
    assert float(objective.detach()) == pytest.approx(float(total) + 3 * lse**2, rel=1e-6)
    for part in parts:
        assert part.grad is not None and part.grad.to_local().isfinite().all()


@on_ranks(2)
def test_a_label_of_no_rank_fails_as_it_does_on_one_process() -> None:
    """On the outermost rank on that side, before it meets the others."""
    mesh = mesh_of_all()
    hidden_BTM, weight_VM, labels_BT = inputs()
    parts = cut(hidden_BTM, mesh, Replicate()), cut(weight_VM, mesh, Shard(0))
    for label, rank in ((V, 1), (-1, 0)):
        labels_BT[0, 0] = label
        if dist.get_rank() == rank:
            with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
                linear_cross_entropy(*parts, labels_BT, chunk_tokens=24)


@on_ranks(2)
def test_other_layouts_are_refused() -> None:
    mesh = mesh_of_all()
    hidden_BTM, weight_VM, labels_BT = inputs()
    hidden, weight = cut(hidden_BTM, mesh, Replicate()), cut(weight_VM, mesh, Shard(0))
    uneven = weight_VM[: V // 2 - dist.get_rank()]
    for refused in (
        (hidden, cut(weight_VM, mesh, Shard(1))),
        (hidden, cut(weight_VM, mesh, Replicate())),
        (hidden, DTensor.from_local(uneven, mesh, [Shard(0)], shape=torch.Size((V - 1, M)), stride=(M, 1))),
        (cut(hidden_BTM, mesh, Shard(1)), weight),
    ):
        with pytest.raises(ValueError, match="not supported: hidden with .* cut the weight into equal rows"):
            linear_cross_entropy(*refused, labels_BT, chunk_tokens=5)
    for mixed in ((hidden_BTM, weight), (hidden, weight_VM)):
        with pytest.raises(ValueError, match="must both be DTensors, or none of them"):
            linear_cross_entropy(*mixed, labels_BT, chunk_tokens=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_memory(dtype: torch.dtype) -> None:
    """As tests/unit/test_linear_cross_entropy.py's, with half of the rows: the gradients (hidden N M, weight V/2 M in
    fp32), and of one chunk's V/2 logits one fp32 copy and one in the dtype of the products, or that of the weight's
    product. Held as a whole the logits alone would be four times all that."""
    N, C, dim, vocabulary = 2048, 128, 128, 4008
    mesh, width = mesh_of_all(), dtype.itemsize
    hidden = cut(torch.randn(N, dim).to(dtype), mesh, Replicate())
    weight = cut(torch.randn(vocabulary, dim).to(dtype), mesh, Shard(0))
    labels = torch.randint(0, vocabulary, (N,), generator=torch.Generator().manual_seed(0))
    peak = peak_bytes(lambda: linear_cross_entropy(hidden, weight, labels, chunk_tokens=C)[0].backward())
    rows = vocabulary // 2
    bound = width * N * dim + 4 * rows * dim + max(4 * C * rows, width * rows * dim)
    if width < 4:
        bound += width * C * rows + width * rows * dim
    assert peak <= 1.05 * bound < N * rows * width, (peak, bound)
