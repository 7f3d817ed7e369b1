"""Somebody without the job's key at every port that a run listens on: a process of its own.

python -m chaos.strangers PID COUNT      # of the run's first process; ends with its input
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil

from elastic_ft.transport.wire import Address

CONNECT_TIMEOUT_S = 1.0
NOISE_BYTES = 4096


def listening(pid: int) -> list[Address]:
    """Where the process and its descendants accept TCP connections."""
    found: set[Address] = set()
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.add(_reachable(*one.laddr))
    return sorted(found)


def _reachable(host: str, port: int) -> Address:
    """An address to connect to, of one to listen on."""
    return ({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def intrude(address: Address, count: int) -> list[socket.socket]:
    """Opens up to ``count`` connections to an address; every other one writes noise into it.

    Whoever refuses, hangs up, or takes no more has defended itself: that is no error here.
    """
    noise, held = random.Random(0), []
    for number in range(count):
        try:
            connection = socket.create_connection(address, CONNECT_TIMEOUT_S)
        except OSError:
            break
        held.append(connection)
        connection.setblocking(False)
        if number % 2:
            with contextlib.suppress(OSError):
                connection.send(noise.randbytes(NOISE_BYTES))
    return held


def main(pid: int, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    addresses = listening(pid)
    with ThreadPoolExecutor(len(addresses) or 1) as pool:
        held = list(pool.map(lambda address: intrude(address, count), addresses))
    print(sum(map(len, held)), len(addresses), flush=True)
    sys.stdin.read()  # until whoever has started this closes it


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
