"""Where a job is about to run: what the options of a start say."""

from __future__ import annotations

import os
from dataclasses import dataclass

from elastic_ft.config import Job
from elastic_ft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Where:
    """One of: a Ray cluster at ``address``, one of ``nodes`` made here, plain processes."""

    address: str | None = None
    nodes: int = 0
    processes: bool = False
    cpus_per_node: int = 1

    @property
    def slots(self) -> int | None:
        """How many workers fit at the start; None if that is not known (a cluster elsewhere)."""
        return self.nodes * self.cpus_per_node if self.address is None else None

    @property
    def is_ours(self) -> bool:
        """Nodes can be added and killed from here."""
        return self.address is None

    @property
    def has_raylets(self) -> bool:
        """Nodes have one that can be killed from here."""
        return self.is_ours and not self.processes

    def __str__(self) -> str:
        if self.address is not None:
            return f"the Ray cluster at {self.address}"
        if self.processes:
            return "this machine (--processes)"
        return f"a local cluster of {self.nodes} nodes"


def where_to_run(job: Job, address: str | None, local_nodes: int | None, processes: bool) -> Where:
    given = {"--address": address, "--local-nodes": local_nodes, "--processes": processes or None}
    named = [option for option, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)}: expected at most one of them")
    elastic = job.elastic
    needed = -(-elastic.workers_wanted // elastic.workers_per_node)
    if processes:
        return Where(nodes=needed, processes=True, cpus_per_node=elastic.workers_per_node)
    if not named:
        address = os.environ.get("RAY_ADDRESS") or None
    if address is not None:
        return Where(address=address)
    return Where(nodes=local_nodes or needed, cpus_per_node=elastic.workers_per_node)
