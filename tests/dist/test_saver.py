"""Saving with several ranks: in the background, with a rank that fails, with changes right after the call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from twin import SmallModel, next_token_loss, tokens_for

from torchtitan_npu.checkpoint import CheckpointError, CheckpointStore, Saver, TrainState, load, random_state, writer
from torchtitan_npu.checkpoint.tensors import collect, initialize_optimizer_state
from torchtitan_npu.fsdp import FSDP
from torchtitan_npu.train.resume import choose_checkpoint

CPU = torch.device("cpu")


class Run:
    """A model, its optimizer, and a saver."""

    def __init__(self, path: str, *, async_save: bool) -> None:
        torch.manual_seed(3)
        self.model: Any = FSDP(SmallModel())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        initialize_optimizer_state(self.optimizer)
        self.store = CheckpointStore(Path(path))
        if dist.get_rank() == 0:
            self.store.prepare()
        dist.barrier()
        self.saver = Saver(
            self.store, self.model, self.optimizer, sharded=True, device=CPU, async_save=async_save, max_keep=0
        )

    def train(self, step: int) -> None:
        self.optimizer.zero_grad()
        next_token_loss(self.model, tokens_for(step, dist.get_rank())).backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = collect(self.model, self.optimizer, sharded=True)
        return {name: torch.clone(getattr(tensor, "plain", lambda t=tensor: t)()) for name, tensor in found.items()}

    def save(self, step: int) -> None:
        self.saver.save(TrainState(step=step, tokens=0, world_size=dist.get_world_size()))


def saves_what_was(path: str) -> None:
    run = Run(path, async_save=True)
    snapshot = run.saver._snapshot
    assert snapshot is not None
    # One copy, no more: the tensors of this rank.
    assert snapshot.bytes == sum(tensor.nbytes for tensor in run.tensors().values())
    for step in (1, 2):
        run.train(step)
        before = run.tensors()
        random = torch.get_rng_state()
        run.save(step)
        run.train(step + 10)
        torch.rand(5)
        assert any(not torch.equal(before[name], tensor) for name, tensor in run.tensors().items())
        checkpoint = run.saver.result()
        load(checkpoint, run.model, run.optimizer, sharded=True, device=CPU)
        for name, tensor in run.tensors().items():
            assert torch.equal(before[name], tensor), name
        assert torch.equal(torch.get_rng_state(), random)


def one_rank_fails(path: str, where: str, async_save: bool) -> None:
    """The last rank fails; all are told, nothing is left, and the next save is good."""
    run = Run(path, async_save=async_save)
    size, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    write, out = random_state.write, writer._SummingStream._out

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    if where == "states" and last:
        random_state.write = refuse
    if where == "tensors" and last:
        writer._SummingStream._out = refuse  # type: ignore[method-assign]
    if where == "finite" and last:
        weight = next(p for p in run.model.parameters() if p.numel())
        with torch.no_grad():
            weight.view(-1)[0] = float("nan")
    try:
        run.save(1)
        what = "is not finite, and would not be worth resuming from" if where == "finite" else "No space left on device"
        with pytest.raises(CheckpointError, match=rf"step 1 was not saved: rank {size - 1}: .*{what}[^;]*$"):
            run.saver.result()
    finally:
        random_state.write = write
        writer._SummingStream._out = out  # type: ignore[method-assign]
    dist.barrier()
    assert list(Path(path).iterdir()) == []
    dist.barrier()
    if where == "finite" and last:
        with torch.no_grad():
            weight.view(-1)[0] = 0
    run.save(2)
    assert run.saver.result() == run.store.path(2)
    dist.barrier()
    assert run.store.newest() == run.store.path(2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_saves_what_was(rank_pool: Any, tmp_path: Path, ranks: int) -> None:
    rank_pool.run(ranks, saves_what_was, path=str(tmp_path))


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("where", ["states", "tensors", "finite"])
def test_one_rank_fails(rank_pool: Any, tmp_path: Path, where: str, async_save: bool) -> None:
    rank_pool.run(3, one_rank_fails, path=str(tmp_path), where=where, async_save=async_save)


def each_rank_verifies_its_share(path: str) -> None:
    """Any damaged file of any rank is found, and a run takes the checkpoint before."""
    run = Run(path, async_save=False)
    for step in range(1, 5):
        run.save(step)
        run.saver.result()
    files = ("__2_0.distcp", "__0_0.distcp", "rank-00001.json")
    if dist.get_rank() == 0:
        for step, name in zip((4, 3, 2), files, strict=True):
            file = run.store.path(step) / name
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
    dist.barrier()
    assert choose_checkpoint("auto", run.store) == run.store.path(1)
    assert run.store.damaged == ({2, 3, 4} if dist.get_rank() == 0 else set())
    for explicit in (run.store.path(3), run.store.path(4)):
        with pytest.raises(Exception, match="cannot be used: its file .*is corrupt"):
            choose_checkpoint(str(explicit), CheckpointStore(Path(path) / "other"))
    inside = choose_checkpoint(path, CheckpointStore(Path(path) / "other"))
    assert inside == run.store.path(1)


def test_each_rank_verifies_its_share(rank_pool: Any, tmp_path: Path) -> None:
    rank_pool.run(3, each_rank_verifies_its_share, path=str(tmp_path))
