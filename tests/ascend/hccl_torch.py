"""What the ranks of test_torch_distributed run: torch.distributed over the simulated HCCL."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch_npu  # noqa: F401  registers the device and the backend

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
card = int(os.environ["LOCAL_RANK"])
torch.npu.set_device(card)
store = dist.FileStore(sys.argv[1], ranks)
dist.init_process_group("hccl", store=store, rank=rank, world_size=ranks)
device = torch.device("npu", card)


def part(r: int, count: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(count, dtype=dtype) + 100 * r


def check(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    got = got.cpu()
    assert torch.equal(got, expected), f"{what} on rank {rank}: {got} is not {expected}"


for dtype in (torch.float32, torch.bfloat16, torch.int64):
    parts = [part(r, dtype=dtype) for r in range(ranks)]
    x = parts[rank].to(device)
    dist.all_reduce(x)
    check(x, sum(parts), "all_reduce")
    x = parts[rank].to(device)
    out = torch.empty(12 * ranks, dtype=dtype, device=device)
    dist.all_gather_into_tensor(out, x)
    check(out, torch.cat(parts), "all_gather_into_tensor")
    pieces = [torch.empty(12, dtype=dtype, device=device) for _ in range(ranks)]
    dist.all_gather(pieces, x)
    check(torch.cat(pieces), torch.cat(parts), "all_gather")
    out = torch.empty(12 // ranks, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(out, x)
    check(out, sum(parts).chunk(ranks)[rank], "reduce_scatter_tensor")
    out = torch.empty(12, dtype=dtype, device=device)
    dist.all_to_all_single(out, x)
    check(out, torch.cat([p.chunk(ranks)[rank] for p in parts]), "all_to_all_single")
    x = parts[rank].to(device)
    dist.broadcast(x, src=ranks - 1)
    check(x, parts[ranks - 1], "broadcast")
    x = parts[rank].to(device)
    dist.reduce(x, dst=1)
    if rank == 1:
        check(x, sum(parts), "reduce")

# Averages: torch_npu divides
x = part(rank).to(device)
dist.all_reduce(x, op=dist.ReduceOp.AVG)
check(x, sum(part(r) for r in range(ranks)) / ranks, "average")

# Uneven all to all: rank i sends j + 1 elements to rank j
x = part(rank, sum(range(1, ranks + 1))).to(device)
out = torch.empty((rank + 1) * ranks, device=device)
dist.all_to_all_single(out, x, [rank + 1] * ranks, list(range(1, ranks + 1)))
begin = rank * (rank + 1) // 2
check(out, torch.cat([part(r, 20)[begin : begin + rank + 1] for r in range(ranks)]), "uneven all_to_all_single")

# Point to point
if rank == 0:
    dist.send(part(0).to(device), dst=1)
elif rank == 1:
    x = torch.empty(12, device=device)
    dist.recv(x, src=0)
    check(x, part(0), "recv")
received = torch.empty(12, device=device)
operations = [
    dist.P2POp(dist.isend, part(rank).to(device), (rank + 1) % ranks),
    dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
]
for work in dist.batch_isend_irecv(operations):
    work.wait()
check(received, part((rank - 1) % ranks), "batch_isend_irecv")

# Groups, among them two that exist at the same time
groups = [dist.new_group(list(range(half, ranks, 2))) for half in range(2)]
mine = list(range(rank % 2, ranks, 2))
x = part(rank).to(device)
dist.all_reduce(x, group=groups[rank % 2])
check(x, sum(part(r) for r in mine), "new_group")
everyone = dist.new_group(list(range(ranks)))
x = part(rank).to(device)
work = dist.all_reduce(x, group=everyone, async_op=True)
work.wait()
y = x + 1
check(y, sum(part(r) for r in range(ranks)) + 1, "async all_reduce, then an operator")

dist.barrier()
torch.npu.synchronize()
dist.destroy_process_group()
print("done")
