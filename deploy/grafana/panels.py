"""What the dashboards show: each panel with its query, and what an operator reads from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WIDTH, HEIGHT = 12, 8
Kind = Literal["lines", "steps", "stacked", "bars", "number", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """``unit``: Grafana's name of it. ``why``: what an operator reads from the panel."""

    title: str
    unit: str
    why: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    width: int = WIDTH
    height: int = HEIGHT


def number(title: str, unit: str, why: str, expr: str, legend: str = "") -> Panel:
    return Panel(title, unit, why, (Query(expr, legend),), "number", width=4, height=4)


def lines(title: str, unit: str, why: str, *queries: Query, kind: Kind = "lines") -> Panel:
    return Panel(title, unit, why, queries, kind)


def metric(name: str, labels: str = "") -> str:
    """The series of the chosen job."""
    return f'elastic_ft{name}{{job_name="$job"{labels}}}'


OVERVIEW: dict[str, tuple[Panel, ...]] = {
    "Now": (
        number("Step", "none", "The last committed step.", metric("_committed_step")),
        number("Workers", "none", "0 while a generation forms.", metric("_world_size")),
        number(
            "Phase",
            "none",
            "What the job is doing.",
            f"{metric('_phase')} == 1",
            "{{phase}}",
        ),
        number(
            "Goodput",
            "percentunit",
            "Share of allocated worker time that went into steps that count.",
            metric(":goodput:ratio_rate5m"),
        ),
        number("Last recovery", "s", "From notice to training.", metric("_recovery_last_seconds")),
        number(
            "Checkpoint age", "s", "At stake if all memory goes.", metric("_checkpoint_age_seconds")
        ),
    ),
    "Training": (
        lines(
            "Throughput",
            "none",
            "Tokens in committed steps, each second.",
            Query(f"rate({metric('_tokens_total')}[$__rate_interval])", "tokens/s"),
        ),
        lines("Loss", "none", "Of committed steps.", Query(metric("_loss"), "loss")),
        lines(
            "Step time",
            "s",
            "Of committed steps; a saw-tooth is a snapshot interval too short.",
            Query(metric("_step_seconds"), "step"),
        ),
        lines(
            "What computing waits for",
            "s",
            "Of a step in ten, on one rank, by kind: collectives, slower ranks, snapshots.",
            Query(metric("_exposed_seconds"), "{{kind}}"),
        ),
        lines(
            "Learning rate and gradient norm",
            "none",
            "A norm that jumps after a recovery would mean other mathematics.",
            Query(metric("_learning_rate"), "learning rate"),
            Query(metric("_gradient_norm"), "gradient norm"),
        ),
    ),
    "World": (
        lines(
            "World size",
            "none",
            "Members between what the job asks for and what it needs.",
            Query(metric("_world_size"), "members"),
            Query(metric("_workers_ready"), "ready"),
            Query(metric("_world_size_max"), "max"),
            Query(metric("_world_size_min"), "min"),
            kind="steps",
        ),
        lines(
            "Layout",
            "none",
            "Ranks along each dimension.",
            Query(metric("_layout_ranks"), "{{dimension}}"),
            kind="steps",
        ),
        lines(
            "Phase",
            "none",
            "Everything but running costs goodput.",
            Query(metric("_phase"), "{{phase}}"),
            kind="stacked",
        ),
        lines(
            "Losses",
            "none",
            "Workers and nodes lost in the last five minutes.",
            Query(f"increase({metric('_worker_losses_total')}[5m])", "worker {{kind}}"),
            Query(f"increase({metric('_node_losses_total')}[5m])", "node"),
            kind="bars",
        ),
    ),
    "Recoveries and goodput": (
        lines(
            "Recoveries by cause",
            "none",
            "In the last five minutes.",
            Query(f"increase({metric('_recoveries_total')}[5m])", "{{cause}}"),
            kind="bars",
        ),
        lines(
            "Recovery time",
            "s",
            "95 % of the last hour's were shorter; and the last one.",
            Query(metric(":recovery_seconds:p95_1h"), "p95 of an hour"),
            Query(metric("_recovery_last_seconds"), "last"),
        ),
        lines(
            "Goodput",
            "percentunit",
            "Productive worker time, of what was allocated and of what nodes offered.",
            Query(metric(":goodput:ratio_rate5m"), "of allocated"),
            Query(metric(":goodput_available:ratio_rate5m"), "of available"),
        ),
        lines(
            "Badput by class",
            "percentunit",
            "Where the rest of the allocated worker time goes.",
            Query(metric(":badput:ratio_rate5m"), "{{class}}"),
            kind="stacked",
        ),
        lines(
            "Steps redone and lost",
            "none",
            "Redone: were not committed. Lost: were, and had to be rolled back.",
            Query(f"increase({metric('_steps_redone_total')}[5m])", "redone"),
            Query(f"increase({metric('_steps_lost_total')}[5m])", "lost"),
            kind="bars",
        ),
        lines(
            "State moved in recoveries",
            "bytes",
            "In the last five minutes.",
            Query(f"increase({metric('_recovery_moved_bytes_total')}[5m])", "moved"),
            kind="bars",
        ),
    ),
}

