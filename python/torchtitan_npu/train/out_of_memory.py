"""Out of memory: where it went, and which settings need less."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from torchtitan_npu.config import Config
from torchtitan_npu.fsdp import PeerError
from torchtitan_npu.launch import Environment
from torchtitan_npu.planning import estimate_memory
from torchtitan_npu.planning.knobs import cheapest_knobs
from torchtitan_npu.planning.memory import format_bytes, memory_kinds, on_device
from torchtitan_npu.train.memory import capacity_bytes, peak_bytes

_SIGNS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory", "std::bad_alloc")
"""In messages of torch's allocators, of torch_npu and of the operating system, in lower case."""


class OutOfMemoryError(RuntimeError):
    """The message has the planned memory by kind, peak and capacity, and the cheapest settings that need less."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: of the device, or of the host. That of a peer, which its message may suspect, did not."""
    if isinstance(error, PeerError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _SIGNS)


@contextmanager
def explained_out_of_memory(
    cfg: Config, env: Environment, device: torch.device, where: Callable[[], str]
) -> Iterator[None]:
    """Turns the allocator's error into one that says what to do. ``where``: "in step 3", and what is kept.

    Raises:
        OutOfMemoryError: memory ran out inside.
    """
    try:
        yield
    except OutOfMemoryError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The frames hold the step's tensors, and what follows needs a little memory as well.
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemoryError(explain(error, cfg, env, device, where())) from error


def explain(error: BaseException, cfg: Config, env: Environment, device: torch.device, where: str) -> str:
    """The whole message."""
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    lines = [f"out of memory {where} ({said})"]
    try:
        cfg = on_device(cfg, device.type)
        lines += _table(cfg, env.world_size)
        lines.append(f"  {'peak so far':<22} {format_bytes(peak_bytes(device)):>12}  {_capacity(env, device)}")
        knobs = cheapest_knobs(cfg, env.world_size)
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        return "\n".join([*lines, "there is not even enough left to say what needs it; --dry_run does"])
    if knobs:
        lines.append("settings that need less, the cheapest first, each by itself:")
        lines += [f"  {knob.describe()}" for knob in knobs]
    else:
        lines.append("no setting saves much here: use more ranks, or a smaller model")
    return "\n".join(lines)


def _table(cfg: Config, world_size: int) -> list[str]:
    memory = estimate_memory(cfg, world_size)
    rows = {**memory_kinds(cfg, memory), "total": memory.total}
    return [
        "memory per card as it was planned, without the program itself:",
        *(f"  {kind:<22} {format_bytes(size):>12}" for kind, size in rows.items()),
    ]


def _capacity(env: Environment, device: torch.device) -> str:
    capacity = format_bytes(capacity_bytes(device))
    if device.type == "cpu":
        return f"of {capacity} for the {env.local_world_size} rank(s) of this machine"
    return f"of {capacity}"
