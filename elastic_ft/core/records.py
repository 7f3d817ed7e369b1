"""The parts of ``State``: data that is replaced, never changed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastic_ft.core.assignment import Assignment, Holding, NodeId, WorkerId
from elastic_ft.core.table import Table

LeftBy = tuple[NodeId, WorkerId]  # an ended worker, and the node whose keeper has what it left


@dataclass(frozen=True, slots=True)
class Episode:
    """A change of membership under way.

    Attributes:
        reason: in words, of what it began with.
    """

    cause: str
    at_s: float
    noticed_s: float
    before: Assignment
    lost: tuple[WorkerId, ...] = ()
    steps_lost: int = 0
    steps_redone: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Recovery:
    """A finished change of membership, as it stands in result.json (DESIGN section 7)."""

    cause: str
    noticed_at_s: float  # unix time
    at_step: int
    noticed_s: float  # upper bound: from the lost worker's last message to the notice
    paused_s: float  # from the notice until every member trains on
    steps_lost: int  # committed steps that must be redone
    steps_redone: int  # steps applied by all but not yet committed that must be redone
    source: str
    bytes_moved: int
    world_before: int
    world_after: int
    layout_before: str
    layout_after: str
    survivors_kept_pid: bool
    generation: int
    lost_nodes: tuple[NodeId, ...] = ()


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that some members have applied, and that is not committed. Masks are bits by rank."""

    generation: int
    world_size: int
    layout: str
    metrics: dict[str, Any]
    applied: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class CheckpointAttempt:
    """``written``: the manifest entries of those writers that are done, in the order they came."""

    step: int
    generation: int
    writers: frozenset[WorkerId]
    written: Table[WorkerId, tuple[dict[str, Any], ...]] = field(default_factory=Table)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    took_s: float = 0.0  # the slowest writer so far
    committing: bool = False
    again: bool = False  # an earlier controller may have published it, or be about to

    @property
    def is_whole(self) -> bool:
        return len(self.written) == len(self.writers)

    def awaits(self, worker: WorkerId) -> bool:
        return worker in self.writers and worker not in self.written


@dataclass(frozen=True, slots=True)
class Uploads:
    """Checkpoints on their way. Written by ``commits`` alone, once the job has started.

    Attributes:
        asked_at_s: when the last one was due, or the job started.
        writes_s: what the last few took until they were published.
        closed_attempts: the last that ended: (step, generation).
        unsettled_step: the newest whose checkpoint may yet appear, unasked; 0: none.
    """

    asked_at_s: float = 0.0
    writes_s: tuple[float, ...] = ()
    attempts: tuple[CheckpointAttempt, ...] = ()
    closed_attempts: tuple[tuple[int, int], ...] = ()
    unsettled_step: int = 0

    @property
    def being_published(self) -> frozenset[tuple[int, int]]:
        """(step, generation)."""
        return frozenset((a.step, a.generation) for a in self.attempts if a.committing)


@dataclass(frozen=True, slots=True)
class Writers:
    """Who writes the checkpoints that a generation begins."""

    workers: frozenset[WorkerId]
    until: int | None = None  # its last step that counts: later ones were void, or not everyone's


@dataclass(frozen=True, slots=True)
class Outage:
    """The store can't be read, by whoever tried.

    Attributes:
        frozen: the source was in memory, or step 0: it is the folder of the model's weights that
            can't be read.
        generation: the last one that could not.
        waiting: nobody tries until the timer.
        said: the journal has that the job is suspended.
        blamed: workers that could not while others could, and how many times in a row.
        left_out: whether some were left out for it.
    """

    since_s: float
    why: str
    generation: int
    tries: int = 1
    waiting: bool = True
    said: bool = False
    blamed: dict[WorkerId, int] = field(default_factory=dict)
    left_out: bool = False
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Lacking:
    """What keepers are waited for.

    Attributes:
        step: the newest that could be gone on from as it is.
        cuts: the states known to be newer: (step, generation, shard space).
        holdings: so many more, at least, make one of those whole.
    """

    step: int
    cuts: frozenset[tuple[int, int, str]]
    holdings: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """A keeper's state that nobody could ask for. ``alone``: others could, each time."""

    generation: int  # the last one that could not
    tries: int
    alone: frozenset[WorkerId]


