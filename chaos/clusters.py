"""What a scenario can do to the machines under a run: plain processes, Ray nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from chaos.fault_kinds import Network
from elastic_ft.hosts.local.orders import NodeRequest

Heal = Callable[[], object]


class Unsupported(Exception):
    """This cluster can't do that; preflight refuses such a scenario."""


class Cluster:
    """``node``: as the journal names it. What has gone already raises KeyError or
    ProcessLookupError."""

    def nodes(self) -> list[str]:
        """Those alive that host workers, oldest first."""
        raise Unsupported("nodes")

    def kill_node(self, node: str) -> None:
        raise Unsupported("kill node")

    def kill_raylet(self, node: str) -> None:
        raise Unsupported("kill raylet")

    def keeper_of(self, node: str) -> int:
        """The pid of the node's keeper."""
        raise Unsupported("find keeper")

    def kill_controller(self) -> None:
        raise Unsupported("kill controller")

    def stop_controller(self) -> int:
        """It stands still. Returns its pid."""
        raise Unsupported("stop controller")

    def kill_launcher(self) -> None:
        raise Unsupported("kill launcher")

    def kill_terminal(self) -> None:
        raise Unsupported("kill terminal")

    def root_pid(self) -> int:
        """The process from which all others of the run descend."""
        raise Unsupported("strangers")

    def kill_gcs(self) -> Heal:
        """Returns what starts it again."""
        raise Unsupported("kill gcs")

    def signal_worker(self, pid: int, name: str) -> None:
        """``name``: KILL, ABRT, STOP or CONT."""
        raise Unsupported("signal worker")

    def drain_node(self, node: str, deadline_s: float) -> None:
        raise Unsupported("drain node")

    def add_node(self) -> None:
        raise Unsupported("add node")

    def break_link(self, node: str, fault: Network) -> Heal:
        raise Unsupported(f"network {fault.network}")


class ProcessNodes(Cluster):
    """On ``hosts.local.LocalHost``: nodes are names, the controller is in this very process."""

    def __init__(self, host: Any) -> None:
        self._host, self._added = host, 0

    def nodes(self) -> list[str]:
        return list(self._host.nodes())

    def kill_node(self, node: str) -> None:
        self._host.kill_node(node)

    def keeper_of(self, node: str) -> int:
        return int(self._host.keeper_of(node))

    def root_pid(self) -> int:
        return os.getpid()

    def signal_worker(self, pid: int, name: str) -> None:
        if pid not in {self._host.pid_of(worker) for worker in self._host.alive()}:
            raise ProcessLookupError(f"process {pid} is no worker of this run")
        os.kill(pid, signal.Signals[f"SIG{name}"])

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._host.drain_node(node, time.time() + deadline_s)

    def add_node(self) -> None:
        self._added += 1
        self._host.add_node(f"added{self._added}")


class DetachedProcesses(Cluster):
    """On ``hosts.local.detached.DetachedRun``: of who is in charge there is another one."""

    def __init__(self, run: Any) -> None:
        self._run, self._added = run, 0

    def nodes(self) -> list[str]:
        return list(self._run.nodes())

    def kill_node(self, node: str) -> None:
        self._run.ask(NodeRequest("kill", node))

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._run.ask(NodeRequest("drain", node, time.time() + deadline_s))

    def add_node(self) -> None:
        self._added += 1
        self._run.ask(NodeRequest("add", f"added{self._added}"))

    def root_pid(self) -> int:
        return int(self._run.launcher_pid())

    def keeper_of(self, node: str) -> int:
        return self._pid_of("keeper", node)

    def kill_controller(self) -> None:
        os.kill(self._pid_of("controller"), signal.SIGKILL)

    def stop_controller(self) -> int:
        pid = self._pid_of("controller")
        os.kill(pid, signal.SIGSTOP)
        return pid

    def kill_launcher(self) -> None:
        os.kill(self._run.launcher_pid(), signal.SIGKILL)

    def kill_terminal(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def signal_worker(self, pid: int, name: str) -> None:
        if not any(p.pid == pid and p.kind == "worker" for p in self._run.processes()):
            raise ProcessLookupError(f"process {pid} is no worker of this run")
        os.kill(pid, signal.Signals[f"SIG{name}"])

    def _pid_of(self, kind: str, node: str = "") -> int:
        """The newest one's."""
        found = [p.pid for p in self._run.processes() if (p.kind, p.node) == (kind, node)]
        if not found:
            raise ProcessLookupError(f"no {kind} is running")
        return int(found[-1])


class RayNodes(Cluster):
    """On ``hosts.ray.cluster.LocalCluster``."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def nodes(self) -> list[str]:
        return list(self._cluster.node_ids)

    def kill_node(self, node: str) -> None:
        self._cluster.kill_node(node)

    def kill_raylet(self, node: str) -> None:
        self._cluster.kill_raylet(node)

    def keeper_of(self, node: str) -> int:
        for process in self._cluster.processes(node):
            if any("KeeperActor" in part for part in process.cmdline()):
                return int(process.pid)
        raise ProcessLookupError("no KeeperActor is running")

    def kill_controller(self) -> None:
        os.kill(self._cluster.controller_pid(), signal.SIGKILL)

    def kill_gcs(self) -> Heal:
        self._cluster.kill_gcs()
        restart: Heal = self._cluster.restart_gcs
        return restart

    def signal_worker(self, pid: int, name: str) -> None:
        self._cluster.node_of_pid(pid)  # raises unless the process is one of this cluster's
        os.kill(pid, signal.Signals[f"SIG{name}"])

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._cluster.drain_node(node, time.time() + deadline_s)

    def add_node(self) -> None:
        self._cluster.add_node()

    def break_link(self, node: str, fault: Network) -> Heal:
        broken: Heal = self._cluster.break_link(node, fault)
        return broken
