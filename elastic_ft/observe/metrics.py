"""Prometheus metrics of a job: what ``catalogue`` names, kept up to date by the controller."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import time
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment
from elastic_ft.core.layouts.layout import DIMENSIONS
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.errors import ConfigError
from elastic_ft.observe import files
from elastic_ft.observe.accounts import Totals
from elastic_ft.observe.catalogue import COMMON, METRICS, RECOVERY_BUCKETS_S, Metric
from elastic_ft.observe.journal import COUNTED

PHASES = ("starting", "running", "pausing", "forming", "suspended", "ended")
NODE_GAUGES = ("keeper_memory", "node_memory_free", "node_disk_free")
REQUEST_TIMEOUT_S = 10.0
TARGETS = "prometheus_targets.json"  # in the run folder, for Prometheus' file_sd_configs


class Metrics:
    """One job's metrics in a registry of its own (a process may run several jobs)."""

    def __init__(self, job: str, policy: Policy | None = None) -> None:
        self.registry = CollectorRegistry()
        self._job = job
        self._server: Any = None
        self._metrics = {name: self._make(metric) for name, metric in METRICS.items()}
        self._series: dict[str, Any] = {}
        self._phase = ""
        self._counted: dict[tuple[str, str], float] = {}
        self._ranks: tuple[tuple[str, str, str], ...] = ()
        self._rank_series: dict[tuple[str, int], Any] = {}
        self._checkpointed_s = time.monotonic()
        self._of("checkpoint_age_seconds").set_function(
            lambda: time.monotonic() - self._checkpointed_s
        )
        if policy is not None:
            self._of("world_size_max").set(policy.max_workers)
            self._of("world_size_min").set(policy.min_workers)
        for metric in METRICS.values():  # a rate needs the zero before the first
            if metric.kind != "gauge" and not metric.labels:
                self._of(metric.name)
        for name, labels in COUNTED.values():
            self._of(name, **labels)

    def _make(self, metric: Metric) -> Any:
        labels = [*COMMON, *metric.labels]
        if metric.kind == "histogram":
            return Histogram(
                metric.full_name,
                metric.meaning,
                labels,
                buckets=RECOVERY_BUCKETS_S,
                registry=self.registry,
            )
        kind = Counter if metric.kind == "counter" else Gauge
        return kind(metric.full_name, metric.meaning, labels, registry=self.registry)

    def _of(self, name: str, **labels: str) -> Any:
        """The series. Those without labels of their own are asked for at every event."""
        if labels:
            return self._metrics[name].labels(job_name=self._job, **labels)
        series = self._series.get(name)
        if series is None:
            series = self._series[name] = self._metrics[name].labels(job_name=self._job)
        return series

    # ----------------------------------------------------------------------- serving

    def serve(self, address: str, ports: range | None = None) -> int:
        """Serves /metrics on a free port, one of ``ports``, which it returns.

        Raises ConfigError where none of them is free, or ``address`` is not of this machine.
        """
        for port in ports or (0,):
            try:
                self._server, _ = start_http_server(port, address, self.registry)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise ConfigError(f"network.metrics_address: {address}: {error}") from None
                continue
            self._server.RequestHandlerClass = _bounded(self._server.RequestHandlerClass)
            return int(self._server.server_port)
        raise ConfigError(f"network.ports: none of {ports} is free at {address}")

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    # ------------------------------------------------------------- what the core decides

    def show(self, state: State, events: int = 1) -> None:
        """After so many events."""
        running = state.phase == "running"
        self._of("core_events_total").inc(events)
        self._of("world_size").set(len(state.ranks) if running else 0)
        self._of("workers_ready").set(len(state.ready))
        self._of("nodes_draining").set(len(state.draining))
        self._of("generation").set(state.generation)
        self._of("uncommitted_steps").set(len(state.pending))
        if state.phase != self._phase:
            self._phase = state.phase
            for phase in PHASES:
                self._of("phase", phase=phase).set(phase == state.phase)

    def formed(self, assignment: Assignment) -> None:
        """Every member of a new generation trains."""
        layout = assignment.layout
        self._metrics["layout_info"].clear()
        self._of("layout_info", layout=str(layout)).set(1)
        for dimension, ranks in zip(DIMENSIONS, layout.sizes, strict=True):
            self._of("layout_ranks", dimension=dimension).set(ranks)
        self._of("state_copies").set(state_copies(assignment))
        for name in ("pace", "data_wait", "save_wait", "exposed", "silent"):
            self._metrics[f"rank_{name}_seconds"].clear()
        self._rank_series.clear()
        self._ranks = tuple(
            (str(rank), member.worker, member.node)
            for rank, member in enumerate(assignment.members)
        )

    def step(self, line: dict[str, Any], samples: int) -> None:
        """A step of so many samples is committed."""
        self._of("committed_step").set(line["step"])
        self._of("steps_total").inc()
        self._of("tokens_total").inc(line.get("tokens", 0))
        self._of("samples_total").inc(samples)
        self._of("loss").set(line.get("loss", math.nan))
        self._of("learning_rate").set(line.get("lr", math.nan))
        self._of("gradient_norm").set(line.get("grad_norm", math.nan))
        self._of("step_seconds").set(line.get("step_time_s", math.nan))
        if "exposed_s" in line:
            self._overlap(line)

    def _overlap(self, line: dict[str, Any]) -> None:
        """Of a step in which it was measured."""
        exposed = line["exposed_s"]
        self._of("exposed_ratio").set(sum(exposed.values()) / max(line["step_time_s"], 1e-9))
        for name in ("exposed", "hidden"):
            self._metrics[f"{name}_seconds"].clear()
            for kind, seconds in line[f"{name}_s"].items():
                self._of(f"{name}_seconds", kind=kind).set(seconds)

    def event(self, event: str, line: dict[str, Any]) -> None:
        self._of("journal_lines_total", event=event).inc()
        if event in COUNTED:
            name, labels = COUNTED[event]
            self._of(name, **labels).inc()
        if event == "recovered":
            self._of("recoveries_total", cause=line["cause"]).inc()
            self._of("recovery_seconds").observe(line["paused_s"])
            self._of("recovery_last_seconds").set(line["paused_s"])
            self._of("recovery_moved_bytes_total").inc(line["bytes_moved"])
            self._of("steps_redone_total").inc(line["steps_redone"])
        elif event == "checkpoint_committed":
            self._of("checkpoint_step").set(line["step"])
            self._of("checkpoint_timestamp_seconds").set(line["at_s"])
            self._of("checkpoint_size_bytes").set(line["bytes"])
            self._of("checkpoint_publish_seconds").set(line["seconds"])
            self._checkpointed_s = time.monotonic()
        elif event == "rolled_back":
            self._of("steps_lost_total").inc(line["steps_lost"])
        elif event == "snapshot_interval":
            self._of("snapshot_interval_steps").set(line["every_steps"])

    # -------------------------------------------------------------- who stands where

    def rank(self, event: ev.StepApplied, rank: int | None) -> None:
        if rank is not None and rank < len(self._ranks):
            self._of_rank("data_wait", rank).set(event.spent.get("data_s", 0.0))
            self._of_rank("save_wait", rank).set(event.spent.get("save_s", 0.0))
            if "exposed_s" in event.spent:
                self._of_rank("exposed", rank).set(event.spent["exposed_s"])
            if event.pace_s:
                self._of_rank("pace", rank).set(event.pace_s)

    def silent(self, silent_s: dict[int, float]) -> None:
        """By rank, since its training thread last moved."""
        for rank, seconds in silent_s.items():
            if rank < len(self._ranks):
                self._of_rank("silent", rank).set(seconds)

    def _of_rank(self, name: str, rank: int) -> Any:
        """Kept for the generation: to look labels up takes long where ranks are many."""
        series = self._rank_series.get((name, rank))
        if series is None:
            number, worker, node = self._ranks[rank]
            labels = {"rank": number, "worker": worker, "node": node}
            series = self._rank_series[name, rank] = self._of(f"rank_{name}_seconds", **labels)
        return series

    def nodes(self, count: int) -> None:
        """Nodes come and go with their keepers and workers."""
        self._of("nodes").set(count)

    def node(self, node: str, values: dict[str, Any]) -> None:
        """What a node's keeper reports."""
        for name in NODE_GAUGES:
            self._of(f"{name}_bytes", node=node).set(values[name])

    def forget_node(self, node: str) -> None:
        """Its keeper is gone: what it said last is true no more."""
        for name in NODE_GAUGES:
            self._metrics[f"{name}_bytes"].remove_by_labels({"node": node})

    def goodput(self, totals: Totals) -> None:
        """Counters never fall: what turns out wasted later is taken from what is yet to come."""
        for kind, seconds in totals.classes.items():
            self._count_up_to("worker_seconds_total", seconds, kind)
        self._count_up_to("available_worker_seconds_total", totals.available_s, "")

    def _count_up_to(self, name: str, seconds: float, kind: str) -> None:
        before = self._counted.get((name, kind), 0.0)
        counter = self._of(name, **{"class": kind}) if kind else self._of(name)
        counter.inc(max(0.0, seconds - before))
        self._counted[name, kind] = max(before, seconds)


def _bounded(handler: Any) -> Any:
    """A request handler that waits for no request for ever: who says nothing keeps no thread."""

    class Bounded(handler):
        timeout = REQUEST_TIMEOUT_S

        def handle(self) -> None:
            with contextlib.suppress(TimeoutError):
                super().handle()

    return Bounded


def state_copies(assignment: Assignment) -> int:
    """On how many nodes the shard is that the fewest have, replicas and buddies' copies."""
    layout, members = assignment.layout, assignment.members
    nodes: dict[str, set[str]] = {}
    for rank, member in enumerate(members):
        there = nodes.setdefault(layout.shard_of(rank), set())
        there.add(member.node)
        there.update(members[buddy].node for buddy in assignment.buddies[rank])
    return min((len(there) for there in nodes.values()), default=0)


def write_targets(folder: Path, target: str) -> None:
    """Tells Prometheus (file_sd_configs) where the job serves its metrics; "" for nowhere."""
    targets = [{"targets": [target], "labels": {"run": folder.name}}] if target else []
    files.replace(folder / TARGETS, json.dumps(targets).encode() + b"\n")
