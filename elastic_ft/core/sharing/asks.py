"""What the scheduler is told, what it asks for, and what jobs and queues want. Data alone.

Every event has the time at which it was noticed (``at_s``, unix time): the core has no clock. What
is told of one job comes in the order in which it happened, each once; what a job says of a start
before its last one may come at any time.
A worker takes ``slots_per_worker`` slots of one node: all of a node's for whole nodes
(``workers_per_node: 1``), a part of them otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field

JobId = str
Places = tuple[tuple[str, int], ...]  # node and workers on it, by node's name

EVENLY, BY_MINIMUM = "evenly", "by_minimum"
LIVE = ("queued", "starting", "running", "suspended", "stopping")
ENDED = ("completed", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class Wish:
    """What a job needs. Worlds are multiples of ``multiple_of``, as layouts want them."""

    min_workers: int
    max_workers: int
    multiple_of: int = 1
    slots_per_worker: int = 1
    queue: str = "default"
    priority: int = 0

    @property
    def least(self) -> int:
        return -(-self.min_workers // self.multiple_of) * self.multiple_of

    @property
    def most(self) -> int:
        return self.max_workers // self.multiple_of * self.multiple_of


@dataclass(frozen=True, slots=True)
class QueueTerms:
    """Attributes:
    quota: slots that are its own; None: it owns none, and has what others leave.
    ceiling: slots that it never exceeds, borrowed ones included; None: all there are.
    weight: of its jobs together, when what is left over is shared.
    """

    quota: int | None = None
    ceiling: int | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SharingTerms:
    """What the operator decided. Jobs of a queue that is not among ``queues`` are refused.

    Attributes:
        cooldown_s: a job that was resized does not grow sooner, and gives nothing to an equal;
            more than 0.
        ageing_s: a job that waits so long counts as one priority higher, twice as long as two.
        starts_max: failed starts in a row, before a job is given up; or controllers that it loses
            without a step in between.
        retry_s: until a failed start is tried again; doubled each time.
        autoscaler: the cluster has one, and is asked for what is missing.
        surplus: what is left over within a queue and a priority goes to jobs evenly, or in
            proportion to what each needs at least: where many workers share the work already, one
            more loses least of it.
    """

    queues: dict[str, QueueTerms] = field(default_factory=lambda: {"default": QueueTerms()})
    cooldown_s: float = 30.0
    ageing_s: float = 3600.0
    starts_max: int = 5
    retry_s: float = 10.0
    autoscaler: bool = False
    surplus: str = EVENLY


# ------------------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    at_s: float
    job: JobId
    wish: Wish


@dataclass(frozen=True, slots=True)
class JobBegan:
    """Its workers train. ``start``: that of ``StartJob``, here and below."""

    at_s: float
    job: JobId
    start: int


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Its workers did not come up (its nodes ran out, say). Nothing of it is left there."""

    at_s: float
    job: JobId
    start: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobControllerLost:
    """The job's controller has ended for good, and has not said how the job ends. Nothing of it is
    left there. ``step``: the last that it had committed."""

    at_s: float
    job: JobId
    start: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkersReleased:
    """Workers of a job are gone from these places: they are free from now on."""

    at_s: float
    job: JobId
    start: int
    places: Places


@dataclass(frozen=True, slots=True)
class JobSuspended:
    """It has a checkpoint, and no worker is left."""

    at_s: float
    job: JobId
    start: int


@dataclass(frozen=True, slots=True)
class JobEnded:
    """``status``: completed, failed or stopped. No worker is left."""

    at_s: float
    job: JobId
    status: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """All nodes that there are, with their slots. Workers on a node that is not named are lost.

    What was promised of a node that has fewer slots than before stays until it is released.
    """

    at_s: float
    nodes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    at_s: float
    job: JobId
    priority: int


@dataclass(frozen=True, slots=True)
class ResizeAsked:
    """No more than so many workers from now on: a user's wish, or that of a scheduler above."""

    at_s: float
    job: JobId
    workers: int


@dataclass(frozen=True, slots=True)
class StopAsked:
    at_s: float
    job: JobId


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time has passed: a ``WakeAt`` is due, or the caller wants to know whether anything is."""

    at_s: float


SharingEvent = (
    JobSubmitted
    | JobBegan
    | StartFailed
    | JobControllerLost
    | WorkersReleased
    | JobSuspended
    | JobEnded
    | CapacityChanged
    | PriorityChanged
    | ResizeAsked
    | StopAsked
    | Ticked
)


# ---------------------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class StartJob:
    """Start the workers there, from its newest checkpoint if it has one."""

    job: JobId
    start: int
    places: Places
    reason: str


@dataclass(frozen=True, slots=True)
class ResizeJob:
    """In place, to ``workers`` in all. ``more``: where they come; ``less``: from where they go.

    The places of ``less`` stay the job's until ``WorkersReleased`` names them.
    """

    job: JobId
    workers: int
    reason: str
    more: Places = ()
    less: Places = ()


@dataclass(frozen=True, slots=True)
class SuspendJob:
    """Write a checkpoint, then release every worker; it will be started again. Never a kill."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class StopJob:
    """At its next step boundary, with a checkpoint."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Requeue:
    """Nothing: it waits again, before its equals, and is started from the newest that there is."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpJob:
    """It is not tried any more: it has failed."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """What was asked for ``job`` is not done."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class AskAutoscaler:
    """The cluster should hold these workers together: slots that one takes, and how many there are.
    It replaces what was asked before; none: nothing is missing any more, and what idles may go."""

    bundles: tuple[tuple[int, int], ...]
    reason: str


@dataclass(frozen=True, slots=True)
class WakeAt:
    """``Ticked`` is due at ``at_s``, replacing what was asked before."""

    at_s: float
    reason: str


SharingCommand = (
    StartJob
    | ResizeJob
    | SuspendJob
    | StopJob
    | Requeue
    | GiveUpJob
    | Refuse
    | AskAutoscaler
    | WakeAt
)
