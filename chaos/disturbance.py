"""A scenario around one run: surroundings, the cluster it needs, the runner, what never fired."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from chaos.clusters import Cluster, DetachedProcesses, ProcessNodes, RayNodes
from chaos.fault_kinds import KillHead, StopHead
from chaos.runner import Runner
from chaos.scenario import Armed
from chaos.surroundings import Surroundings, surroundings
from elastic_ft.hosts.local import LocalHost
from elastic_ft.hosts.local.detached import DetachedRun
from elastic_ft.observe.lines import local_path
from elastic_ft.observe.run_reader import RunReader

HEADS = (KillHead, StopHead)  # faults of who is in charge


class Disturbance:
    """Made by ``disturbed``. Attributes: inside: faults for the workers."""

    def __init__(self, faults: Armed, out: str, around: Surroundings, resumed: bool) -> None:
        self.scenario, self.inside = faults.scenario, faults.inside
        self._out, self._around, self._resumed = out, around, resumed
        self._runner: Runner | None = None

    @property
    def in_foreground(self) -> bool:
        """Of plain processes: the runner needs their host, unless it is those in charge it is
        about."""
        external = self.scenario.external
        return bool(external) and not any(isinstance(fault, HEADS) for fault in external)

    def local_cluster(self, nodes: int, cpus_per_node: int) -> Any:
        """A Ray cluster on this machine to which the scenario can happen; a context manager."""
        if self.scenario.needs_network:
            from chaos.network import NetworkCluster

            return NetworkCluster(nodes, cpus_per_node)
        from elastic_ft.hosts.ray.cluster import LocalCluster

        durable = self.scenario.needs_durable_head
        return LocalCluster(nodes, cpus_per_node, durable_head=durable)

    @contextlib.contextmanager
    def injected(self, cluster: Any) -> Iterator[None]:
        """``cluster``: of chaos.clusters, a LocalCluster or a LocalHost; None: it is not ours."""
        external = self.scenario.external
        if not external:
            yield
            return
        nodes = _nodes(cluster)
        with Runner(external, self._out, nodes, self._around, self._resumed) as self._runner:
            yield

    def unfired(self, result: dict[str, Any]) -> list[str]:
        fired = set(result.get("faults_fired", ()))
        if self._resumed and (folder := local_path(self._out)) is not None:
            fired |= fired_inside(folder)
        inside = enumerate(self.scenario.at_points)
        missed = [str(fault) for index, fault in inside if index not in fired]
        return missed + (self._runner.unfired if self._runner is not None else [])


def _nodes(cluster: Any) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if isinstance(cluster, DetachedRun):
        return DetachedProcesses(cluster)
    return ProcessNodes(cluster) if isinstance(cluster, LocalHost) else RayNodes(cluster)


@contextlib.contextmanager
def disturbed(
    faults: Armed, out: str, checkpoint_url: str, resumed: bool = False
) -> Iterator[Disturbance]:
    """To be entered before anything of the run is started. Raises ConfigError."""
    with surroundings(faults.scenario, out, checkpoint_url) as around:
        yield Disturbance(faults, out, around, resumed)


def fired_inside(folder: Path) -> set[int]:
    """Indices of the faults at points that a run folder's journal has."""
    return {line["index"] for line in RunReader(folder).events() if line["event"] == "fault_fired"}
