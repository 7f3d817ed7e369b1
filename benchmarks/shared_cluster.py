"""Many jobs on one simulated cluster, which ``core.scheduling`` shares out. Seeded, no clock.

Jobs do what they are told after the times of ``Times``: workers come up, join, go, write a
checkpoint. The world has its own account of who has a worker where, from the commands alone, and
holds the core's against it after each event (``tests/sim/sharing_checks``).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from elastic_ft.core.scheduling import decide
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.ledger import Bundles, Sharing

EVENTS_MAX = 1_000_000  # of one world: more is a core that never comes to rest
DealCheck = Callable[
    ["SharedCluster", Sharing, asks.SharingEvent, tuple[asks.SharingCommand, ...]], None
]


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds that things take. ``scaling``: see ``speed``."""

    start_s: float = 60.0  # from nothing, or from a checkpoint: processes, imports, state
    join_s: float = 10.0  # workers that join a job warm up while it trains on
    pause_s: float = 1.0  # of the whole job, for each resize
    release_s: float = 1.0  # until workers that were told to go are gone
    suspend_s: float = 10.0  # for a checkpoint that was not planned
    scaling: float = 0.1


@dataclass(frozen=True, slots=True)
class SubmittedWork:
    """A job that will be submitted.

    Attributes:
        width: workers that its user would ask for if the number were fixed.
        work_s: that it trains with so many.
    """

    at_s: float
    job: str
    wish: asks.Wish
    width: int
    work_s: float


def speed(workers: int, width: int, scaling: float) -> float:
    """Work done per second, in units of what ``width`` workers do.

    More workers gain less than they are: ``scaling`` 0.1 means that twice as many are 1.87 times
    as fast. Fewer lose as much as they are: nothing is credited to a job that is shrunk.
    """
    ratio = workers / width
    return ratio if ratio <= 1 else ratio ** (1 - scaling)


@dataclass(slots=True)
class JobRun:
    """A job as it is in the world."""

    work: SubmittedWork
    places: dict[str, int] = field(default_factory=dict)
    start: int = 0
    active: int = 0  # workers that train
    busy_until_s: float = 0.0  # paused by a resize
    since_s: float = 0.0  # when ``done_s`` was counted
    done_s: float = 0.0
    version: int = 0  # of the plan for its end
    first_began_s: float | None = None
    ended_s: float | None = None
    status: str = ""
    resizes: int = 0
    suspensions: int = 0


def _workers(run: JobRun) -> int:
    return sum(run.places.values())


