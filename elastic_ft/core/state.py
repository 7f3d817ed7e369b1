"""What the core knows of a job, and the scratch pad of one event being handled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from elastic_ft.core.assignment import (
    Assignment,
    CheckpointRef,
    Holding,
    Keeper,
    Member,
    NodeId,
    WorkerId,
)
from elastic_ft.core.commands import Command, FinishJob, Journal, StartTimer
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import (
    Adoption,
    Blame,
    Episode,
    LeftBehind,
    Measured,
    Outage,
    PendingStep,
    Recovery,
    Unreached,
    Uploads,
    Writers,
)
from elastic_ft.core.source import RefusedSources
from elastic_ft.core.table import Table

GONE_KEPT = 4096  # workers that are remembered as gone, at least
RECOVERIES_KEPT = 256
CLOSED_KEPT = 64  # uploads of checkpoints that ended

P = ParamSpec("P")
V = TypeVar("V")
Write: TypeAlias = Callable[..., None]


@dataclass(frozen=True)  # no slots: see Turn.set
class State:
    """What grows with the world and changes with every worker's event is a ``Table``."""

    phase: str = "starting"  # starting, running, pausing, forming, suspended, ended
    generation: int = 0  # the newest one opened: anything older is fenced
    assignment: Assignment | None = None
    ranks: dict[WorkerId, int] = field(default_factory=dict)  # of the assignment
    ready: Table[WorkerId, Member] = field(default_factory=Table)  # alive and warm
    target: int | None = None  # workers that someone asked for since the start
    leaving: dict[WorkerId, str] = field(default_factory=dict)  # to be released, and why
    lineage: Lineage = field(default_factory=Lineage)  # only its states are a source
    # Idle, and once a member: the generation since which it has had no rank.
    benched: dict[WorkerId, int] = field(default_factory=dict)
    idle: dict[WorkerId, str] = field(default_factory=dict)  # without a rank as of _form, and why
    deferred_at_s: float | None = None  # since when joiners wait for better times
    measured: Measured = field(default_factory=Measured)
    releasing: frozenset[WorkerId] = frozenset()  # released, and not known to have ended
    # Lost or released, the last ones: an id is never used again.
    gone: Table[WorkerId, None] = field(default_factory=Table)
    abort: bool = False  # pausing: collectives are broken off
    asked: tuple[WorkerId, ...] = ()  # pausing: who may have some of the state
    answered: int = 0  # of those, the first so many have paused or are gone
    paused: Table[WorkerId, tuple[Holding, ...]] = field(default_factory=Table)
    resumed: int = 0  # bits by rank
    bytes_moved: int = 0
    bytes_come: bool = False  # of the source, since the timer of forming was set
    done: int = 0  # bits by rank
    state_digest: str = ""
    unfit: dict[WorkerId, NodeId] = field(default_factory=dict)  # could not take part; the last few
    unfit_why: str = ""  # of the last one, or of who ended before it was ready
    draining: dict[NodeId, float] = field(default_factory=dict)
    keepers: dict[NodeId, Keeper] = field(default_factory=dict)
    unkept: frozenset[WorkerId] = frozenset()  # whose snapshots no keeper has
    left: LeftBehind = field(default_factory=LeftBehind)
    committed: int = 0
    pending: dict[int, PendingStep] = field(default_factory=dict)
    checkpoints: tuple[CheckpointRef, ...] = ()
    started_at_s: float = 0.0
    uploads: Uploads = field(default_factory=Uploads)
    writers: dict[int, Writers] = field(default_factory=dict)  # by generation, the last few
    refused: RefusedSources = frozenset()
    outage: Outage | None = None  # of the store that the next generation is to read
    unreached: dict[tuple[str, int, str], Unreached] = field(default_factory=dict)  # as in refused
    episode: Episode | None = None
    recoveries: tuple[Recovery, ...] = ()  # the last ones; each is journalled
    failures: int = 0  # recoveries from what nobody had planned, since the start
    blame: Blame = field(default_factory=Blame)
    user_failures: tuple[int, int, int] = (-1, 0, 0)  # last step, how many in a row, generation
    stopping: str = ""
    finish: FinishJob | None = None  # how the job has ended
    adoption: Adoption | None = None  # since the last time that the controller changed


def _given_as(
    fields: Callable[P, State],
) -> Callable[[Write], Callable[Concatenate[Turn, P], None]]:
    """A type checker sees each write: the method takes what ``State`` may be made of."""
    return lambda write: write


