"""A node's template: a process that has imported what workers, keepers and controllers need.

Ray's worker processes are forked from it (``fork_client``) in a tenth of the time and memory that
starting Python and importing torch takes. It has one thread, and ends with who has started it.

``fork_server FD LOADED`` is one template (``warm_nodes`` has one on each node of a cluster);
``fork_server FD`` has one forked from itself for each node that it is told of: all nodes of a
``LocalCluster`` are on one machine, where one process imports for all of them.
"""

from __future__ import annotations

# First: a worker tells when what it is made of was imported, and from when.
from elastic_ft.worker import birth  # isort: skip
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_ft.hosts.ray.fork_client import BACKLOG, GO
from elastic_ft.transport.title import set_title
from elastic_ft.worker.forked import draw_apart, imported_for_all

REQUEST_MAX = 8 << 20
NODE_MAX, NODE_SHOWN = 256, 8  # of a node's id
TALK_S = 5.0  # a client that says nothing holds up the others no longer
BEFORE_RAY = (
    "elastic_ft.worker.preload",
    "elastic_ft.controller.controller",
    "elastic_ft.keeper.node_keeper",
)
MODULES = (
    *BEFORE_RAY,
    "elastic_ft.hosts.ray.controller_actor",
    "elastic_ft.hosts.ray.keeper_actor",
    "ray._private.workers.default_worker",
)
OWN = ("PWD", "OLDPWD", "SHLVL", "_", "OMP_NUM_THREADS", "PYTHONBREAKPOINT")
JOB, RAYLET = "RAY_JOB_ID", "RAY_RAYLET_PID"  # Ray reads these as it is loaded, and not again
NICE = "RAY_worker_niceness"  # how much lower a worker's priority is than that of who started it
FIRST_JOB = "01000000"  # of a cluster: that of the driver which made it
FIRST = dict(os.environ)  # libraries set some variables as they are loaded


@dataclass(frozen=True, slots=True)
class Request:
    """``environment``: its own. ``leads``: a process group. ``streams``: the standard ones."""

    argv: list[str]
    environment: dict[str, str]
    folder: str
    leads: bool
    streams: list[int]


def load_modules() -> None:
    """What is imported here is not imported by each of them. Raises RuntimeError."""
    from elastic_ft.hosts.ray.ray_ids import draws_apart, undrawn  # not before: see ``RAYLET``

    with imported_for_all(), undrawn():
        for module in MODULES:
            importlib.import_module(module)
    if not draws_apart():
        raise RuntimeError("processes that are forked here would draw the same ids of Ray's")


def main(fd: int, loaded: int | None = None) -> None:
    """``fd``: of a socket that listens already: who comes while this imports waits. ``loaded``: of
    a pipe, where it says that it can be forked. Without: ``fd`` is where it is told of nodes."""
    set_title("ef-template")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them but Ray
    with socket.socket(fileno=fd) as found:
        if loaded is None:
            request = _serve_nodes(found)
        else:
            load_modules()
            os.write(loaded, GO)
            os.close(loaded)
            request = _serve(found)
    if request is None:
        os._exit(0)  # there is nothing to be flushed, and to unload torch takes seconds
    become(request)


def _serve_nodes(told: socket.socket) -> Request | None:
    """A node at a time: its id comes, and its raylet's pid, with a socket that listens. The pid of
    its template is answered, which imports Ray."""
    with imported_for_all():
        for module in BEFORE_RAY:
            importlib.import_module(module)
    while True:
        ready, _, _ = select.select([told, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        said, sockets, _, _ = socket.recv_fds(told, NODE_MAX, 1)
        if not said:
            return None
        node, raylet = said.decode().split()
        with socket.socket(fileno=sockets[0]) as listener:
            if (pid := os.fork()) == 0:
                told.close()
                set_title(f"ef-template {node[:NODE_SHOWN]}")
                FIRST[JOB] = os.environ[JOB] = FIRST_JOB
                os.environ[RAYLET] = raylet
                load_modules()
                return _serve(listener)
        told.sendall(str(pid).encode())


def _serve(listener: socket.socket) -> Request | None:
    """Returns the request in each process that was forked for one; None in the end."""
    listener.listen(BACKLOG)  # again: from now on clients see that it is this process
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:  # who has started this is gone
            return None
        link, _ = listener.accept()
        with link:
            link.settimeout(TALK_S)
            if (request := answer_client(link)) is not None:
                return request


def answer_client(link: socket.socket) -> Request | None:
    """In the process that was forked for it: the request. Here None, whatever comes of it."""
    streams: list[int] = []
    pid = -1
    try:
        request = receive(link, streams)
        if request is not None and agree(link, request):
            pid = os.fork()
    except (OSError, ValueError, KeyError, TypeError) as error:  # its client starts Python itself
        print(f"not forked: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    if pid == 0:
        confirm(link)
        return request
    for stream in streams:
        os.close(stream)
    return None


def confirm(link: socket.socket) -> None:
    """Of the forked process. Without a client nobody knows of it, and it ends."""
    try:
        link.sendall(GO)
    except OSError:
        os._exit(1)


def receive(link: socket.socket, streams: list[int]) -> Request | None:
    """None where the client is gone. ``streams`` takes what is open here from now on. Raises
    OSError, ValueError, KeyError, TypeError."""
    head, found, _, _ = socket.recv_fds(link, 4, 3)
    streams += found
    size, content = int.from_bytes(head, "big"), b""
    if not head or size > REQUEST_MAX:
        return None
    while len(content) < size:
        if not (more := link.recv(size - len(content))):
            return None
        content += more
    said: dict[str, Any] = json.loads(content)
    return Request(said["argv"], said["environment"], said["folder"], said["leads"], streams)


def agree(link: socket.socket, request: Request) -> bool:
    """Whether it is to be forked: what libraries have read as they were loaded is what it would
    read, and its client still waits."""
    if others := differing(FIRST, request.environment):
        print(f"not forked, for these are others: {', '.join(others)}", file=sys.stderr, flush=True)
        return False
    link.sendall(GO)
    return link.recv(1) == GO


def differing(mine: dict[str, str], its: dict[str, str]) -> list[str]:
    """Names of what is not the same in two environments."""
    names = [n for n in {*mine, *its} if n not in OWN and (n == JOB or not n.startswith("RAY_"))]
    return sorted(name for name in names if mine.get(name) != its.get(name))


def become(request: Request) -> None:
    """In the forked process: from here on it is the worker that Ray has asked for."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    if request.leads:
        os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request.folder)
    set_by_libraries = {name: os.environ[name] for name in os.environ if name not in FIRST}
    os.environ.clear()
    os.environ.update(set_by_libraries | request.environment)
    if NICE in FIRST:
        os.environ[NICE] = FIRST[NICE]
    script, *_ = sys.argv = request.argv
    sys.path[0] = str(Path(script).parent)
    birth.begin_again()
    draw_apart()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
