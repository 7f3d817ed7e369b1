"""Every metric of a job: its name, type, unit, labels and meaning. docs/metrics.md is made of it.

Names begin with ``elastic_ft_``; every metric has the label ``job_name`` beside its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PREFIX = "elastic_ft_"
COMMON = ("job_name",)
RECOVERY_BUCKETS_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 2, 3, 5, 10, 30, 60, 300)


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` without the prefix; a counter's with the ``_total`` that it is scraped with."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        return PREFIX + self.name


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", unit, meaning, labels)


def _counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", unit, meaning, labels)


RANK = ("rank", "worker", "node")
GROUPS: dict[str, tuple[Metric, ...]] = {
    "Training": (
        _gauge("committed_step", "step", "The last committed step."),
        _gauge("uncommitted_steps", "steps", "Applied by some worker, and not committed yet."),
        _gauge("loss", "1", "Training loss of the last committed step."),
        _gauge("learning_rate", "1", "Of the last committed step."),
        _gauge("gradient_norm", "1", "Of the last committed step, before clipping."),
        _gauge("step_seconds", "seconds", "Duration of the last committed step."),
        _gauge(
            "exposed_seconds",
            "seconds",
            "Of the last step that was measured, what computing waited for, by kind "
            "(docs/operations.md, Overlap).",
            "kind",
        ),
        _gauge("hidden_seconds", "seconds", "What went on while it computed.", "kind"),
        _gauge("exposed_ratio", "1", "Of such a step, the share in which computing waited."),
        _counter("steps_total", "steps", "Committed steps."),
        _counter("tokens_total", "tokens", "Tokens in committed steps."),
        _counter("samples_total", "samples", "Samples in committed steps."),
    ),
    "World": (
        _gauge("phase", "0 or 1", "1 for the job's phase, 0 for the others.", "phase"),
        _gauge("world_size", "workers", "Workers in the running generation, 0 between two."),
        _gauge("world_size_max", "workers", "max_workers of the job."),
        _gauge("world_size_min", "workers", "min_workers of the job."),
        _gauge("workers_ready", "workers", "Alive and warm, members or not."),
        _gauge("nodes", "nodes", "With a worker or a keeper that is alive."),
        _gauge("nodes_draining", "nodes", "That have been given notice."),
        _gauge("generation", "1", "The newest generation opened."),
        _gauge("layout_info", "1", "1 for the layout of the last world.", "layout"),
        _gauge("layout_ranks", "ranks", "Of the last world, by dimension.", "dimension"),
    ),
    "Faults and recoveries": (
        _counter("worker_losses_total", "workers", "Lost (kind: lost, hung).", "kind"),
        _counter("node_losses_total", "nodes", "Nodes lost."),
        _counter("node_notices_total", "nodes", "Drain and preemption notices."),
        _counter("user_errors_total", "errors", "Exceptions that user code raised."),
        _counter("recoveries_total", "recoveries", "Changes of membership, by cause.", "cause"),
        Metric(
            "recovery_seconds", "histogram", "seconds", "From notice until every member trains on."
        ),
        _gauge("recovery_last_seconds", "seconds", "The last recovery's duration."),
        _counter("recovery_moved_bytes_total", "bytes", "State received in recoveries."),
        _counter("steps_lost_total", "steps", "Committed steps that were rolled back."),
        _counter("steps_redone_total", "steps", "Applied by all, not committed, run again."),
        _counter("generations_total", "generations", "Formed."),
        _counter("sources_refused_total", "sources", "State that was damaged or unreadable."),
        _counter("faults_injected_total", "faults", "Fired on purpose, by a scenario."),
    ),
    "Goodput": (
        _counter(
            "worker_seconds_total",
            "seconds",
            "Of allocated workers, by class; see docs/operations.md for the classes.",
            "class",
        ),
        _counter("available_worker_seconds_total", "seconds", "That nodes offered."),
    ),
    "State and checkpoints": (
        _gauge("state_copies", "nodes", "That hold the shard of which the fewest nodes have one."),
        _gauge("snapshot_interval_steps", "steps", "Between snapshots, as their cost advises."),
        _gauge("checkpoint_step", "step", "Of the newest checkpoint."),
        _gauge("checkpoint_timestamp_seconds", "unix time", "Of the newest checkpoint."),
        _gauge(
            "checkpoint_age_seconds",
            "seconds",
            "Since the newest checkpoint or, before the first, since the start.",
        ),
        _gauge("checkpoint_size_bytes", "bytes", "Of the newest checkpoint."),
        _gauge("checkpoint_publish_seconds", "seconds", "To verify and publish the newest one."),
        _counter(
            "checkpoints_total",
            "checkpoints",
            "By outcome: committed, failed, abandoned, refused.",
            "outcome",
        ),
    ),
    "Nodes and ranks": (
        _gauge("keeper_memory_bytes", "bytes", "Snapshots that the node's keeper owns.", "node"),
        _gauge("node_memory_free_bytes", "bytes", "That the node can still give.", "node"),
        _gauge("node_disk_free_bytes", "bytes", "On its disk of temporary files.", "node"),
        _gauge(
            "rank_pace_seconds",
            "seconds",
            "Mean forward of one layer in its last step; not where it waits for other ranks.",
            *RANK,
        ),
        _gauge("rank_data_wait_seconds", "seconds", "Its wait for data in its last step.", *RANK),
        _gauge("rank_save_wait_seconds", "seconds", "Its wait for snapshots, likewise.", *RANK),
        _gauge(
            "rank_exposed_seconds",
            "seconds",
            "Its waits for collectives and snapshots in its last step that was measured.",
            *RANK,
        ),
        _gauge("rank_silent_seconds", "seconds", "Since its training thread last moved.", *RANK),
    ),
    "The controller": (
        _counter("journal_lines_total", "lines", "Of events.jsonl.", "event"),
        _counter("core_events_total", "events", "What the core was told."),
    ),
}
METRICS = {metric.name: metric for group in GROUPS.values() for metric in group}
