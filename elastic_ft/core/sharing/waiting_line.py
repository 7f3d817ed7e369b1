"""Jobs in one event: those that are looked at one by one, and the line of all that only wait. Pure.

What one job of the line is refused, all that are alike are refused. So an event costs what runs,
and how many kinds wait: not how many jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import ItemsView, Iterator, ValuesView
from dataclasses import replace

from elastic_ft.core.sharing.asks import JobId
from elastic_ft.core.sharing.ledger import Alike, SharedJob, Sharing, alike, slots_of
from elastic_ft.core.table import Table

WaitingLine = dict[Alike, tuple[JobId, ...]]


class JobsNow:
    """A state's jobs as they are by now: a mapping, of which ``values`` are those apart alone.

    Attributes:
        reserving: those that have nodes reserved.
    """

    def __init__(self, state: Sharing) -> None:
        self._state = state
        self._apart = {name: state.jobs[name] for name in state.apart}
        self._left: dict[JobId, SharedJob] = {}  # from the line, as they were there
        self._gone: set[JobId] = set()
        self._used: Counter[str] | None = None  # slots by queue, once somebody has asked
        self.reserving = {name for name, job in self._apart.items() if job.reserved}

    # --------------------------------------------------------------------------- as a mapping

    def __getitem__(self, name: JobId) -> SharedJob:
        if (found := self.get(name)) is None:
            raise KeyError(name)
        return found

    def get(self, name: JobId) -> SharedJob | None:
        if (found := self._apart.get(name)) is not None:
            return found
        if name in self._gone:
            return None
        waits: SharedJob | None = self._state.jobs.get(name)
        return waits

    def __contains__(self, name: JobId) -> bool:
        return self.get(name) is not None

    def __setitem__(self, name: JobId, job: SharedJob) -> None:
        before = self._apart.get(name)
        if before is None and (waits := self._state.jobs.get(name)) is not None:
            self._left[name] = waits
        self._apart[name] = job
        (self.reserving.add if job.reserved else self.reserving.discard)(name)
        if self._used is not None:
            self._used[job.wish.queue] += slots_of(job) - (slots_of(before) if before else 0)

    def __delitem__(self, name: JobId) -> None:
        before = self[name]
        if self._apart.pop(name, None) is None:
            self._left[name] = before
        self._gone.add(name)
        self.reserving.discard(name)
        if self._used is not None:
            self._used[before.wish.queue] -= slots_of(before)

    def values(self) -> ValuesView[SharedJob]:
        return self._apart.values()

    def items(self) -> ItemsView[JobId, SharedJob]:
        return self._apart.items()

    def is_as(self, before: dict[JobId, SharedJob]) -> bool:
        """Nothing has changed but words, which decide nothing."""
        if not before.keys() <= self._apart.keys():
            return False
        for name, job in self._apart.items():
            was = before.get(name) or self._state.jobs.get(name)
            if job is not was and (was is None or job != replace(was, why=job.why)):
                return False
        return True

    def used_slots(self, queue: str) -> int:
        """By workers of its jobs, those included that are told to go."""
        if self._used is None:
            self._used = Counter()
            for job in self._apart.values():
                self._used[job.wish.queue] += slots_of(job)
        return self._used[queue]

    # -------------------------------------------------------------------------------- the line

    def line(self) -> WaitingLine:
        """Without those that are apart by now."""
        found = dict(self._state.line.items())
        for name, job in self._left.items():
            _take_out(self._state, found, name, job)
        return found

    def settled(self, state: Sharing) -> Sharing:
        """``state`` with them."""
        before = self._state.jobs
        jobs, apart = before.without(self._gone), set(state.apart) - self._gone
        line = dict(state.line.items())
        touched = {
            name: job
            for name, job in self._apart.items()
            if before.get(name) is not job or (name in self._left)
        }
        for name, job in self._left.items():
            _take_out(self._state, line, name, job)
        for name, job in touched.items():
            jobs = jobs.put(name, job)
        state = replace(state, jobs=jobs)
        for name, job in touched.items():
            if _is_plain(job) and _put_in(state, line, job):
                apart.discard(name)
            else:
                apart.add(name)
        line = {kind: names for kind, names in line.items() if names}
        if apart != set(state.apart):
            in_order = sorted(apart, key=lambda name: state.jobs[name].number)
            state = replace(state, apart=tuple(in_order))
        return replace(state, line=state.line if state.line == line else Table(line))


def _is_plain(job: SharedJob) -> bool:
    """It has nothing of its own but when it was submitted."""
    return job.phase == "queued" and not (job.start or job.why or job.reserved)


def _place_of(state: Sharing, names: tuple[JobId, ...], job: SharedJob) -> int:
    return bisect_left(names, job.number, key=lambda name: state.jobs[name].number)


def _take_out(state: Sharing, line: WaitingLine, name: JobId, job: SharedJob) -> None:
    names = line.get(alike(job.wish), ())
    at = _place_of(state, names, job)
    if names[at : at + 1] == (name,):
        line[alike(job.wish)] = names[:at] + names[at + 1 :]


def _put_in(state: Sharing, line: WaitingLine, job: SharedJob) -> bool:
    """Whether it has a place there: who was submitted later has waited for no longer."""
    names = line.get(alike(job.wish), ())
    at = _place_of(state, names, job)
    beside = [state.jobs[name].waits_since_s for name in names[max(0, at - 1) : at + 1]]
    waits_since_s = [*beside[: at > 0], job.waits_since_s, *beside[at > 0 :]]
    if waits_since_s != sorted(waits_since_s):
        return False
    line[alike(job.wish)] = (*names[:at], job.job, *names[at:])
    return True


def who_ages_next(state: Sharing, at_s: float, ageing_s: float) -> Iterator[SharedJob]:
    """Of the line: of those that count as equally high by now, who waits for longest."""

    def level(name: JobId) -> int:
        return int(max(0.0, at_s - state.jobs[name].waits_since_s) // ageing_s)

    for names in state.line.values():
        at = 0
        while at < len(names):
            yield (job := state.jobs[names[at]])
            equal, at = -level(job.job), at + 1
            if job.ages_at_s(at_s, ageing_s) > at_s:  # else it is due by less than a float can say
                at = bisect_right(names, equal, lo=at, key=lambda name: -level(name))
