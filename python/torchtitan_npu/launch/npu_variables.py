"""The environment variables of NPUs that are not waiting times (those are in ``timeouts``): checked, never set."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torchtitan_npu.launch.environment import LaunchError

DEFAULT_BUFFER_MB = 200
# CANN documents no upper bound. Two buffers of this size are more than any card has: what is larger is a slip.
_LARGEST_BUFFER_MB = 65536


@dataclass(frozen=True)
class NpuVariables:
    """Effective values."""

    buffer_mb: int = DEFAULT_BUFFER_MB
    """Each of the two buffers of an HCCL communicator, in MiB (HCCL_BUFFSIZE)."""
    buffer_is_set: bool = False
    whitelist_disabled: bool = True
    """Whether HCCL takes connections from everywhere (HCCL_WHITELIST_DISABLE=1, its default)."""
    visible_cards: tuple[int, ...] | None = None
    """The cards that a process sees (ASCEND_RT_VISIBLE_DEVICES); None: all."""
    warnings: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the log."""
        source = "HCCL_BUFFSIZE" if self.buffer_is_set else "HCCL_BUFFSIZE is not set"
        cards = "all" if self.visible_cards is None else ",".join(map(str, self.visible_cards)) or "none"
        return (
            f"HCCL: 2 x {self.buffer_mb} MiB of the card for each communicator ({source}), whitelist "
            f"{'off' if self.whitelist_disabled else 'on'} (HCCL_WHITELIST_DISABLE); cards: {cards} "
            "(ASCEND_RT_VISIBLE_DEVICES)"
        )

    def buffer_advice(self, batch_size: int, seq_len: int, dim: int, element_bytes: int) -> str:
        """CANN's advice for HCCL_BUFFSIZE in language models, beside what is in effect. Nothing sets it."""
        advised = advised_buffer_mb(batch_size, seq_len, dim, element_bytes)
        return (
            f"CANN's advice for HCCL_BUFFSIZE here: batch_size {batch_size} x seq_len {seq_len} x dim {dim} x "
            f"{element_bytes} bytes = {advised} MiB; in effect: {self.buffer_mb} MiB. Smaller saves memory of the "
            "card; collectives that are larger than the buffer may be slower"
        )

    def check_ranks(self, local_world_size: int) -> None:
        """Each rank of this machine needs a card of its own.

        Raises:
            LaunchError: ASCEND_RT_VISIBLE_DEVICES names fewer cards than ranks were started here.
        """
        if self.visible_cards is not None and len(self.visible_cards) < local_world_size:
            count = len(self.visible_cards)
            raise LaunchError(
                f"ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, self.visible_cards))} names {count} card(s), and "
                f"{local_world_size} ranks were started on this machine: start torchrun with "
                f"--nproc_per_node={max(count, 1)}, name more cards, or unset the variable"
            )


def advised_buffer_mb(batch_size: int, seq_len: int, dim: int, element_bytes: int) -> int:
    """ceil(batch_size * seq_len * dim * element_bytes / 2^20), from CANN's reference of environment variables."""
    return math.ceil(batch_size * seq_len * dim * element_bytes / 2**20)


def read_npu_variables(environ: Mapping[str, str] | None = None) -> NpuVariables:
    """Read HCCL_BUFFSIZE (MiB, at least 1), HCCL_WHITELIST_DISABLE (0 or 1) and ASCEND_RT_VISIBLE_DEVICES.

    Raises:
        LaunchError: a value is not of that kind; all problems are listed.
    """
    env = os.environ if environ is None else environ
    problems: list[str] = []
    warnings: list[str] = []

    text = env.get("HCCL_BUFFSIZE", "")
    buffer_mb = int(text) if _is_number(text) else DEFAULT_BUFFER_MB
    if text and not (_is_number(text) and 1 <= buffer_mb <= _LARGEST_BUFFER_MB):
        problems.append(
            f"HCCL_BUFFSIZE={text} must be a whole number of MiB in 1..{_LARGEST_BUFFER_MB}; unset it for "
            f"{DEFAULT_BUFFER_MB}"
        )

    whitelist = env.get("HCCL_WHITELIST_DISABLE", "")
    if whitelist not in ("", "0", "1"):
        problems.append(f"HCCL_WHITELIST_DISABLE={whitelist} must be 0 or 1; unset it for 1")
    if whitelist == "0" and not env.get("HCCL_WHITELIST_FILE"):
        warnings.append("HCCL_WHITELIST_DISABLE=0 needs HCCL_WHITELIST_FILE, which is not set; unset both")

    visible: tuple[int, ...] | None = None
    if "ASCEND_RT_VISIBLE_DEVICES" in env:
        try:
            visible = parse_visible_cards(env["ASCEND_RT_VISIBLE_DEVICES"])
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise LaunchError("\n".join(problems))
    return NpuVariables(buffer_mb, bool(text), whitelist != "0", visible, tuple(warnings))


def parse_visible_cards(text: str) -> tuple[int, ...]:
    """The cards of ``0,1,2``; an empty text is no card.

    CANN takes ascending numbers with commas, and silently drops what follows anything else: of ``0-3`` and ``0, 1`` it
    sees card 0 alone.

    Raises:
        ValueError: CANN would see other cards than meant; the message says how to write them.
    """
    if not text:
        return ()
    cards: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if found is None or (found[2] and int(found[2]) < int(found[1])) or len(part) > 20:
            raise ValueError(f"ASCEND_RT_VISIBLE_DEVICES={text}: {part!r} is no card; name them like 0,1,2,3")
        first, last = int(found[1]), int(found[2] or found[1])
        cards.extend(range(first, min(last, first + 1024) + 1))
    wanted = ",".join(map(str, sorted(set(cards))))
    if re.fullmatch(r"[\d,]+", text, re.ASCII) is None:
        raise ValueError(
            f"ASCEND_RT_VISIBLE_DEVICES={text}: CANN reads numbers and commas only, and ignores what follows anything "
            f"else; write {wanted}"
        )
    if cards != sorted(set(cards)):
        raise ValueError(f"ASCEND_RT_VISIBLE_DEVICES={text}: CANN wants each card once, in order; write {wanted}")
    return tuple(cards)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