@dataclass(frozen=True, slots=True)
class Measured:
    """What workers have shown of the model, of their devices and of links, and how fast each is.

    Written by ``measuring`` alone. Read by ``world``, to plan the next layout, and by
    ``stragglers``. Tuples have the newest last, and are bounded.

    Attributes:
        paces: of this generation, by worker: seconds of the same computation, step by step.
        evicted: where somebody was found too slow and let go: a node for each of them.
        steps_s: seconds of this generation's steps, where the planner lays out.
        least_waits: of some of these steps, by number: the least share of it, 0 to 1, that any
            rank has waited for links.
        flops_per_s: operations per second that devices reach; None: not measured.
        links: times the bandwidths assumed, likewise.
        experts: of each layer, as workers say; 0: none has.
    """

    paces: Table[WorkerId, tuple[float, ...]] = field(default_factory=Table)
    evicted: tuple[NodeId, ...] = ()
    steps_s: tuple[float, ...] = ()
    least_waits: tuple[tuple[int, float], ...] = ()
    flops_per_s: float | None = None
    links: float | None = None
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Adoption:
    """A controller that goes on where another was.

    Attributes:
        controller: its number.
        at_s: since when it is in charge.
        workers: that are ready, and have not called it.
        keepers: the nodes of those that have not called it.
        newest: the newest generation that any worker who called has heard of.
        said: the journal has that nobody is waited for any more.
        waits: the journal has that steps may be lost with who has not called.
    """

    controller: int
    at_s: float
    workers: Table[WorkerId, None] = field(default_factory=Table)
    keepers: Table[NodeId, None] = field(default_factory=Table)
    newest: int = 0
    said: bool = False
    waits: bool = False

    @property
    def is_complete(self) -> bool:
        return not self.workers and not self.keepers


@dataclass(frozen=True, slots=True)
class Blame:
    """Generations that ended without a step since the last committed one, and whom that counts for.

    Written by ``blame`` alone; a step that is committed is ``forgiven``.

    Attributes:
        fruitless: how many ended with all of their members alive.
        losses: how many ended with a loss, by node.
        charged: nodes that the newest end counts for.
        broke: why the newest one ended, if nobody was lost and nothing else explains it.
        proven: the members of the world that made the last step.
        suspects: others, and how many generations broke that they were in.
    """

    fruitless: int = 0
    losses: dict[NodeId, int] = field(default_factory=dict)
    charged: frozenset[NodeId] = frozenset()
    broke: str = ""
    proven: frozenset[WorkerId] = frozenset()
    suspects: dict[WorkerId, int] = field(default_factory=dict)

    def forgiven(self, members: frozenset[WorkerId] | None) -> Blame:
        """A step is committed. ``members``: of the world that made it, where that is known."""
        proven = self.proven if members is None else members
        return Blame(charged=self.charged, broke=self.broke, proven=proven)


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """What ended workers left with the keepers of their nodes.

    Written by ``keepers`` alone. Read by ``restoring``, for a source, and by ``generations``, for
    whether to look for one again.

    Attributes:
        shards: by who left them.
        awaited: whose keeper has not told yet, and the first generation that each had no part in.
        early: who was told of before the loss was known here.
        steps: what keepers know of the ended workers' steps, by (step, generation of the step).
        lacking: what is waited for, while anything is.
    """

    shards: dict[LeftBy, tuple[Holding, ...]] = field(default_factory=dict)
    awaited: dict[LeftBy, int] = field(default_factory=dict)
    early: frozenset[LeftBy] = frozenset()
    steps: dict[tuple[int, int], PendingStep] = field(default_factory=dict)
    lacking: Lacking | None = None
