"""Injects a scenario's external faults: a thread that knows a run by its folder alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any, Protocol

import psutil

from chaos.scenario import Add, Drain, External, Kill, Stop
from elastic_ft.observe.watch import Line, Watch, local_path

POLL_S = 0.02


class Cluster(Protocol):
    """What a scenario can do to the machines under a run. ``node``: as the journal names it."""

    def kill_node(self, node: str) -> object: ...
    def kill_raylet(self, node: str) -> object: ...
    def kill_worker(self, pid: int) -> object: ...
    def stop_worker(self, pid: int) -> object: ...
    def drain_node(self, node: str, deadline_s: float) -> object: ...
    def add_node(self) -> object: ...


class RayNodes:
    """``Cluster`` on ``ray_train.cluster.LocalCluster``."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster

    def kill_node(self, node: str) -> None:
        self._cluster.kill_node(node)

    def kill_raylet(self, node: str) -> None:
        self._cluster.kill_raylet(node)

    def kill_worker(self, pid: int) -> None:
        self._signal(pid, signal.SIGKILL)

    def stop_worker(self, pid: int) -> None:
        self._signal(pid, signal.SIGSTOP)

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._cluster.drain_node(node, time.time() + deadline_s)

    def add_node(self) -> None:
        self._cluster.add_node()

    def _signal(self, pid: int, signum: int) -> None:
        self._cluster.node_of_pid(pid)  # raises unless the process is one of this cluster's
        os.kill(pid, signum)


class ProcessNodes:
    """``Cluster`` on ``runtime.local.LocalHost``."""

    def __init__(self, host: Any, slots: int) -> None:
        self._host, self._slots, self._added = host, slots, 0

    def kill_node(self, node: str) -> None:
        self._host.kill_node(node)

    def kill_raylet(self, node: str) -> None:
        raise NotImplementedError("plain processes have no raylet")  # preflight refuses this

    def kill_worker(self, pid: int) -> None:
        self._signal(pid, signal.SIGKILL)

    def stop_worker(self, pid: int) -> None:
        self._signal(pid, signal.SIGSTOP)

    def drain_node(self, node: str, deadline_s: float) -> None:
        self._host.drain_node(node, time.time() + deadline_s)

    def add_node(self) -> None:
        self._added += 1
        self._host.add_node(f"added{self._added}", self._slots)

    def _signal(self, pid: int, signum: int) -> None:
        if pid not in {self._host.pid_of(worker) for worker in self._host.alive()}:
            raise ProcessLookupError(f"process {pid} is no worker of this run")
        os.kill(pid, signum)


@dataclass(slots=True)
class Pending:
    fault: External
    seen: bool = False  # its event is in the journal
    error: str = ""


class Runner:
    """Use as a context manager around the run. Every fault fires once, or is in ``unfired``.

    Attributes:
        fired: what was done, in order; also in chaos.jsonl of a local run folder.
    """

    def __init__(self, faults: tuple[External, ...], url: str, cluster: Cluster) -> None:
        self._pending = [Pending(fault) for fault in faults]
        self._watch = Watch(url)
        self._cluster = cluster
        folder = local_path(url)
        self._log = folder / "chaos.jsonl" if folder is not None else None
        self.fired: list[Line] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    def __enter__(self) -> Runner:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(60)

    @property
    def unfired(self) -> list[str]:
        """Names of the faults that have not fired, with the reason if there is one."""
        return [f"{p.fault}" + (f" ({p.error})" if p.error else "") for p in self._pending]

    def _run(self) -> None:
        while self._pending and not self._over.wait(POLL_S):
            events, _ = self._watch.poll()
            names = {line["event"] for line in events}
            due = [p for p in self._pending if self._is_due(p, names)]
            for pending in due:
                self._fire(pending)

    def _is_due(self, pending: Pending, names: set[str]) -> bool:
        """An event counts from the moment that the faults listed before have fired."""
        fault = pending.fault
        if fault.at_step is not None:
            return self._watch.step >= fault.at_step
        first = pending is self._pending[0]
        pending.seen = pending.seen or (first and fault.at_event in names)
        return pending.seen

    def _fire(self, pending: Pending) -> None:
        fault, watch = pending.fault, self._watch
        rank = getattr(fault, "of_rank", None)
        member = watch.member(rank) if rank is not None else {}
        if member is None:
            pending.error = f"there is no rank {rank} in generation {watch.formed['generation']}"
            return  # a later generation may have it
        try:
            self._act(fault, member)
        except (psutil.NoSuchProcess, ProcessLookupError, KeyError) as error:
            pending.error = f"{type(error).__name__}: {error}"
            return  # it is gone already, and the journal will say so: the next one in its rank
        self._pending.remove(pending)
        line = {
            "at_s": round(time.time(), 6),
            "fault": str(fault),
            "at_step": watch.step,
            **{key: member[key] for key in ("worker", "pid", "node") if key in member},
        }
        self.fired.append(line)
        if self._log is not None:
            with contextlib.suppress(OSError), self._log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _act(self, fault: External, member: Line) -> None:
        cluster = self._cluster
        if isinstance(fault, Add):
            cluster.add_node()
        elif isinstance(fault, Drain):
            cluster.drain_node(member["node"], fault.deadline_s)
        elif isinstance(fault, Stop):
            cluster.stop_worker(member["pid"])
        elif isinstance(fault, Kill):
            if fault.kill == "worker":
                cluster.kill_worker(member["pid"])
            elif fault.kill == "raylet":
                cluster.kill_raylet(member["node"])
            else:
                cluster.kill_node(member["node"])