STATE: dict[str, tuple[Panel, ...]] = {
    "Redundancy": (
        number(
            "Copies",
            "none",
            "Nodes that hold the rarest shard; below 2, the loss of one costs steps.",
            metric("_state_copies"),
        ),
        number("Uncommitted steps", "none", "Applied, not safe yet.", metric("_uncommitted_steps")),
        number("Newest checkpoint", "none", "Its step.", metric("_checkpoint_step")),
        number("Its size", "bytes", "As published.", metric("_checkpoint_size_bytes")),
        number(
            "To publish it", "s", "Verifying it included.", metric("_checkpoint_publish_seconds")
        ),
        number(
            "Checkpoint age", "s", "At stake if all memory goes.", metric("_checkpoint_age_seconds")
        ),
        lines(
            "Copies over time",
            "none",
            "Nodes that hold the rarest shard.",
            Query(metric("_state_copies"), "copies"),
            kind="steps",
        ),
        lines(
            "Keepers' memory",
            "bytes",
            "Snapshots by node; they outlive their workers.",
            Query(metric("_keeper_memory_bytes"), "{{node}}"),
            kind="stacked",
        ),
    ),
    "Checkpoints": (
        lines(
            "Checkpoint age",
            "s",
            "A saw-tooth; a ramp is an object store that fails.",
            Query(metric("_checkpoint_age_seconds"), "age"),
        ),
        lines(
            "Checkpoints by outcome",
            "none",
            "In the last five minutes.",
            Query(f"increase({metric('_checkpoints_total')}[5m])", "{{outcome}}"),
            kind="bars",
        ),
        lines(
            "What saving costs",
            "percentunit",
            "Worker time that waits for snapshots and uploads, and that is spent restoring.",
            Query(metric(":badput:ratio_rate5m", ', class=~".*checkpoint.*"'), "{{class}}"),
        ),
        lines(
            "Refused state",
            "none",
            "Damaged or unreadable, found by its digest, in the last five minutes.",
            Query(f"increase({metric('_sources_refused_total')}[5m])", "refused"),
            kind="bars",
        ),
    ),
}

NODES: dict[str, tuple[Panel, ...]] = {
    "Ranks": (
        lines(
            "Pace",
            "s",
            "A layer's forward on each rank, waiting for nobody: who stands out is a straggler.",
            Query(metric("_rank_pace_seconds"), "rank {{rank}} on {{node}}"),
        ),
        lines(
            "Pace against the median",
            "none",
            "Above 1.5 for five minutes raises ElasticFtStraggler.",
            Query(metric(":rank_pace:ratio"), "rank {{rank}} on {{node}}"),
        ),
        lines(
            "Waits for data",
            "s",
            "Of the last step, by rank.",
            Query(metric("_rank_data_wait_seconds"), "rank {{rank}} on {{node}}"),
        ),
        lines(
            "Waits for snapshots",
            "s",
            "Of the last step, by rank.",
            Query(metric("_rank_save_wait_seconds"), "rank {{rank}} on {{node}}"),
        ),
        lines(
            "Silence",
            "s",
            "Since each rank's training thread last moved; a hang is a ramp.",
            Query(metric("_rank_silent_seconds"), "rank {{rank}} on {{node}}"),
        ),
        Panel(
            "Who is where",
            "none",
            "The ranks of the running world.",
            (Query(metric("_rank_silent_seconds")),),
            "table",
        ),
    ),
    "Nodes": (
        lines(
            "Nodes",
            "none",
            "With a worker or keeper; and those given notice.",
            Query(metric("_nodes"), "nodes"),
            Query(metric("_nodes_draining"), "draining"),
            kind="steps",
        ),
        lines(
            "Node losses and notices",
            "none",
            "In the last five minutes.",
            Query(f"increase({metric('_node_losses_total')}[5m])", "lost"),
            Query(f"increase({metric('_node_notices_total')}[5m])", "notices"),
            kind="bars",
        ),
        lines(
            "Free memory",
            "bytes",
            "Of each node.",
            Query(metric("_node_memory_free_bytes"), "{{node}}"),
        ),
        lines(
            "Free disk",
            "bytes",
            "Of each node's temporary files.",
            Query(metric("_node_disk_free_bytes"), "{{node}}"),
        ),
    ),
}