class SharedCluster:
    """Attributes:
    check: called after each event that the core has decided on.
    on_asked: the autoscaler, told what the cluster should hold; None: there is none.
    """

    def __init__(
        self,
        terms: asks.SharingTerms,
        nodes: Iterable[tuple[str, int]],
        jobs: Iterable[SubmittedWork],
        times: Times,
        check: DealCheck | None = None,
    ) -> None:
        self.terms, self.times, self.check = terms, times, check
        self.now_s = 0.0
        self.state = Sharing()
        self.nodes = dict(nodes)
        self.jobs: dict[str, JobRun] = {}
        self.events = 0
        self.refused: dict[str, str] = {}
        self.reasons: list[str] | None = None
        self.on_asked: Callable[[Bundles], None] | None = None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._wake = 0
        self._wake_at_s = 0.0  # by the clock that it is told
        self._set_back_s = 0.0
        self.at(0.0, self.tell_nodes)
        for work in jobs:
            self.at(work.at_s, lambda work=work: self._submit(work))  # type: ignore[misc]

    # -------------------------------------------------------------------------------- its clock

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at_s, self._count, act))

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing is left to happen, or that time."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._queue)
            act()
        if until_s < float("inf"):
            self.now_s = until_s

    @property
    def clock_s(self) -> float:
        """As the core is told."""
        return self.now_s - self._set_back_s

    def set_back(self, seconds: float) -> None:
        """The clock, which is noticed."""
        self._set_back_s += seconds
        self._arm()
        self.tell(asks.Ticked(self.clock_s))

    def _arm(self) -> None:
        self._wake += 1
        turn = self._wake
        self.at(max(self.now_s, self._wake_at_s + self._set_back_s), lambda: self._tick(turn))

    # ------------------------------------------------------------------------------ what is told

    def tell(self, event: asks.SharingEvent) -> None:
        self.events += 1
        assert self.events < EVENTS_MAX, "the core does not come to rest"
        before = self.state
        self.state, commands = decide(before, event, self.terms)
        for command in commands:
            if self.reasons is not None:
                self.reasons.append(f"{self.now_s:.1f} {command}")
            self._obey(command)
        if self.check is not None:
            self.check(self, before, event, commands)

    def tell_nodes(self) -> None:
        self.tell(asks.CapacityChanged(self.clock_s, tuple(sorted(self.nodes.items()))))

    def lose_nodes(self, names: Iterable[str]) -> None:
        for name in names:
            self.nodes.pop(name, None)
        for run in self.jobs.values():
            if gone := [node for node in run.places if node not in self.nodes]:
                for node in gone:
                    del run.places[node]
                self._train_with(run, min(run.active, _workers(run)))
        self.tell_nodes()

    def _submit(self, work: SubmittedWork) -> None:
        self.jobs[work.job] = JobRun(work)
        self.tell(asks.JobSubmitted(self.clock_s, work.job, work.wish))

    # ------------------------------------------------------------------------------ what is done

    def _obey(self, command: asks.SharingCommand) -> None:
        match command:
            case asks.StartJob(job=job):
                self._start(self.jobs[job], command)
            case asks.ResizeJob(job=job):
                self._resize(self.jobs[job], command)
            case asks.SuspendJob(job=job):
                run = self.jobs[job]
                run.suspensions += 1
                self._train_with(run, 0)
                self._later(run, self.times.suspend_s, lambda: self._suspended(run))
            case asks.StopJob(job=job):
                run = self.jobs[job]
                self._train_with(run, 0)
                self._later(run, self.times.suspend_s, lambda: self.end(run, "stopped"))
            case asks.GiveUpJob(job=job):
                self.jobs[job].ended_s, self.jobs[job].status = self.now_s, "failed"
            case asks.Refuse(job=job, reason=reason):
                self.refused[job] = reason
            case asks.AskAutoscaler(bundles=bundles):
                if self.on_asked is not None:
                    self.on_asked(bundles)
            case asks.WakeAt(at_s=at_s):
                self._wake_at_s = at_s
                self._arm()

    def _tick(self, turn: int) -> None:
        if turn == self._wake:
            self.tell(asks.Ticked(max(self.clock_s, self._wake_at_s)))  # not a rounding too early

    def _later(self, run: JobRun, after_s: float, act: Callable[[], None]) -> None:
        """Unless the job has ended, or been started anew, by then."""
        start = run.start

        def now() -> None:
            if run.start == start and run.ended_s is None:
                act()

        self.at(self.now_s + after_s, now)

    def _start(self, run: JobRun, command: asks.StartJob) -> None:
        assert not run.places, f"{run.work.job} is started while it has workers"
        run.start, run.places = command.start, dict(command.places)
        self._later(run, self.times.start_s, lambda: self._began(run))

    def _began(self, run: JobRun) -> None:
        job = self.state.jobs.get(run.work.job)  # none: it was suspended, then stopped
        if job is None or job.phase != "starting":
            return
        if run.first_began_s is None:
            run.first_began_s = self.now_s
        self._train_with(run, _workers(run))
        self.tell(asks.JobBegan(self.clock_s, run.work.job, run.start))

    def _resize(self, run: JobRun, command: asks.ResizeJob) -> None:
        run.resizes += 1
        for node, workers in command.more:
            run.places[node] = run.places.get(node, 0) + workers
        if command.more:
            self._later(run, self.times.join_s, lambda: self._joined(run))
        if command.less:
            self._later(run, self.times.release_s, lambda: self._released(run, command.less))

    def _joined(self, run: JobRun) -> None:
        if self.state.jobs[run.work.job].phase == "running":
            self._train_with(run, min(self.state.jobs[run.work.job].target, _workers(run)))

    def _released(self, run: JobRun, places: asks.Places) -> None:
        left = tuple((node, n) for node, n in places if node in run.places)
        for node, workers in left:
            run.places[node] -= workers
            if not run.places[node]:
                del run.places[node]
        if run.active:
            self._train_with(run, min(run.active, _workers(run)))
        self.tell(asks.WorkersReleased(self.clock_s, run.work.job, run.start, left))

    def _suspended(self, run: JobRun) -> None:
        run.places = {}
        self.tell(asks.JobSuspended(self.clock_s, run.work.job, run.start))

    def end(self, run: JobRun, status: str) -> None:
        self._train_with(run, 0)
        run.ended_s, run.status, run.places = self.now_s, status, {}
        self.tell(asks.JobEnded(self.clock_s, run.work.job, status))

    # ------------------------------------------------------------------------------- its progress

    def progress_s(self, run: JobRun) -> float:
        """Work done by now, in seconds of its width."""
        spent_s = max(0.0, self.now_s - max(run.since_s, run.busy_until_s))
        pace = speed(run.active, run.work.width, self.times.scaling) if run.active else 0.0
        return run.done_s + spent_s * pace

    def _train_with(self, run: JobRun, workers: int) -> None:
        run.done_s = self.progress_s(run)
        if run.active and workers != run.active:
            run.busy_until_s = self.now_s + self.times.pause_s
        run.since_s, run.active = self.now_s, workers
        run.version += 1
        if not workers:
            return
        version = run.version
        left_s = max(0.0, run.work.work_s - run.done_s)
        pace = speed(workers, run.work.width, self.times.scaling)
        at_s = max(self.now_s, run.busy_until_s) + left_s / pace
        self.at(at_s, lambda: self._finish(run, version))

    def _finish(self, run: JobRun, version: int) -> None:
        if run.version == version and run.ended_s is None:
            self.end(run, "completed")
