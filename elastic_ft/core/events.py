"""What the core is told (events) and what it asks for (commands). Data only.

Every event carries ``at_s``, the unix time at which the host saw it: the core has no clock.
A command's outcome comes back as an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elastic_ft.core.layouts.layout import Layout

WorkerId = str  # one process, never reused: a restarted worker has a new id
NodeId = str
KEEPER = "keeper:"  # and the node: a keeper's name among workers
# Whose trouble a WorkerRaised is, if that is known.
ITS_OWN, ITS_DEVICE, EVERYONES = "its own", "its device", "everyone's"
DAMAGED, UNREACHABLE = "damaged", "unreachable"  # kinds of SourceRefused


class Tier(StrEnum):
    """Where a piece of state lies, nearest first."""

    LIVE = "live"  # the device memory of the rank that trains with it
    HOST = "host"  # its own snapshot in host memory
    KEEPER = "keeper"  # shared memory of the node, outliving the worker
    PEER = "peer"  # a copy kept for a peer
    CHECKPOINT = "checkpoint"  # object storage
    INITIAL = "initial"  # recomputed from the seed: step 0

    __hash__ = str.__hash__  # of what it equals, and no call of Python's


TIER_ORDER = tuple(Tier)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker process and where it runs, as journalled in ``generation_formed``."""

    worker: WorkerId
    node: NodeId
    host: str
    pid: int
    raylet_pid: int | None = None
    domain: str = ""  # what fails together with the node's neighbours (a rack, a zone), if known
    memory_bytes: int = 0  # of its device, if known


@dataclass(frozen=True, slots=True)
class Holding:
    """One complete shard of the state at one step, held by a worker."""

    step: int
    space: str  # Layout.shard_space
    shard: str  # Layout.shard_of(rank)
    tier: Tier
    generation: int = 0  # that computed the step: with it, a state is one of a kind


@dataclass(frozen=True, slots=True)
class Keeper:
    """The process of a node that owns its workers' snapshots, and outlives them."""

    node: NodeId
    address: tuple[str, int]  # where it serves

    @property
    def name(self) -> str:
        """Its name among workers."""
        return KEEPER + self.node

    def left_by(self, worker: WorkerId) -> str:
        """Among the holders of a source: what a worker left here.

        By worker: two that ended at the same step may have left states of different histories.
        """
        return f"{self.name}/{worker}"


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    step: int
    url: str
    generation: int = 0  # that computed the step, 0 if this run folder does not know


@dataclass(frozen=True, slots=True)
class Source:
    """Where the state of a new generation comes from.

    ``holders`` maps each shard name to who has it (workers, keepers, a checkpoint of that step),
    nearest tier first; empty for a whole CHECKPOINT (``url``) and INITIAL (made from the seed).
    """

    step: int
    tier: Tier  # the farthest tier used
    space: str = ""
    holders: dict[str, tuple[tuple[str, Tier], ...]] = field(default_factory=dict)
    url: str = ""
    generation: int = 0  # that computed the step


class Basis:
    """What follows from how a generation is laid out, and from what it began with."""

    __slots__ = ()

    generation: int
    layout: Layout
    source: Source

    @property
    def is_cut(self) -> bool:
        """Whether no member has all of the state."""
        return self.layout.is_cut

    def computed_by(self, step: int) -> int:
        """Which generation computed ``step``, of the states that this one has."""
        return self.generation if step > self.source.step else self.source.generation

    def holding_of(self, rank: int, step: int, tier: Tier) -> Holding:
        """The shard of ``rank`` after ``step``, in ``tier``."""
        space, shard = self.layout.shard_space, self.layout.shard_of(rank)
        return Holding(step, space, shard, tier, self.computed_by(step))


@dataclass(frozen=True, slots=True)
class Assignment(Basis):
    """One generation: who, in which rank order, laid out how, with state from where."""

    generation: int
    members: tuple[Member, ...]  # index = rank
    donors: tuple[Member, ...]  # not in the new world; give their state, then leave
    layout: Layout
    source: Source
    buddies: tuple[tuple[int, ...], ...]  # rank -> ranks that keep a copy of its shard
    reason: str
    keepers: tuple[Keeper, ...] = ()  # alive when it was made

    @property
    def holding(self) -> range:
        """The ranks that keep snapshots in host memory; steps commit once held there.

        All of them where the state is cut into shards, replicated ones among them: without, a loss
        between the first and the last optimizer of a step can leave some shards at that step only,
        others at the one before, and no step whole. Where every rank has all of it, they survive
        each other, and the first one's snapshot is for when all end at once: their controller is
        killed, say. It needs a keeper to outlive its worker.
        """
        if self.is_cut:
            return range(len(self.members))
        kept = self.members[0].node in {keeper.node for keeper in self.keepers}
        return range(1) if kept else range(0)

    def rank_of(self, worker: WorkerId) -> int | None:
        return next((r for r, m in enumerate(self.members) if m.worker == worker), None)


# ------------------------------------------------------------------------------ events


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


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker's process is gone. May come more than once, and from several observers."""

    at_s: float
    worker: WorkerId
    cause: str
    silent_s: float = 0.0  # since its last message: an upper bound of the time to notice


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
    # Since the step before: data_s waiting for data, save_s for snapshots and uploads.
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


Event = (
    JobStarted
    | WorkerReady
    | WorkerLost
    | WorkerHung
    | NodeLost
    | NodeDraining
    | KeeperReady
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
)


# ---------------------------------------------------------------------------- commands


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