SERVICE: dict[str, tuple[Panel, ...]] = {
    "Now": (
        number("Slots", "none", "Of all nodes.", "elastic_ft_service_slots"),
        number("Used", "none", "Those that jobs hold.", "sum(elastic_ft_service_slots_used)"),
        number(
            "Running",
            "none",
            "Jobs that have workers.",
            'sum(elastic_ft_service_jobs{state=~"starting|running"})',
        ),
        number(
            "Waiting",
            "none",
            "Jobs without room: queued, or suspended for others.",
            'sum(elastic_ft_service_jobs{state=~"queued|suspended"})',
        ),
        number(
            "Longest wait",
            "s",
            "Of those that wait.",
            "max(elastic_ft_service_longest_wait_seconds)",
        ),
        number(
            "Preemptions avoided",
            "none",
            "Jobs that shrank in place for another in the last day: kills elsewhere.",
            'increase(elastic_ft_service_decisions_total{kind="shrink"}[1d])',
        ),
    ),
    "Queues": (
        lines(
            "Slots by queue",
            "none",
            "Who has the cluster; what is missing to all slots idles.",
            Query("elastic_ft_service_slots_used", "{{queue}}"),
            kind="stacked",
        ),
        lines(
            "Use of the cluster",
            "percentunit",
            "Low while jobs wait: their minima do not fit.",
            Query("sum(elastic_ft_service_slots_used) / elastic_ft_service_slots", "used"),
        ),
        lines(
            "Share of a queue's quota",
            "percentunit",
            "Above 1: it has borrowed what idles, and gives it back when its owner wants it.",
            Query(
                "elastic_ft_service_slots_used / (elastic_ft_service_queue_quota_slots > 0)",
                "{{queue}}",
            ),
        ),
        lines(
            "Jobs that wait",
            "none",
            "By queue; suspended ones have a checkpoint, and come first among their equals.",
            Query('elastic_ft_service_jobs{state=~"queued|suspended"}', "{{queue}} {{state}}"),
            kind="stacked",
        ),
    ),
    "Waits and decisions": (
        lines(
            "Longest wait",
            "s",
            "Of the jobs that wait now.",
            Query("elastic_ft_service_longest_wait_seconds", "{{queue}}"),
        ),
        lines(
            "Mean wait until training",
            "s",
            "Of jobs that began within the last hour.",
            Query(
                "increase(elastic_ft_service_wait_seconds_total[1h])"
                " / increase(elastic_ft_service_begun_total[1h])",
                "mean",
            ),
        ),
        lines(
            "Decisions",
            "none",
            "In the last five minutes. Shrinks give room in place; suspensions are what is left.",
            Query("increase(elastic_ft_service_decisions_total[5m])", "{{kind}}"),
            kind="bars",
        ),
        lines(
            "Jobs that ended",
            "none",
            "In all, by how.",
            Query(
                'sum by (state) (elastic_ft_service_jobs{state=~"completed|failed|stopped"})',
                "{{state}}",
            ),
            kind="steps",
        ),
    ),
}

DASHBOARDS = {
    "job": ("elastic_ft: job overview", OVERVIEW),
    "state": ("elastic_ft: state and checkpoints", STATE),
    "nodes": ("elastic_ft: nodes and stragglers", NODES),
    "service": ("elastic_ft: service", SERVICE),
}
