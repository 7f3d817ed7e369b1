"""Templates of a local cluster's nodes (``fork_server``): one process imports for all of them.

Not Ray, of which each process reads as it is loaded whose it is: each node's template imports that.
A template and what is forked from it are no children of the node's raylet, so whoever ends a node
asks here for them. Processes of another driver than the cluster's own start cold.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import psutil
import ray

from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.ray import fork_client, fork_server
from elastic_ft.hosts.ray.warm_nodes import executable_here, listener_for

log = logging.getLogger(__name__)
LABEL = "elastic-ft/template"  # of a node that has one, from its start to its end
ANSWER_MAX = 32
TERM_S = 5.0
AS_RAY = {"OMP_NUM_THREADS": "1", "SPT_NOENV": "1"}  # as Ray sets it for its workers


def local_executable() -> str:
    """What Ray is to start in place of Python on a local cluster; "" on another one. Blocks while
    the GCS is away."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    is_local = nodes and all(LABEL in node.get("Labels", {}) for node in nodes)
    return executable_here() if is_local else ""


class LocalTemplates:
    """From any thread. Who comes to a node's socket while it is imported waits; where it can't be
    imported, Python is started as if there were no template.

    Args:
        environment: the nodes'.
        log: a file, for what they print: who is not forked, and why.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._lock = threading.Lock()
        self._waiting: list[NodeId] = []  # to hear of their template's pid, in this order
        self._templates: dict[NodeId, psutil.Process] = {}
        self._paths: dict[NodeId, Path] = {}
        self._tell, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with told, log.open("ab") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", fork_server.__name__, str(told.fileno())],
                env={**os.environ, **environment, **AS_RAY, **WORKER_ENVIRONMENT},
                stdin=subprocess.PIPE,  # templates end when it is closed, as it is when we end
                stdout=printed,
                stderr=printed,
                pass_fds=[told.fileno()],
            )

    def add(self, node: NodeId, raylet: int) -> None:
        """``raylet``: its pid. Returns at once; nothing comes of it where the imports have failed,
        or somebody else has made the folder of sockets."""
        with self._lock:
            try:
                with listener_for(node) as listener:
                    self._paths[node] = Path(fork_client.name_of(node))
                    said = f"{node} {raylet}".encode()
                    socket.send_fds(self._tell, [said], [listener.fileno()])
            except OSError as error:
                log.warning("processes start cold on node %.12s: %s", node, error)
                return
            self._waiting.append(node)

    def processes(self, node: NodeId) -> list[psutil.Process]:
        """The node's template, and what was forked from it."""
        with self._lock:
            self._hear()
            template = self._templates.get(node)
        if template is None:
            return []
        try:
            return [template, *template.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def forget(self, node: NodeId) -> None:
        """It has ended: nobody comes to its socket any more."""
        with self._lock:
            if (path := self._paths.pop(node, None)) is not None:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Templates end; what was forked from them is its nodes'. Bounded; idempotent."""
        for node in list(self._paths):
            self.forget(node)
        self._tell.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(TERM_S)
        except subprocess.TimeoutExpired:  # it still imports
            self._process.kill()
            self._process.wait()

    def _hear(self) -> None:
        """What has been answered by now."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while self._waiting and (said := self._tell.recv(ANSWER_MAX, socket.MSG_DONTWAIT)):
                node = self._waiting.pop(0)
                with contextlib.suppress(psutil.NoSuchProcess):
                    self._templates[node] = psutil.Process(int(said))
