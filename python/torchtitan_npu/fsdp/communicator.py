"""Chooses how ranks exchange parameters and gradients: shared memory on one machine, c10d otherwise."""

from __future__ import annotations

import logging
import secrets

import torch.distributed as dist

from torchtitan_npu import _C
from torchtitan_npu.fsdp.mesh import Mesh
from torchtitan_npu.launch import read_timeouts

logger = logging.getLogger(__name__)

KINDS = ("auto", "shared_memory", "c10d")


def make_communicator(mesh: Mesh, kind: str = "auto") -> _C.Communicator:
    """Collective over the ranks of ``mesh``. ``kind``: ``"auto"``, or one of the two to insist on it (ValueError where
    it is impossible). It is about the ranks that shard; replicas reduce through c10d.
    """
    inner = _sharding_communicator(mesh, kind)
    if mesh.replicate.size == 1:
        return inner
    token = [secrets.token_hex(16)]
    dist.broadcast_object_list(token, src=mesh.everyone.ranks[0], group=mesh.everyone.group)
    board = dist.PrefixStore(f"torchtitan-npu/{token[0]}", dist.distributed_c10d._get_default_store())
    return _C.HybridCommunicator(inner, mesh.new_group(mesh.columns), list(mesh.replicate.ranks), board)


def _sharding_communicator(mesh: Mesh, kind: str) -> _C.Communicator:
    ranks = mesh.shard
    if kind not in KINDS:
        raise ValueError(f"communicator must be one of {', '.join(KINDS)}, got {kind!r}")
    timeouts = read_timeouts()
    wait_seconds = timeouts.exec_seconds or 10 * 365 * 86400  # 0 means: wait for ever
    if ranks.group is None:
        return _C.ShmCommunicator(0, 1, timeout_seconds=wait_seconds)
    if kind != "c10d":
        mine = (_C.shm_identity(), secrets.token_hex(16))
        all_of_them: list[tuple[str, str]] = [("", "")] * ranks.size
        dist.all_gather_object(all_of_them, mine, group=ranks.group)
        if all(identity == mine[0] for identity, _ in all_of_them):
            socket_name = f"torchtitan-npu-{all_of_them[0][1]}"
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
    return _C.C10dCommunicator(mesh.new_group(mesh.rows), mesh.new_group(mesh.rows))
