"""A template on each node (``fork_server``): processes of jobs are there in a tenth of a second.

The actors that keep them are nobody's but their maker's: they end with it, and its jobs go on.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.core.events import NodeId
from elastic_ft.hosts.ray import fork_client, fork_server

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 20.0  # of a node's actor: then jobs start cold
AGAIN_S = 0.5
BIND_TIMEOUT_S = 10.0
BACKLOG = 64  # processes that wait to be forked


def executable_here() -> str:
    """What Ray is to start in place of Python."""
    return f"{sys.executable} -I -S {fork_client.__file__}"


class Template:
    """The actor: one child, started again when it ends."""

    def __init__(self, node: NodeId) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._bind(fork_client.name_of(node))
        threading.Thread(target=self._keep, name="template", daemon=True).start()

    def where(self) -> str:
        return executable_here()

    def _bind(self, name: str) -> None:
        """The actor of an earlier one has it for a moment. Raises OSError."""
        until_s = time.monotonic() + BIND_TIMEOUT_S
        while True:
            try:
                self._listener.bind(name)
                break
            except OSError:
                if time.monotonic() > until_s:
                    raise
            time.sleep(AGAIN_S)
        self._listener.listen(BACKLOG)

    def _keep(self) -> None:
        fd = self._listener.fileno()
        command = [sys.executable, "-m", fork_server.__name__, str(fd)]
        environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
        while True:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, pass_fds=[fd]
            )
            ended = process.wait()
            log.info("the template has ended with %d: another one", ended)
            time.sleep(AGAIN_S)


class WarmNodes:
    """``nodes``: those that are alive now. ``start`` returns at once."""

    def __init__(self, nodes: Callable[[], Collection[NodeId]]) -> None:
        self._nodes = nodes
        self._actors: dict[NodeId, Any] = {}
        self._said: dict[NodeId, str] = {}  # "": it does not answer
        self._changed, self._ended = threading.Condition(), threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="warm-nodes", daemon=True).start()

    def close(self) -> None:
        self._ended.set()

    def executable(self) -> str:
        """For jobs that start now, once each node has answered; "" where it would not be the same
        on all of them."""
        with self._changed:
            self._changed.wait_for(self._is_known, ANSWER_TIMEOUT_S)
            said = {self._said.get(node, "") for node in self._nodes()}
        return said.pop() if len(said) == 1 else ""

    def _is_known(self) -> bool:
        return bool(nodes := self._nodes()) and all(node in self._said for node in nodes)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S / 10 if not self._actors else LOOK_EVERY_S):
            nodes = set(self._nodes())
            for node in self._actors.keys() - nodes:
                del self._actors[node]
                self._said.pop(node, None)
            for node in nodes - self._actors.keys():
                self._actors[node] = _template_on(node)
                threading.Thread(target=self._ask, args=[node], daemon=True).start()

    def _ask(self, node: NodeId) -> None:
        try:
            said = str(ray.get(self._actors[node].where.remote(), timeout=ANSWER_TIMEOUT_S))
        except (RayError, KeyError) as error:  # jobs start cold there
            log.warning("node %s has no template: %s", node, error)
            said = ""
        with self._changed:
            self._said[node] = said
            self._changed.notify_all()


def _template_on(node: NodeId) -> Any:
    actor_class = ray.remote(
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": WORKER_ENVIRONMENT},
    )(Template)
    return actor_class.remote(node)
