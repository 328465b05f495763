"""Chooses how ranks exchange parameters and gradients: shared memory on one machine, HCCL on NPUs, c10d otherwise."""

from __future__ import annotations

import logging
import secrets

import torch
import torch.distributed as dist

from torchtitan_npu import _C
from torchtitan_npu.fsdp.mesh import Mesh, RankGroup, backends_of
from torchtitan_npu.launch import Timeouts, read_timeouts

logger = logging.getLogger(__name__)

KINDS = ("auto", "shared_memory", "c10d", "hccl")


def make_communicator(mesh: Mesh, kind: str, device: torch.device, compute: _C.Device) -> _C.Communicator:
    """Collective over the ranks of ``mesh``, for parameters on ``device``, where the engine's ``compute`` works.
    ``kind``: ``"auto"``, or another of ``KINDS`` to insist on it (ValueError where it is impossible). It is about the
    ranks that shard; replicas reduce through HCCL on NPUs and through c10d elsewhere.
    """
    inner = _sharding_communicator(mesh, kind, device)
    if mesh.replicate.size == 1:
        return inner
    token = [secrets.token_hex(16)]
    dist.broadcast_object_list(token, src=mesh.everyone.ranks[0], group=mesh.everyone.group)
    board = dist.PrefixStore(f"torchtitan-npu/{token[0]}", dist.distributed_c10d._get_default_store())
    timeouts = read_timeouts()
    transport = None
    if _uses_hccl(kind, device):
        between = mesh.new_group(mesh.columns, timeouts.process_group, "gloo")
        transport = _C.HcclTransport(between, "hccl/sums", device, _C.NpuQueue(device))
    else:
        backends = None if device.type == "cpu" else _backends_on_accelerator(mesh.replicate, kind, device)
        between = mesh.new_group(mesh.columns, timeouts.process_group, backends)
    return _C.HybridCommunicator(
        inner,
        between,
        list(mesh.replicate.ranks),
        board,
        device=device,
        compute=compute,
        timeout_seconds=_wait_seconds(timeouts),
        transport=transport,
    )


def _uses_hccl(kind: str, device: torch.device) -> bool:
    return device.type == "npu" and kind != "c10d"


def _wait_seconds(timeouts: Timeouts) -> float:
    return timeouts.exec_seconds or 10 * 365 * 86400  # 0 means: wait for ever


def _sharding_communicator(mesh: Mesh, kind: str, device: torch.device) -> _C.Communicator:
    ranks = mesh.shard
    if kind not in KINDS:
        raise ValueError(f"communicator must be one of {', '.join(KINDS)}, got {kind!r}")
    timeouts = read_timeouts()
    wait_seconds = _wait_seconds(timeouts)
    if kind == "hccl" and device.type != "npu":
        raise ValueError(f"communicator='hccl' is between NPUs, and the model is on {device}; use 'auto'")
    if device.type != "cpu":
        backends = _backends_on_accelerator(ranks, kind, device)
        if _uses_hccl(kind, device):
            return _through_hccl(mesh, device, timeouts)
        return _through_c10d(mesh, device, timeouts, backends)
    if ranks.group is None:
        return _C.ShmCommunicator(0, 1, timeout_seconds=wait_seconds)
    if kind != "c10d":
        mine = (_C.shm_identity(), secrets.token_hex(16))
        all_of_them: list[tuple[str, str]] = [("", "")] * mesh.everyone.size
        dist.all_gather_object(all_of_them, mine, group=mesh.everyone.group)
        of_rank = dict(zip(mesh.everyone.ranks, all_of_them, strict=True))
        # All replicas decide alike: making process groups takes all ranks.
        if all(len({of_rank[rank][0] for rank in row}) == 1 for row in mesh.rows):
            socket_name = f"torchtitan-npu-{of_rank[ranks.ranks[0]][1]}"
            return _C.ShmCommunicator(
                ranks.index,
                ranks.size,
                socket_name,
                timeout_seconds=wait_seconds,
                connect_timeout_seconds=timeouts.connect_seconds,
                global_ranks=list(ranks.ranks),
            )
        if kind == "shared_memory":
            raise ValueError(
                "communicator='shared_memory': the ranks are not on one machine (or in different containers or users "
                "there); "
                "use 'auto' or 'c10d'"
            )
        logger.info("ranks are on several machines: collectives through c10d")
    return _through_c10d(mesh, device, timeouts)


def _backends_on_accelerator(ranks: RankGroup, kind: str, device: torch.device) -> str:
    if kind == "shared_memory":
        raise ValueError(f"communicator='shared_memory' is for host memory, and the model is on {device}; use 'auto'")
    if ranks.group is None:
        raise ValueError(
            f"the model is on {device}: call torch.distributed.init_process_group() before FSDP(...), also for one "
            "process"
        )
    backends = backends_of(ranks.group)
    of_device = backends.get(device.type)
    if of_device is None:
        have = ", ".join(f"{kind}:{name}" for kind, name in backends.items())
        raise ValueError(
            f"the model is on {device}, but the process group has no backend for it (it has {have}): call "
            f'torch.distributed.init_process_group(backend="cpu:gloo,{device.type}:...")'
        )
    # The hosts' own messages go through the CPU's backend, so that no host waits for its device.
    return f"cpu:gloo,{device.type}:{of_device}"


def _through_hccl(mesh: Mesh, device: torch.device, timeouts: Timeouts) -> _C.Communicator:
    """HCCL communicators of this model's own; what the hosts tell each other goes through gloo."""
    groups = [mesh.new_group(mesh.rows, timeouts.process_group, "gloo") for _ in range(2)]
    queue = _C.NpuQueue(device)
    names = ("gathers", "reductions")
    gathers, reductions = (
        _C.HcclTransport(group, f"hccl/{name}", device, queue) for group, name in zip(groups, names, strict=True)
    )
    return _C.C10dCommunicator(
        *groups,
        device=device,
        timeout_seconds=_wait_seconds(timeouts),
        global_ranks=list(mesh.shard.ranks),
        gather_transport=gathers,
        reduction_transport=reductions,
    )


def _through_c10d(mesh: Mesh, device: torch.device, timeouts: Timeouts, backends: str | None = None) -> _C.Communicator:
    groups = [mesh.new_group(mesh.rows, timeouts.process_group, backends) for _ in range(2)]
    return _C.C10dCommunicator(
        *groups, device=device, timeout_seconds=_wait_seconds(timeouts), global_ranks=list(mesh.shard.ranks)
    )
