"""PROCESS: asks a file system that can hang, in the place of one that must not.

A thread in a call that does not come back (a frozen disk, a server that is away) can't be left
behind: its process does not end before it, not even killed. So each call is made by a process of
its own, forked from this one, which is small and never touches such a file system itself. Who gives
a call up has its process killed: should the file system come back, nothing is done any more that
was to be done after that call.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_ft.storage.kinds import PIECE_BYTES
from elastic_ft.storage.local_files import Local, Part

LOOK_EVERY_S = 1.0  # whether who it works for is there
NO_LIMIT_S = 0.0  # who asks knows how long it waits
LENGTH_BYTES = 8
ENDED = "the process that asks the file system has ended"


def main(control_fd: int, parent: int) -> None:
    """Until its parent ends. Messages: ``call N``, with the socket of who asks; ``kill N``."""
    children: dict[str, int] = {}
    with socket.socket(fileno=control_fd) as control:
        while os.getppid() == parent:
            if select.select([control], [], [], LOOK_EVERY_S)[0]:
                said, fds, _, _ = socket.recv_fds(control, 64, 1)
                if not said:
                    break
                verb, number = said.decode().split()
                if verb == "call":
                    children[number] = _fork(control, fds[0])
                elif number in children:
                    os.kill(children[number], signal.SIGKILL)
            _bury(children)
        for pid in children.values():
            os.kill(pid, signal.SIGKILL)


def _fork(control: socket.socket, fd: int) -> int:
    pid = os.fork()
    if pid:
        os.close(fd)
        return pid
    try:
        control.close()
        with socket.socket(fileno=fd) as line:
            serve_call(line)
    finally:  # who asked sees that it has ended
        os._exit(0)


def _bury(children: dict[str, int]) -> None:
    for number, pid in tuple(children.items()):
        if os.waitpid(pid, os.WNOHANG)[0]:
            del children[number]


def serve_call(line: socket.socket) -> None:
    """One call."""
    try:
        asked = receive_message(line)
        answer, content = DO[asked["do"]](Local(Path(asked["root"])), asked, line)
    except OSError as error:
        answer, content = {"error": _why(error)}, None
    with contextlib.suppress(OSError):  # nobody waits any more
        send_message(line, answer)
        if content is not None:
            line.sendfile(content.file, content.start, content.nbytes)  # by the kernel


def _why(error: OSError) -> list[Any]:
    number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno or errno.EIO
    return [number, error.strerror or str(error), str(error.filename or "")]


CallAnswer = tuple[dict[str, Any], Part | None]


def _put(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    files.put(asked["key"], _received(line, asked["bytes"]), NO_LIMIT_S)
    return {}, None


def _create(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    data = bytes(receive_bytes(line, asked["bytes"]))
    return {"found": files.create(asked["key"], data, NO_LIMIT_S)}, None


def _read(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    part = files.part(asked["key"], asked["start"] or 0, asked["end"])
    return {"bytes": part.nbytes}, part if part.nbytes else None


def _size(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    return {"found": files.size(asked["key"], NO_LIMIT_S)}, None


def _list(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    return {"found": files.list(asked["key"], NO_LIMIT_S)}, None


def _delete(files: Local, asked: dict[str, Any], line: socket.socket) -> CallAnswer:
    files.delete(asked["key"], NO_LIMIT_S)
    return {}, None


DO: dict[str, Callable[[Local, dict[str, Any], socket.socket], CallAnswer]] = {
    "put": _put,
    "create": _create,
    "read": _read,
    "size": _size,
    "list": _list,
    "delete": _delete,
}


def _received(line: socket.socket, nbytes: int) -> Iterator[memoryview]:
    """What is to be written: each piece is gone with the next. Raises ConnectionResetError where
    not all of it comes."""
    buffer = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    while nbytes:
        count = line.recv_into(buffer[:nbytes])
        if not count:
            raise ConnectionResetError("who asked has ended")
        nbytes -= count
        yield buffer[:count]


def send_message(line: socket.socket, said: dict[str, Any]) -> None:
    content = json.dumps(said).encode()
    line.sendall(len(content).to_bytes(LENGTH_BYTES, "big") + content)


def receive_message(line: socket.socket) -> dict[str, Any]:
    """Raises OSError where the other end has ended."""
    length = int.from_bytes(receive_bytes(line, LENGTH_BYTES), "big")
    found: dict[str, Any] = json.loads(receive_bytes(line, length))
    return found


def receive_bytes(line: socket.socket, nbytes: int) -> bytearray:
    """All of them. Raises OSError."""
    buffer = bytearray(nbytes)
    rest = memoryview(buffer)
    while rest.nbytes:
        count = line.recv_into(rest[:PIECE_BYTES])
        if not count:
            raise ConnectionResetError(ENDED)
        rest = rest[count:]
    return buffer
