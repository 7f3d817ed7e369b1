"""A real multi-node Ray cluster on this machine: for the demo, `--local-nodes N` and the tests.

Every node is a raylet of its own with its own object store and its own workers, so killing a node
is what it is on a fleet: processes gone, nobody told. All of it lives in one private folder, on
ports of the kernel's choosing, and dies with this process: the kernel sees to the raylets, their
workers follow at once, and Ray's agents after a minute.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import ray

from elastic_ft.core.assignment import NodeId
from elastic_ft.hosts.ray import ray_private, setup_worker
from elastic_ft.hosts.ray.controller_place import LABEL
from elastic_ft.hosts.ray.local_templates import LABEL as TEMPLATE
from elastic_ft.hosts.ray.local_templates import LocalTemplates
from elastic_ft.observe import scratch
from elastic_ft.observe.handover import is_alive

OBJECT_STORE_BYTES = 80 << 20
REAP_EVERY_S = 0.05
END_TIMEOUT_S = 60.0

# A dead node is declared dead after about 1.5 s instead of Ray's 13 s; no worker is started before
# it is asked for.
SYSTEM_CONFIG: dict[str, Any] = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
    "worker_register_timeout_seconds": 180,  # one that waited for a template may have to import yet
}


class LocalCluster:
    """A head node without CPUs (it holds the driver) and ``nodes`` others.

    Args:
        controllers_on_head: all of it dies with this process anyway, so no node that hosts workers
            is to be the controllers', too. Otherwise: where they may run on a fleet.
        templates: jobs' processes are forked from one that has imported what they need.

    Attributes:
        address: for ``ray.init``.
    """

    def __init__(
        self,
        nodes: int = 4,
        cpus_per_node: float = 1,
        *,
        dashboard: bool = False,
        durable_head: bool = False,
        controllers_on_head: bool = True,
        templates: bool = True,
    ) -> None:
        self._cpus_per_node = cpus_per_node
        # Unix socket paths are at most 107 bytes long: a short folder, whatever TMPDIR says.
        self._folder = str(scratch.make("eft-", "/tmp"))
        # The kernel kills a node when the *thread* that started it ends; this one ends in close().
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="local-cluster")
        system_config = SYSTEM_CONFIG
        if durable_head:  # what the GCS knows is on disk, and outlives it
            path = {"gcs_storage": "rocksdb", "gcs_storage_path": f"{self._folder}/gcs"}
            system_config = SYSTEM_CONFIG | path
        self._templates: LocalTemplates | None = None
        if templates:
            log = Path(self._folder) / "templates.log"
            self._templates = LocalTemplates(worker_environment(), log)
        self._nodes: dict[NodeId, Any] = {}
        self._killed: list[Any] = []
        self._connected = False
        self._head: Any = None
        self._closed = threading.Event()
        threading.Thread(target=self._reap_always, name="local-reaper", daemon=True).start()
        try:
            self._head = self._start(
                head=True,
                num_cpus=0,
                include_dashboard=dashboard,
                dashboard_port=0,
                gcs_server_port=0,
                no_monitor=True,
                labels={LABEL: "true"} if controllers_on_head else {},
                _system_config=system_config,
            )
            self.address: str = self._head.gcs_address
            for _ in range(nodes):
                self.add_node()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, *, quiet: bool = True, **kwargs: Any) -> None:
        """Makes this process a driver of the cluster. ``quiet``: nodes may die, it is no news."""
        if quiet:
            ray_private.silence_raylets()
            kwargs = {"log_to_driver": False, "logging_level": "WARNING", **kwargs}
        ray.init(address=self.address, **kwargs)
        self._connected = True

    @property
    def node_ids(self) -> tuple[NodeId, ...]:
        """The nodes alive, the head excepted, oldest first."""
        return tuple(self._nodes)

    def add_node(self, cpus: float | None = None, labels: dict[str, str] | None = None) -> NodeId:
        """Returns the id of a new node that is up and registered."""
        cpus = self._cpus_per_node if cpus is None else cpus
        node = self._start(head=False, num_cpus=cpus, gcs_address=self.address, labels=labels or {})
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def raylet_pid(self, node: NodeId) -> int:
        return int(self._raylet(node).pid)

    def processes(self, node: NodeId) -> list[psutil.Process]:
        """The raylet of ``node`` and everything started for it, workers included."""
        raylet = psutil.Process(self.raylet_pid(node))
        return [raylet, *raylet.children(recursive=True), *self._forked(node)]

    def head_processes(self) -> list[psutil.Process]:
        """What was started for the head node's raylet."""
        raylet = self._head.all_processes["raylet"][0].process
        started = psutil.Process(raylet.pid).children(recursive=True)
        return [*started, *self._forked(self._head.node_id)]

    def _forked(self, node: NodeId) -> list[psutil.Process]:
        return self._templates.processes(node) if self._templates is not None else []

    def controller_pid(self) -> int:
        """Raises ProcessLookupError if no controller is running."""
        processes = [*self.head_processes()]
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):  # its raylet was killed
                processes += self.processes(node)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any("ElasticController" in part for part in process.cmdline()):
                    return int(process.pid)
        raise ProcessLookupError("no ElasticController is running")

    def gcs_pid(self) -> int:
        return int(self._head.all_processes["gcs_server"][0].process.pid)

    def kill_gcs(self) -> None:
        """SIGKILLs the GCS, the part of a head that a cluster has once."""
        self._head.kill_gcs_server(check_alive=False)

    def restart_gcs(self) -> None:
        """At the same address. It knows what it knew, where the head is durable."""
        self._starter.submit(self._head.start_gcs_server).result()

    def node_of_pid(self, pid: int) -> NodeId:
        """Returns the node for which ``pid`` was started. Raises KeyError if there is none."""
        for node in self._nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if any(process.pid == pid for process in self.processes(node)):
                    return node
        raise KeyError(f"process {pid} runs on no node of this cluster")

    def kill_node(self, node: NodeId) -> None:
        """SIGKILLs the whole node, as a power cut would: nobody on it reports anything."""
        processes = self.processes(node)  # the raylet first, so that it can't tell of the others
        for process in processes:
            _signal(process, signal.SIGKILL)
        self._reap(node, processes[1:])

    def kill_raylet(self, node: NodeId) -> None:
        """SIGKILLs the raylet alone; the workers find out by themselves and exit."""
        processes = self.processes(node)
        _signal(processes[0], signal.SIGKILL)
        self._reap(node, [])
        self._killed.extend(processes[1:])  # close() makes sure of them

    def drain_node(self, node: NodeId, deadline_s: float, reason: str = "preemption") -> None:
        """Announces that ``node`` goes away at ``deadline_s`` (unix time), as clouds do."""
        ray_private.drain_node(self.address, node, reason, deadline_s)

    def close(self) -> None:
        """Leaves no process and no file behind. Bounded; idempotent."""
        self._closed.set()
        if self._connected:
            ray.shutdown()
            self._connected = False
        elif not ray.is_initialized():
            ray_private.forget_head()
        left = list(self._killed)
        nodes = [*self._nodes.values(), *([self._head] if self._head else [])]
        for node in nodes:
            left += self._forked(node.node_id)
            pids = [info.process.pid for kind in node.all_processes.values() for info in kind]
            for pid in pids:
                left += _family(pid)
            node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
        if self._templates is not None:
            self._templates.close()
        for process in left:
            _signal(process, signal.SIGKILL)
        _await_end(left)
        self._nodes, self._head, self._killed = {}, None, []
        self._starter.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(
        self, *, head: bool, starter: ThreadPoolExecutor | None = None, **params: Any
    ) -> Any:
        if self._templates is not None:
            params["labels"] = {**params["labels"], TEMPLATE: "local"}

        def start() -> Any:
            return ray_private.start_node(
                head=head,
                temp_dir=self._folder,
                object_store_memory=OBJECT_STORE_BYTES,
                num_gpus=0,
                env_vars=worker_environment(),
                setup_worker_path=setup_worker.__file__,
                **params,
            )

        node = (starter or self._starter).submit(start).result()
        if self._templates is not None:
            self._templates.add(node.node_id, node.all_processes["raylet"][0].process.pid)
        return node

    def _raylet(self, node: NodeId) -> Any:
        return self._nodes[node].all_processes["raylet"][0].process

    def _reap_always(self) -> None:
        """Reaps raylets that somebody else has killed: see ``_reap``."""
        while not self._closed.wait(REAP_EVERY_S):
            for node in list(self._nodes.values()):
                for info in node.all_processes.get("raylet", ()):
                    info.process.poll()

    def _reap(self, node: NodeId, others: list[psutil.Process]) -> None:
        # Unreaped, the dead raylet looks alive to its workers: they would train on for 12 s.
        self._raylet(node).wait()
        del self._nodes[node]
        if self._templates is not None:
            self._templates.forget(node)
        _await_end(others)


def worker_environment() -> dict[str, str]:
    """Of the nodes, and so of their workers: they import this very package, installed or not."""
    here = str(Path(__file__).parents[2])
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(paths)}


def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Returns once ``condition`` holds. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)


def _await_end(processes: list[psutil.Process]) -> None:
    """Returns once all are dead; init reaps them when it likes."""
    what = "processes of a killed node end"
    wait_for(lambda: not any(map(is_alive, processes)), END_TIMEOUT_S, what)


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(process: psutil.Process, signum: int) -> None:
    if process.pid == os.getpid():
        raise AssertionError("about to signal this very process")
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
