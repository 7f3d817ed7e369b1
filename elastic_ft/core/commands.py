"""What the core asks for. Data only, and the wire format of what workers are told.

A command's outcome comes back as an event (``core.events``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.assignment import Assignment, Keeper, NodeId, WorkerId

FINISHED = "finished"  # the journal's last line: written once all is known of the end


@dataclass(frozen=True, slots=True)
class WantWorkers:
    """Keep ``total`` workers alive or starting; replacements are started as capacity allows."""

    total: int
    reason: str


@dataclass(frozen=True, slots=True)
class AvoidNode:
    """Start no worker on the node for ``for_s`` seconds: none that was could take part."""

    node: NodeId
    for_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """SIGKILL, and forget it."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Ask the worker to exit in good order."""

    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class Bench:
    """The worker idles until it has a rank again.

    Of what it still holds, steps after ``step`` are trained again by others, and are dropped.
    """

    worker: WorkerId
    generation: int  # in which it has no rank
    step: int


@dataclass(frozen=True, slots=True)
class UseKeeper:
    """The worker's snapshots go into memory that this keeper owns."""

    worker: WorkerId
    keeper: Keeper


@dataclass(frozen=True, slots=True)
class DropKept:
    """What an ended worker left with the node's keeper is needed no more."""

    node: NodeId
    worker: WorkerId


@dataclass(frozen=True, slots=True)
class PauseWorkers:
    """Fence every older generation (I1) and bring the workers to their safe point.

    ``abort``: break running collectives now; otherwise stop at the next step boundary.
    """

    generation: int
    workers: tuple[WorkerId, ...]
    abort: bool
    reason: str


@dataclass(frozen=True, slots=True)
class StopAtBoundary:
    """Finish the running step, write a checkpoint, and report WorkerDone."""

    workers: tuple[WorkerId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TakeCheckpoint:
    """Every member writes its part of a checkpoint after the step that ``worker`` is at."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class FormGeneration:
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class RecordStep:
    """``step`` is committed (I4): write its line and its ledger line."""

    step: int
    generation: int
    world_size: int
    layout: str
    metrics: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RollBack:
    """Committed steps after ``step`` are lost: void their lines. Journalled, never silent."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CommitCheckpoint:
    """All shards are written: verify, then publish the manifest (I5)."""

    step: int
    generation: int
    shards: tuple[dict[str, Any], ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AbandonCheckpoint:
    step: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartTimer:
    """TimerFired(timer, generation) after ``after_s`` seconds. The core ignores stale ones."""

    timer: str
    generation: int
    after_s: float


@dataclass(frozen=True, slots=True)
class Journal:
    """One line of events.jsonl (I8)."""

    event: str
    generation: int
    reason: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FinishJob:
    status: str  # completed | failed | stopped | suspended
    reason: str
    state_digest: str = ""


Command = (
    WantWorkers
    | AvoidNode
    | KillWorker
    | ReleaseWorker
    | Bench
    | UseKeeper
    | DropKept
    | PauseWorkers
    | StopAtBoundary
    | TakeCheckpoint
    | FormGeneration
    | RecordStep
    | RollBack
    | CommitCheckpoint
    | AbandonCheckpoint
    | StartTimer
    | Journal
    | FinishJob
)

# What these set going can't be taken back by a controller that does not know of it: it would train
# a generation of which no state is known, take a stop for the end of the data, go back behind a
# checkpoint, or count generations anew, where the job's start is lost (WantWorkers). An event with
# one of them among its commands is durable before any of those is executed; later commands wait
# behind.
LASTING = frozenset({WantWorkers, FormGeneration, StopAtBoundary, CommitCheckpoint, FinishJob})
