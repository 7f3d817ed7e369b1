"""A template on each node (``fork_server``): processes of jobs are there in a tenth of a second.

The actors that keep them are nobody's but their maker's: they end with it, and its jobs go on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from elastic_ft.controller.host import WORKER_ENVIRONMENT
from elastic_ft.core.events import NodeId
from elastic_ft.hosts.ray import fork_client, fork_server

log = logging.getLogger(__name__)
LOOK_EVERY_S = 1.0
ANSWER_TIMEOUT_S = 20.0  # of a node's actor: then jobs start cold
ASK_EVERY_S = 10.0
AGAIN_S, LOAD_AGAIN_S = 0.5, 60.0
LOOK_STOPPED_S = 5.0  # at the template
# Ray lowers the priority of its workers, this actor's too: what is forked would have it twice.
NICE_ALREADY = {fork_server.NICE: "0"}
NEW = ".new"  # a socket that does not listen yet


def executable_here(of: str = "") -> str:
    """What Ray is to start in place of Python. ``of``: as ``Template``'s."""
    command = f"{sys.executable} -I -S {fork_client.__file__}"
    return f"{command} {fork_client.OF}{of}" if of else command


class Template:
    """The actor: one child, started again when it ends. While it can't load, nobody waits for it:
    there is no socket, and jobs start cold.

    Args:
        of: whose it is, where there are several on one node; "": anyone's.
    """

    def __init__(self, node: NodeId, of: str = "") -> None:
        self._node, self._of, self._loads = node, of, True
        listener = listener_for(node, of)
        threading.Thread(target=self._keep, args=[listener], name="template", daemon=True).start()

    def where(self) -> str:
        """ "": start processes as if there were none."""
        return executable_here(self._of) if self._loads else ""

    def _keep(self, first: socket.socket | None) -> None:
        while True:
            why = "the template can't load"
            try:
                with first or listener_for(self._node, self._of) as listener:
                    while self._live(listener.fileno()):
                        time.sleep(AGAIN_S)
                    Path(fork_client.name_of(self._node, self._of)).unlink(missing_ok=True)
            except OSError as error:  # a full disk, no more processes: that passes
                self._loads, why = False, f"{type(error).__name__}: {error}"
            first = None
            log.warning("%s: jobs start cold here; tried again later", why)
            time.sleep(LOAD_AGAIN_S)

    def _live(self, fd: int) -> bool:
        """Of one child, to its end. Whether it had loaded."""
        ready, loaded = os.pipe()
        with os.fdopen(ready, "rb") as pipe:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", fork_server.__name__, str(fd), str(loaded)],
                    env={"OMP_NUM_THREADS": "1"} | dict(os.environ) | NICE_ALREADY,
                    stdin=subprocess.PIPE,
                    pass_fds=[fd, loaded],
                )
            finally:
                os.close(loaded)
            while not select.select([pipe], [], [], LOOK_STOPPED_S)[0]:
                _kill_stopped(process)
            self._loads = pipe.read(1) == fork_client.GO
        log.info("the template has ended with %d", _await_end(process))
        return self._loads


def _await_end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code."""
    while True:
        try:
            return process.wait(LOOK_STOPPED_S)
        except subprocess.TimeoutExpired:
            _kill_stopped(process)


def _kill_stopped(process: subprocess.Popen[bytes]) -> None:
    """One that is stopped (SIGSTOP) loads nothing and forks nobody: it is replaced."""
    if psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
        process.kill()


def listener_for(node: NodeId, of: str = "") -> socket.socket:
    """Where clients of that node's template call, from now on. Raises OSError."""
    folder = Path(fork_client.FOLDER)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = Path(fork_client.name_of(node, of))
    _clear(folder)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new = f"{path}{NEW}"
    Path(new).unlink(missing_ok=True)  # who was killed between here and the end has left it
    listener.bind(new)
    listener.listen(fork_client.BACKLOG)
    os.replace(new, path)  # noqa: PTH105  # of an earlier actor there may be one
    return listener


def _clear(folder: Path) -> None:
    """Sockets that nobody listens at: what killed actors have left."""
    for path in folder.iterdir():
        if path.suffix != NEW:
            with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as link:
                try:
                    link.setblocking(False)
                    link.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
                except BlockingIOError:  # many wait there
                    continue


@dataclass(slots=True)
class WarmNode:
    """``said``: None: nothing yet. "": jobs start cold there."""

    actor: Any
    answer: Future[str]
    asked_s: float
    said: str | None = None


class WarmNodes:
    """``nodes``: those that are alive now. ``start`` returns at once."""

    def __init__(self, nodes: Callable[[], Collection[NodeId]]) -> None:
        self._nodes = nodes
        self._warm: dict[NodeId, WarmNode] = {}
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
            found = {self._said(node) or "" for node in self._nodes()}
        return found.pop() if len(found) == 1 else ""

    def _said(self, node: NodeId) -> str | None:
        return self._warm[node].said if node in self._warm else None

    def _is_known(self) -> bool:
        return bool(nodes := self._nodes()) and all(self._said(node) is not None for node in nodes)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S if self._is_known() else LOOK_EVERY_S / 10):
            try:
                self.look(time.monotonic())
            except RayError as error:  # the head is away, and comes back
                log.warning("nodes' templates: %s", error)

    def look(self, now_s: float) -> None:
        """Asks who is due: an answer may come late, and another one later."""
        nodes = set(self._nodes())
        with self._changed:
            for node in self._warm.keys() - nodes:
                del self._warm[node]
            for node in nodes - self._warm.keys():
                actor = _template_on(node)
                self._warm[node] = WarmNode(actor, _ask(actor), now_s)
            for node, warm in self._warm.items():
                if warm.answer.done():
                    warm.said = _answer(node, warm.answer)
                    if now_s - warm.asked_s > ASK_EVERY_S:
                        warm.answer, warm.asked_s = _ask(warm.actor), now_s
                elif now_s - warm.asked_s > ANSWER_TIMEOUT_S:
                    warm.said = ""
            self._changed.notify_all()


def _ask(actor: Any) -> Future[str]:
    answer: Future[str] = actor.where.remote().future()
    return answer


def _answer(node: NodeId, answer: Future[str]) -> str:
    try:
        return str(answer.result())
    except RayError as error:  # jobs start cold there
        log.warning("node %s has no template: %s", node, error)
        return ""


def _template_on(node: NodeId) -> Any:
    actor_class = ray.remote(
        num_cpus=0,
        max_restarts=-1,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        runtime_env={"env_vars": WORKER_ENVIRONMENT},
    )(Template)
    return actor_class.remote(node)
