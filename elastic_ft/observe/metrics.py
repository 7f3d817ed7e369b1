"""Prometheus metrics of a job, ``elastic_ft_*``, base units."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from elastic_ft.core.state import State

PHASES = ("starting", "running", "pausing", "forming", "suspended", "ended")
NODE_GAUGES = {
    "keeper_memory": "Snapshots that the node's keeper owns.",
    "node_memory_free": "Memory that the node, or its container, can still give.",
    "node_disk_free": "Free space on the node's disk of temporary files.",
}
PAUSE_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 2, 3, 5, 10, 30, 60, 300)


class Metrics:
    """One job's metrics in a registry of its own (a process may run several jobs)."""

    def __init__(self, job: str) -> None:
        self.registry = CollectorRegistry()
        label = {"job_name": job}

        def gauge(name: str, help_: str) -> Any:
            metric = Gauge(f"elastic_ft_{name}", help_, list(label), registry=self.registry)
            return metric.labels(**label)

        def counter(name: str, help_: str, *labels: str) -> Any:
            names = [*label, *labels]
            metric = Counter(f"elastic_ft_{name}", help_, names, registry=self.registry)
            return metric if labels else metric.labels(**label)

        self._job = job
        self._server: Any = None
        self._world = gauge("world_size", "Workers in the running generation.")
        self._generation = gauge("generation", "The newest generation opened.")
        self._step = gauge("committed_step", "The last committed step.")
        self._loss = gauge("loss", "Training loss of the last committed step.")
        self._step_time = gauge("step_seconds", "Duration of the last committed step.")
        self._checkpoint_step = gauge("checkpoint_step", "Step of the newest checkpoint.")
        self._checkpoint_time = gauge(
            "checkpoint_timestamp_seconds", "Unix time of the newest checkpoint."
        )
        self._checkpointed_s = time.monotonic()
        gauge(
            "checkpoint_age_seconds",
            "Since the newest checkpoint was committed or, before the first, since the start.",
        ).set_function(lambda: time.monotonic() - self._checkpointed_s)
        self._phase = Gauge(
            "elastic_ft_phase", "1 for the job's phase.", [*label, "phase"], registry=self.registry
        )
        self._tokens = counter("tokens_total", "Tokens in committed steps.")
        self._steps = counter("steps_total", "Committed steps.")
        self._steps_lost = counter("steps_lost_total", "Committed steps that were rolled back.")
        self._recoveries = counter("recoveries_total", "Changes of membership, by cause.", "cause")
        self._pause = Histogram(
            "elastic_ft_recovery_seconds",
            "From notice until every member trains on.",
            list(label),
            buckets=PAUSE_BUCKETS_S,
            registry=self.registry,
        ).labels(**label)

        self._node = {
            name: Gauge(f"elastic_ft_{name}_bytes", help_, [*label, "node"], registry=self.registry)
            for name, help_ in NODE_GAUGES.items()
        }

    def serve(self, address: str) -> int:
        """Serves /metrics on a free port, which it returns."""
        self._server, _ = start_http_server(0, address, self.registry)
        return int(self._server.server_port)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def show(self, state: State) -> None:
        self._world.set(len(state.ranks) if state.phase == "running" else 0)
        self._generation.set(state.generation)
        for phase in PHASES:
            self._phase.labels(job_name=self._job, phase=phase).set(phase == state.phase)

    def step(self, line: dict[str, Any]) -> None:
        self._step.set(line["step"])
        self._steps.inc()
        self._tokens.inc(line.get("tokens", 0))
        self._loss.set(line.get("loss", float("nan")))
        self._step_time.set(line.get("step_time_s", float("nan")))

    def node(self, node: str, values: dict[str, Any]) -> None:
        """What a node's keeper reports."""
        for name, gauge in self._node.items():
            gauge.labels(job_name=self._job, node=node).set(values[name])

    def event(self, event: str, line: dict[str, Any]) -> None:
        if event == "recovered":
            self._recoveries.labels(job_name=self._job, cause=line["cause"]).inc()
            self._pause.observe(line["paused_s"])
        elif event == "checkpoint_committed":
            self._checkpoint_step.set(line["step"])
            self._checkpoint_time.set(line["at_s"])
            self._checkpointed_s = time.monotonic()
        elif event == "rolled_back":
            self._steps_lost.inc(line["steps_lost"])
