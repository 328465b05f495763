"""Ports for servers that another process opens a moment later."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST = 10000


def free_port() -> int:
    """A free port of 127.0.0.1 below the range from which the kernel gives ports to outgoing connections.

    A port that the kernel chose (``bind`` to port 0) is soon one of those, and the server that comes a moment later
    finds it taken.
    """
    end = int(_EPHEMERAL.read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(_FIRST, end)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
