"""What the core is told. Data only, and the wire format of what workers tell.

Every event carries ``at_s``, the unix time at which the host saw it: the core has no clock.
What the core then asks for is in ``core.commands``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.assignment import CheckpointRef, Holding, Keeper, Member, NodeId, WorkerId
from elastic_ft.core.commands import RecordStep

# Whose trouble a WorkerRaised is, if that is known.
ITS_OWN, ITS_DEVICE, EVERYONES = "its own", "its device", "everyone's"
DAMAGED, UNREACHABLE = "damaged", "unreachable"  # kinds of SourceRefused


@dataclass(frozen=True, slots=True)
class JobStarted:
    at_s: float
    checkpoints: tuple[CheckpointRef, ...] = ()  # committed ones, newest first
    generation: int = 0  # the last one of an earlier controller in this run folder (I1)
    recorded: int = 0  # steps in this run folder


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker is up, has imported everything and built its model on meta: it can join."""

    at_s: float
    member: Member
    started_at_s: float = 0.0  # unix time of its process's start, 0 if that is not known
    data: dict[str, Any] = field(default_factory=dict)  # what it reads: core.terms.data_terms
    spent: dict[str, float] = field(default_factory=dict)  # by part of its start
    experts: int = 0  # of each of its model's layers, that ranks can share out; 0: none


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone. May come more than once, and from several observers."""

    at_s: float
    worker: WorkerId
    cause: str
    silent_s: float = 0.0  # since its last message: an upper bound of the time to notice
    asked: bool = False  # it was there when its host was told to kill it


@dataclass(frozen=True, slots=True)
class WorkerHung:
    """A worker's progress stood still past the deadline. It can't be trusted: it is killed (I6)."""

    at_s: float
    worker: WorkerId
    reason: str
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeLost:
    at_s: float
    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class NodeDraining:
    """The node goes away at ``deadline_s`` (unix): its workers leave before."""

    at_s: float
    node: NodeId
    deadline_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class KeeperReady:
    """A node's keeper is up; one that was there before is gone, with what it held."""

    at_s: float
    keeper: Keeper


@dataclass(frozen=True, slots=True)
class KeeperReturned:
    """A keeper that an earlier controller had has called this one: it has what it had.

    After it, it tells again, as ``KeeperHolds``, of each ended worker of which it has anything.
    """

    at_s: float
    keeper: Keeper


@dataclass(frozen=True, slots=True)
class KeeperLost:
    """``cause``: in words; empty: its connection ended."""

    at_s: float
    node: NodeId
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Unkept:
    """The worker's snapshots are in memory of its own: they end with it.

    Where every rank has all of the state, it says so in place of ``StepHeld``, step by step.
    """

    at_s: float
    worker: WorkerId
    reason: str


@dataclass(frozen=True, slots=True)
class KeeperHolds:
    """What a worker that has ended left with its node's keeper.

    ``record``: of the last steps that it had applied, up to the newest of ``holdings``: where
    nobody else has come as far, what it said of them itself may never arrive.
    """

    at_s: float
    node: NodeId
    worker: WorkerId
    holdings: tuple[Holding, ...]
    record: tuple[RecordStep, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectiveFailed:
    """A worker saw its group break, usually before anyone knows whose fault it is."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int
    error: str


@dataclass(frozen=True, slots=True)
class NobodyMoves:
    """All members of a generation stand still at one place: none can be told from the others."""

    at_s: float
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerRaised:
    """User code, or ours, raised in a worker. The process lives."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int
    error: str
    usage: bool = False  # the user's to fix: retrying is pointless
    frames: tuple[str, ...] = ()  # of user code, the one that raised last
    node: NodeId = ""
    whose: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """The worker is at its safe point, its groups of older generations are gone."""

    at_s: float
    worker: WorkerId
    generation: int  # that of the PauseWorkers it answers
    holdings: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The worker has formed its groups and has its state: it trains on."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int
    bytes_received: int = 0
    forming_s: float | None = None  # until its groups and module were there; the rest is state


@dataclass(frozen=True, slots=True)
class Restoring:
    """Bytes of the source have come since the worker last said so: now ``bytes_received``."""

    at_s: float
    worker: WorkerId
    generation: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class SourceRefused:
    """State from ``holder`` (of the source, or its URL) was damaged, or could not be had (I5).

    DAMAGED: it was read and is wrong, or is gone. UNREACHABLE says nothing of it: the store can't
    be reached, forbids it, or does not answer in time.
    """

    at_s: float
    worker: WorkerId
    generation: int
    holder: str
    reason: str
    shard: str = ""  # all that the holder has of this step, if it is not said
    kind: str = DAMAGED
    unread_by: tuple[WorkerId, ...] = ()  # UNREACHABLE: for these alone, others could read


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The worker has applied the optimizer for ``step`` (steps count from 1)."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int
    metrics: dict[str, Any] = field(default_factory=dict)
    pace_s: float = 0.0  # computing alone, the same work on every rank; 0: not measured
    took_s: float = 0.0  # all of the step
    # Since the step before: data_s waiting for data, save_s for snapshots and uploads; exposed_s
    # for collectives and snapshots, links_s of it for links, where the step's overlap was measured.
    spent: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepHeld:
    """The worker's shard after ``step`` is in host memory, and its buddy has a copy."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class ShardsWritten:
    """The worker's part of a checkpoint is in the object store."""

    at_s: float
    worker: WorkerId
    generation: int  # in which the checkpoint was begun
    step: int
    shards: tuple[dict[str, Any], ...]  # manifest entries, see core.manifest
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # dtype, shape
    took_s: float = 0.0  # by its own clock, from the safe point on; 0: not measured


@dataclass(frozen=True, slots=True)
class ShardsFailed:
    at_s: float
    worker: WorkerId
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointCommitted:
    at_s: float
    step: int
    url: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    at_s: float
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointDamaged:
    """It was published, and does not read back as it was written."""

    at_s: float
    step: int
    url: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """The worker has run every step; rank 0 adds the digest of the final state."""

    at_s: float
    worker: WorkerId
    generation: int
    step: int
    state_digest: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    at_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    """Someone wants so many workers from now on."""

    at_s: float
    workers: int
    request: str  # names it in the journal


@dataclass(frozen=True, slots=True)
class TimerFired:
    at_s: float
    timer: str
    generation: int


@dataclass(frozen=True, slots=True)
class ControllerChanged:
    """Another controller has the job: the core, replayed, is told so before anything else.

    ``controller``: its number among the owners (``storage.owners``), greater than any before.
    ``where``: in words.
    """

    at_s: float
    controller: int
    where: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReturned:
    """A worker that an earlier controller had has called this one, before what it tells again.

    ``generation``: the newest that it has heard of.
    """

    at_s: float
    worker: WorkerId
    generation: int = 0


Event = (
    JobStarted
    | WorkerReady
    | WorkerLost
    | WorkerHung
    | NodeLost
    | NodeDraining
    | KeeperReady
    | KeeperReturned
    | KeeperLost
    | KeeperHolds
    | Unkept
    | CollectiveFailed
    | NobodyMoves
    | WorkerRaised
    | Paused
    | Resumed
    | Restoring
    | SourceRefused
    | StepApplied
    | StepHeld
    | ShardsWritten
    | ShardsFailed
    | CheckpointCommitted
    | CheckpointFailed
    | CheckpointDamaged
    | WorkerDone
    | StopRequested
    | ResizeRequested
    | TimerFired
    | ControllerChanged
    | WorkerReturned
)
