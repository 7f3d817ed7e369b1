"""What Ray starts in place of Python on a warm node: the worker is forked from its template.

A script for a bare interpreter (``python -I -S fork_client.py default_worker.py ...``: 15 ms), as
``py_executable`` of a runtime environment. Where there is no template, or it is another one's, it
becomes Python itself, as if it had not been there.

Over the socket, from here unless said: the request's length (4 bytes, with this process's standard
streams), the request, then from the template GO where it takes it on, then GO. Only then it forks.
"""

import array
import json
import os
import socket
import struct
import sys

WAIT_S = 30.0  # for a template that still imports, or has others to fork first
GO = b"+"
PEER = struct.Struct("3i")  # pid, user, group


def name_of(node: str) -> str:
    """Of the template's socket on that node; Linux's own namespace: it leaves no file."""
    return f"\0elastic_ft/{os.getuid()}/{node}"


def is_ours(link: socket.socket) -> bool:
    """Whether this very user is at its other end."""
    peer = PEER.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
    return bool(peer[1] == os.getuid())


def node_of(arguments: list[str]) -> str:
    found = [text.partition("=")[2] for text in arguments if text.startswith("--node-id=")]
    return found[0] if found else ""


def ask(arguments: list[str]) -> bool:
    """Whether the template of this node has taken it on. Raises OSError where there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(WAIT_S)
        link.connect(name_of(node_of(arguments)))
        if not is_ours(link):
            return False
        what = {"argv": arguments, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109  # pathlib takes 10 ms
        request = json.dumps(what | {"leads": os.getpgrp() == os.getpid()}).encode()
        streams = array.array("i", (0, 1, 2))
        link.sendmsg(
            [len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        )
        link.sendall(request)
        if link.recv(1) != GO:
            return False
        link.sendall(GO)
        return True


def main() -> None:
    arguments = sys.argv[1:]
    try:
        if ask(arguments):
            return
    except OSError:  # nobody is there, or says nothing
        pass
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
