"""The scratch pad of one event being handled: jobs as they are by now, commands so far."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.admission import Waiting
from elastic_ft.core.sharing.ledger import Alike, SharedJob, Sharing, added, alike, removed
from elastic_ft.core.sharing.rooms import Rooms
from elastic_ft.core.sharing.waiting_line import JobsNow


class Desk:
    """Attributes:
    unstarted: jobs whose start this event has decided on, as they were before that.
    barred: kinds of those that gave way again: none of a kind starts in this event. Who was next
        after the one that did would have to, too.
    """

    def __init__(self, state: Sharing, terms: asks.SharingTerms, at_s: float) -> None:
        self.state, self.terms, self.at_s = state, terms, at_s
        self.jobs = JobsNow(state)
        self.commands: list[asks.SharingCommand] = []
        self.wakes: list[tuple[float, str]] = []
        self.unstarted: dict[asks.JobId, SharedJob] = {}
        self.barred: set[Alike] = set()

    def do(self, command: asks.SharingCommand) -> None:
        """What one event makes of a job's size is one command; its suspension makes it none."""
        if isinstance(command, (asks.ResizeJob, asks.SuspendJob)):
            for index, before in enumerate(self.commands):
                if isinstance(before, asks.ResizeJob) and before.job == command.job:
                    del self.commands[index]
                    if isinstance(command, asks.ResizeJob):
                        command = _merged(before, command)
                    break
        self.commands.append(command)

    def settled(self) -> Sharing:
        """The state that this event has made. Whose start is told has nobody behind it any more."""
        started = {each.job for each in self.commands if isinstance(each, asks.StartJob)}
        for job in self.running():
            if not started.isdisjoint(job.behind):
                self.change(job.job, behind=tuple(b for b in job.behind if b not in started))
        return self.jobs.settled(self.state)

    def wake(self, at_s: float, reason: str) -> None:
        if at_s > self.at_s:
            self.wakes.append((at_s, reason))

    def change(self, job: asks.JobId, **changes: Any) -> SharedJob:
        self.jobs[job] = found = replace(self.jobs[job], **changes)
        return found

    def rooms(self) -> Rooms:
        return Rooms(dict(self.state.nodes.items()), self.jobs.values())

    def running(self) -> list[SharedJob]:
        """In the order of submission."""
        running = [job for job in self.jobs.values() if job.has_room]
        return sorted(running, key=lambda job: job.number)

    def waiting(self) -> Waiting:
        """Those that could start now, what they had before being released; and those that will."""
        apart, later = list[SharedJob](), list[SharedJob]()
        for job in self.jobs.values():
            if job.phase in ("queued", "suspended"):
                barred = alike(job.wish) in self.barred or self._pauses(job)
                (later if job.releasing or barred else apart).append(job)
        line = self.jobs.line()
        for kind in sorted(self.barred):
            later += map(self.jobs.__getitem__, line.pop(kind, ()))
        return Waiting(apart, line, self.jobs.__getitem__, self.at_s, later)

    def is_cool(self, job: SharedJob) -> bool:
        """Also where the clock was set back: it does not wait until it is that late again."""
        cooldown_s = self.terms.cooldown_s
        return not job.resized_at_s - cooldown_s < self.at_s < job.resized_at_s + cooldown_s

    def _pauses(self, job: SharedJob) -> bool:
        """Before it may be started again; for the clock, as ``is_cool``."""
        return 2 * job.waits_since_s - job.not_before_s < self.at_s < job.not_before_s

    # ------------------------------------------------------------------------ what is told to jobs

    def shrink(self, rooms: Rooms, job: SharedJob, workers: int, reason: str) -> None:
        """To ``workers``. What it is owed is given up first."""
        less = rooms.leave(job, max(0, job.target - job.owed - workers))
        self.shrink_at(job, workers, less, reason)

    def shrink_at(self, job: SharedJob, workers: int, less: asks.Places, reason: str) -> None:
        if (start := self._unsent(job.job)) is not None:
            places = removed(start.places, less)
            self.commands[self.commands.index(start)] = replace(start, places=places)
            self.change(job.job, target=workers, held=places)
            return
        leaving = added(job.leaving, less)
        self.change(job.job, target=workers, leaving=leaving, resized_at_s=self.at_s)
        self.do(asks.ResizeJob(job.job, workers, reason, less=less))

    def grow(self, job: SharedJob, workers: int, more: asks.Places, reason: str) -> SharedJob:
        held = added(job.held, more)
        found = self.change(job.job, target=workers, held=held, resized_at_s=self.at_s)
        self.do(asks.ResizeJob(job.job, workers, reason, more=more))
        return found

    def _unsent(self, job: asks.JobId) -> asks.StartJob | None:
        """The start of a job that this event has decided on: it may still be another."""
        starts = (c for c in self.commands if isinstance(c, asks.StartJob))
        return next((c for c in starts if c.job == job), None)

    def suspend(self, job: SharedJob, reason: str, first: bool) -> None:
        """``first``: it will come first among its equals."""
        if (start := self._unsent(job.job)) is not None:
            self.commands.remove(start)
            self.jobs[job.job] = replace(self.unstarted[job.job], why="")
            self.barred.add(alike(job.wish))
            return
        told = (c for c in self.commands if isinstance(c, asks.ResizeJob) and c.job == job.job)
        held = removed(job.held, added((), *(c.more for c in told)))  # it will not hear of those
        self.change(
            job.job,
            phase="suspended",
            target=0,
            held=held,
            leaving=held,
            releasing=True,
            waits_since_s=self.at_s,
            behind=(),
            first=first,
            why=reason,
        )
        self.do(asks.SuspendJob(job.job, reason))


def _merged(first: asks.ResizeJob, second: asks.ResizeJob) -> asks.ResizeJob:
    return asks.ResizeJob(
        second.job,
        second.workers,
        f"{first.reason}; {second.reason}",
        more=added(first.more, second.more),
        less=added(first.less, second.less),
    )


def named(jobs: list[SharedJob]) -> str:
    """Whom something is for, in words a user understands."""
    found = [f"{job.job} (priority {job.wish.priority})" for job in jobs[:2]]
    others = f" and {len(jobs) - 2} more" * (len(jobs) > 2)
    return ", ".join(found) + others
