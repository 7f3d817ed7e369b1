"""A job on plain processes, its controller in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_ft.config import Job
from elastic_ft.faults import PointFault
from elastic_ft.hosts.local.local_host import LocalHost
from elastic_ft.observe.run_folder import RunFolder


def run_local(
    job: Job,
    out: str,
    *,
    nodes: dict[str, int] | None = None,
    faults: Sequence[PointFault] = (),
    on_step: Callable[[Any, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Runs ``job`` on plain processes. Returns what is in result.json.

    Args:
        out: the run folder.
        nodes: name -> slots; by default as many nodes as ``max_workers`` and spares need.
        faults: to inject at named points.
        on_step: called with (host, step line) after each committed step, in the controller's
            thread.
    """
    from elastic_ft.controller.controller import Controller

    elastic = job.elastic
    if nodes is None:
        count = -(-elastic.workers_wanted // elastic.workers_per_node)
        nodes = {f"n{i}": elastic.workers_per_node for i in range(count)}
    host = LocalHost(nodes)
    run = RunFolder(out)
    url = job.checkpoint.url or f"{run.url}/checkpoints"
    controller = Controller(job, host, run, url, faults=faults)
    if on_step is not None:
        controller.on_step = lambda line: on_step(host, line)
    return controller.run()
