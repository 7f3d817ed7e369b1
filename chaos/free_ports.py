"""Ports for servers that can't take theirs from the kernel: they are told of them at their start.

Between the look at a port and the server's start the kernel may give the port to any connection
that a process here opens. It never does so with one below its range for such connections.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20000  # Ray's workers take the ports below
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_any = random.SystemRandom()  # a test's seed must not send two processes to the same ports


def free_ports(count: int, offset: int = 0) -> list[int]:
    """Ports of 127.0.0.1 that are free now, each together with the port ``offset`` above it.

    Raises RuntimeError where there are none.
    """
    first, last = map(int, EPHEMERAL.read_text().split())
    end = first if first > LOWEST + offset + 100 else last  # none below: as good as can be
    found: list[int] = []
    for port in _any.sample(range(LOWEST, end - offset), end - offset - LOWEST):
        taken = {each + shift for each in found for shift in (0, offset)}
        if not {port, port + offset} & taken and all(map(_is_free, {port, port + offset})):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports found")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
