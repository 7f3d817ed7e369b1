"""What Ray starts in place of Python on a warm node: the worker is forked from its template.

A script for a bare interpreter (``python -I -S fork_client.py default_worker.py ...``: 15 ms), as
``py_executable`` of a runtime environment. Where there is no template, or it is another one's, it
becomes Python itself, as if it had not been there.

Over the socket, from here unless said: the request's length (4 bytes, with this process's standard
streams), the request, then from the template GO where it takes it on, then GO. Only then it forks,
and GO comes from the forked process: where none comes, there is none, nor will there be.

Whoever talks to a template has processes of this user started, and is told their environment: its
socket lies in a folder that is this user's alone. In Linux's namespace of names without files any
container on the machine's network would reach it.
"""

import array
import json
import os
import socket
import stat
import sys

WAIT_S = 30.0  # for a template that still imports, or has others to fork first
BACKLOG = 64  # clients that wait
LOOK_S = 0.5  # one that is stopped (SIGSTOP) is not waited for
GO = b"+"
FOLDER = f"/tmp/elastic_ft-{os.getuid()}"
OF = "--of="  # the first argument: whose template it is, where it is not anyone's on that node


def name_of(node: str, of: str = "") -> str:
    """Of the template's socket on that node. Raises OSError where its folder is not this user's
    alone."""
    found = os.lstat(FOLDER)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{FOLDER}: expected a folder that nobody else can look into")
    return f"{FOLDER}/{node}-{of}" if of else f"{FOLDER}/{node}"


def node_in(arguments: list[str]) -> str:
    found = [text.partition("=")[2] for text in arguments if text.startswith("--node-id=")]
    return found[0] if found else ""


def listener_of(link: socket.socket) -> int:
    """Its process, as the kernel tells: the template itself, once it has imported."""
    pid, _, _ = array.array("i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid


def is_stopped(link: socket.socket) -> bool:
    """Whether the template at the other end stands still, SIGSTOPped."""
    try:
        with open(f"/proc/{listener_of(link)}/stat") as file:  # noqa: PTH123  # pathlib takes 10 ms
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended: another one listens soon
        return False


def said_go(link: socket.socket) -> bool:
    """What it says next. Raises TimeoutError where it, or who it has forked, says nothing."""
    for _ in range(int(WAIT_S / LOOK_S)):
        try:
            return link.recv(1) == GO
        except TimeoutError:
            if is_stopped(link):
                break
    raise TimeoutError("the template stands still")


def is_there(link: socket.socket) -> bool:
    """Whether it was forked. From here on it may be: who says nothing for too long is told that
    nobody hears it any more, and ends once it finds out. What it had said before that counts."""
    try:
        return said_go(link)
    except TimeoutError:
        link.shutdown(socket.SHUT_RD)
        return link.recv(1) == GO


def ask_template(arguments: list[str], of: str = "") -> bool:
    """Whether the template of this node has taken it on. Raises OSError where there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(WAIT_S)
        link.connect(name_of(node_in(arguments), of))
        what = {"argv": arguments, "environment": dict(os.environ), "folder": os.getcwd()}  # noqa: PTH109  # pathlib takes 10 ms
        request = json.dumps(what | {"leads": os.getpgrp() == os.getpid()}).encode()
        streams = array.array("i", (0, 1, 2))
        link.sendmsg(
            [len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        )
        link.sendall(request)
        link.settimeout(LOOK_S)
        if not said_go(link):
            return False
        link.sendall(GO)
        return is_there(link)


def main() -> None:
    arguments, of = sys.argv[1:], ""
    if arguments[0].startswith(OF):
        of = arguments.pop(0).removeprefix(OF)
    try:
        if ask_template(arguments, of):
            return
    except OSError:  # nobody is there, or says nothing
        pass
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