class Turn:
    """One event being handled: the state so far and the commands so far."""

    def __init__(self, state: State, policy: Policy, at_s: float) -> None:
        self.state, self.policy, self.at_s = state, policy, at_s
        self.commands: list[Command] = []

    @_given_as(State)
    def set(self, **changes: Any) -> None:
        """``dataclasses.replace``, in a twentieth of its time: each event does it once or twice."""
        new = object.__new__(State)
        new.__dict__.update(self.state.__dict__)
        new.__dict__.update(changes)
        self.state = new

    def do(self, command: Command) -> None:
        self.commands.append(command)

    def journal(self, event: str, reason: str, **fields: Any) -> None:
        self.do(Journal(event, self.state.generation, reason, fields))

    def forget(self, workers: Iterable[WorkerId]) -> None:
        """They are gone, and late messages of theirs don't bring them back (I1)."""
        state, out = self.state, tuple(workers)
        gone = state.gone
        for worker in out:
            gone = gone.put(worker, None)
        kept = max(GONE_KEPT, 4 * self.policy.max_workers)
        if len(gone) > 2 * kept:  # nothing of the oldest is on its way any more
            gone = Table(dict.fromkeys(islice(gone, len(gone) - kept, None)))
        leaving, benched = _without(state.leaving, out), _without(state.benched, out)
        self.set(ready=state.ready.without(out), gone=gone, leaving=leaving, benched=benched)
        if state.adoption is not None and state.adoption.workers:
            waiting = state.adoption.workers.without(out)
            self.set(adoption=replace(state.adoption, workers=waiting))

    def timer(self, name: str, after_s: float) -> None:
        self.do(StartTimer(name, self.state.generation, after_s))

    # -- questions

    @property
    def members(self) -> tuple[Member, ...]:
        return self.state.assignment.members if self.state.assignment else ()

    @property
    def workers_max(self) -> int:
        """Of the world: what was asked for, or may be."""
        return self.state.target or self.policy.max_workers

    def live_members(self) -> list[WorkerId]:
        """Members and donors of the last assignment that are alive, in rank order."""
        assignment = self.state.assignment
        if assignment is None:
            return []
        everyone = assignment.members + assignment.donors
        return [m.worker for m in everyone if m.worker in self.state.ready]

    def holders(self) -> list[WorkerId]:
        """Who may have some of the state: live members, and those that were members before."""
        members = dict.fromkeys(self.live_members())
        benched = [w for w in self.state.benched if w in self.state.ready and w not in members]
        return [*members, *benched]

    def takes_part(self, worker: WorkerId) -> bool:
        """Whether it is a member or a donor of the last assignment."""
        assignment = self.state.assignment
        donors = assignment.donors if assignment else ()
        return worker in self.state.ranks or any(worker == donor.worker for donor in donors)

    def may_hold(self, worker: WorkerId) -> bool:
        """Whether ``holders`` has it, if it is alive."""
        return self.takes_part(worker) or worker in self.state.benched

    def next_generation(self) -> int:
        """Above every number that anybody has heard of (I1)."""
        adoption = self.state.adoption
        return 1 + max(self.state.generation, adoption.newest if adoption else 0)

    def out_since(self, worker: WorkerId) -> int:
        """The first generation that ``worker`` has no part in; 0 if it never had one in any."""
        state = self.state
        if worker in state.benched:
            return state.benched[worker]
        newest = state.assignment
        return newest.generation + 1 if newest and self.takes_part(worker) else 0

    def _by_rank(self, members: Iterable[Member]) -> list[Member]:
        """Survivors in rank order, then joiners, those on nodes without a member first; of a first
        world, where failure domains are known, by these: neighbours in rank order share most."""
        left = {member.worker: member for member in members}
        ranked = [left.pop(m.worker) for m in self.members if m.worker in left]
        if not left:
            return ranked
        if not ranked and any(member.domain for member in left.values()):
            return sorted(left.values(), key=lambda member: (member.domain, member.node))
        taken = {m.node for m in self.members if m.worker in self.state.ready}
        return [*ranked, *sorted(left.values(), key=lambda member: member.node in taken)]

    def staying(self) -> list[Member]:
        """Who may be in the next world and is not about to go."""
        return self._by_rank(self.not_leaving())[: self.workers_max]

    def not_leaving(self) -> list[Member]:
        everyone = list(self.state.ready.values())
        if not self.state.draining and not self.state.leaving:
            return everyone
        return [member for member in everyone if not self.is_leaving(member)]

    def count_not_leaving(self) -> int:
        if not self.state.draining and not self.state.leaving:
            return len(self.state.ready)
        return len(self.not_leaving())

    def is_leaving(self, member: Member) -> bool:
        return member.node in self.state.draining or member.worker in self.state.leaving

    def usable(self) -> list[Member]:
        """Who may be in the next world: members about to go only where it takes them."""
        chosen = self.staying()
        if len(chosen) >= self.policy.min_workers:
            return chosen
        leaving = [m for m in self.members if m.worker in self.state.ready]
        leaving = [m for m in leaving if self.is_leaving(m)]
        return self._by_rank([*chosen, *leaving[: self.workers_max - len(chosen)]])

    def count_usable(self) -> int:
        """``len(usable())``, without looking at everybody if nobody is about to go."""
        if self.state.draining or self.state.leaving:
            return len(self.usable())
        return min(len(self.state.ready), self.workers_max)

    def everyone(self) -> int:
        return (1 << len(self.members)) - 1

    def to_be_held_by(self) -> int:
        """Bits by rank: who is to hold a step before it is committed."""
        assignment = self.state.assignment
        if assignment is None:
            return 0
        if not assignment.is_cut and assignment.members[0].worker in self.state.unkept:
            return 0
        return (1 << len(assignment.holding)) - 1

    def last_good(self) -> str:
        refs = self.state.checkpoints
        return (
            f"last good checkpoint: step {refs[0].step}, {refs[0].url}"
            if refs
            else ("there is no checkpoint")
        )


def _without(mapping: dict[WorkerId, V], workers: Iterable[WorkerId]) -> dict[WorkerId, V]:
    gone = mapping.keys() & workers
    return {w: value for w, value in mapping.items() if w not in gone} if gone else mapping


def is_current(turn: Turn, worker: WorkerId, generation: int) -> bool:
    """False for anything from a fenced generation or a worker that is out (I1)."""
    assignment = turn.state.assignment
    return (
        assignment is not None
        and generation == assignment.generation
        and worker in turn.state.ready
    )
