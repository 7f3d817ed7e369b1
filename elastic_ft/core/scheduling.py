"""Sharing: ``decide(state, event, terms) -> (state, commands)``, for several jobs on one cluster.

Pure: equal state and event give equal answers, so a service that journals each event before it
tells it comes back to the same state by replaying them. Every command has its reason in words.
The life of a job here:

    queued ──room──> starting ──workers train──> running ──> completed | failed | stopped
       ^                │                           │
       └── its start    ├── others need its minimum ┤        stopping: someone asked for it
           failed       │   or its controller went  │
                        v                           v
                     suspended: checkpoint, release, wait; ──room──> starting

The rules are in the files of ``core.sharing``, see there: ``dealing`` has their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.admission import Admission
from elastic_ft.core.sharing.asks import SharingCommand, SharingEvent, SharingTerms
from elastic_ft.core.sharing.dealing import deal_slots
from elastic_ft.core.sharing.desk import Desk
from elastic_ft.core.sharing.ledger import (
    ENDED_KEPT,
    Bundles,
    SharedJob,
    Sharing,
    as_many,
    count,
    removed,
)
from elastic_ft.core.sharing.waiting_line import who_ages_next
from elastic_ft.core.table import Table
from elastic_ft.core.words import plural

BUNDLES_MAX = 4096  # workers for which the autoscaler is asked; who waits behind has its turn
ROUNDS_MAX = 64  # what is left to do after them waits for the next event
OfAStart = (
    asks.JobBegan
    | asks.StartFailed
    | asks.JobControllerLost
    | asks.WorkersReleased
    | asks.JobSuspended
)


def decide(
    state: Sharing, event: SharingEvent, terms: SharingTerms
) -> tuple[Sharing, tuple[SharingCommand, ...]]:
    """Returns the next state and what is to be done about it."""
    desk = Desk(state, terms, event.at_s)
    handlers[type(event)](desk, event)
    found = _deal_out(desk)
    asked = _ask_autoscaler(desk, found)
    lacks = state.lacks if state.lacks == found.lacks else Table(found.lacks)
    after = replace(desk.settled(), lacks=lacks, asked=asked)
    wake_at_s = _arm(desk, after)
    return replace(after, wake_at_s=wake_at_s), tuple(desk.commands)


def _deal_out(desk: Desk) -> Admission:
    """Until nothing is left to do: who started may have changed whose turn it is. Who gave way
    before its start was told is looked at once more then, and no third time: each kind of them
    takes two rounds a look."""
    looked_again = False
    for _ in range(ROUNDS_MAX):
        jobs, told = dict(desk.jobs.items()), len(desk.commands)
        desk.wakes.clear()
        found = deal_slots(desk)
        if len(desk.commands) == told and desk.jobs.is_as(jobs):
            if looked_again or not desk.barred:
                break
            desk.barred.clear()
            looked_again = True
    return found


# ------------------------------------------------------------------------------------ who comes


def _job_submitted(desk: Desk, event: asks.JobSubmitted) -> None:
    if why := refuses(desk.state, event, desk.terms):
        desk.do(asks.Refuse(event.job, why))
        return
    number = desk.state.submitted + 1
    desk.state = replace(desk.state, submitted=number)
    desk.jobs[event.job] = SharedJob(event.job, event.wish, number, waits_since_s=event.at_s)


def refuses(state: Sharing, event: asks.JobSubmitted, terms: SharingTerms) -> str:
    """Why not; empty if the job is welcome."""
    wish = event.wish
    if event.job in state.jobs or event.job in state.ended:
        return f"a job {event.job} has been submitted already"
    if min(wish.min_workers, wish.multiple_of, wish.slots_per_worker) < 1:
        return "min_workers, multiple_of and slots_per_worker are at least 1"
    if wish.least > wish.most:
        return (
            f"no multiple of {wish.multiple_of} lies between min_workers {wish.min_workers} "
            f"and max_workers {wish.max_workers}"
        )
    queue = terms.queues.get(wish.queue)
    if queue is None:
        return f"there is no queue {wish.queue:.100}, but: {', '.join(sorted(terms.queues))}"
    need = wish.least * wish.slots_per_worker
    if queue.ceiling is not None and need > queue.ceiling:
        return f"it needs {need} slots at least, queue {wish.queue} may use {queue.ceiling}"
    return ""


def _job_began(desk: Desk, event: asks.JobBegan) -> None:
    job = _told_by(desk, event)
    if job is not None and job.phase == "starting":
        desk.change(event.job, phase="running", failed_starts=0, ran=True)


def _told_by(desk: Desk, event: OfAStart) -> SharedJob | None:
    """The job, if this is of its last start."""
    job = desk.jobs.get(event.job)
    return job if job is not None and job.start == event.start else None


def _start_failed(desk: Desk, event: asks.StartFailed) -> None:
    job = _told_by(desk, event)
    if job is None or _was_to_end(desk, job):
        return
    failed = job.failed_starts + 1
    if failed >= desk.terms.starts_max:
        desk.do(asks.GiveUpJob(job.job, f"{failed} starts failed; the last: {event.reason}"))
        _end(desk, job, "failed")
        return
    job = desk.change(job.job, failed_starts=failed)
    _wait_again(desk, job, failed, f"a start failed: {event.reason}")


def _controller_lost(desk: Desk, event: asks.JobControllerLost) -> None:
    """At once where it had got further since the last time: it may have been its node's trouble."""
    job = _told_by(desk, event)
    if job is None or _was_to_end(desk, job):
        return
    losses = 1 if event.step > job.lost_at else job.losses + 1
    if losses >= desk.terms.starts_max:
        why = f"{losses} controllers were lost without a step in between"
        desk.do(asks.GiveUpJob(job.job, f"{why}; the last: {event.reason}"))
        _end(desk, job, "failed")
        return
    job = desk.change(job.job, losses=losses, lost_at=max(job.lost_at, event.step))
    _wait_again(desk, job, losses - 1, event.reason)


def _was_to_end(desk: Desk, job: SharedJob) -> bool:
    """It was to stop, or to be suspended: now it has."""
    if job.phase == "stopping":
        _end(desk, job, "stopped")
    elif not job.has_room:
        desk.change(job.job, held=(), leaving=(), releasing=False)
    return not job.has_room


def _wait_again(desk: Desk, job: SharedJob, failed: int, reason: str) -> None:
    """``failed``: times in a row for which it is to pause."""
    delay_s = desk.terms.retry_s * 2 ** (failed - 1) if failed else 0.0
    why = f"waits {delay_s:g} s: {reason}" if failed else f"to be started again: {reason}"
    desk.change(
        job.job,
        phase="suspended" if job.ran else "queued",
        target=0,
        held=(),
        leaving=(),
        waits_since_s=desk.at_s,
        first=True,
        behind=(),
        not_before_s=desk.at_s + delay_s,
        why=why,
    )
    desk.do(asks.Requeue(job.job, why))


def _priority_changed(desk: Desk, event: asks.PriorityChanged) -> None:
    job = desk.jobs.get(event.job)
    if job is None:
        desk.do(asks.Refuse(event.job, _unknown(desk, event.job)))
        return
    wish = replace(job.wish, priority=event.priority)
    rank = event.priority if job.has_room else job.rank
    desk.change(job.job, wish=wish, rank=rank)


def _resize_asked(desk: Desk, event: asks.ResizeAsked) -> None:
    job = desk.jobs.get(event.job)
    why = ""
    if job is None:
        why = _unknown(desk, event.job)
    elif event.workers % job.unit:
        why = f"{event.workers} is no multiple of {job.unit}"
    elif not job.least <= event.workers <= job.wish.most:
        why = f"{event.workers} is not within {job.least} and {job.wish.most}"
    if why:
        desk.do(asks.Refuse(event.job, why))
        return
    desk.change(event.job, cap=event.workers)


# ------------------------------------------------------------------------------------ what goes


def _workers_released(desk: Desk, event: asks.WorkersReleased) -> None:
    job = _told_by(desk, event)
    if job is not None:
        _released(desk, job, event.places)


def _released(desk: Desk, job: SharedJob, places: asks.Places) -> None:
    """A job may let others go than it was told: what it still has to release is as many."""
    held = removed(job.held, places)
    leaving = removed(job.leaving, places)
    more = max(0, count(held) - job.target)
    leaving = as_many((*leaving, *held), more) if job.has_room else held
    desk.change(job.job, held=held, leaving=leaving)


def _job_suspended(desk: Desk, event: asks.JobSuspended) -> None:
    job = _told_by(desk, event)
    if job is None:
        return
    if job.has_room:  # by itself: it had too few workers for too long, say
        job = desk.change(job.job, phase="suspended", target=0, waits_since_s=desk.at_s, first=True)
        desk.change(job.job, why="suspended by itself", behind=())
    desk.change(job.job, held=(), leaving=(), releasing=False)


def _job_ended(desk: Desk, event: asks.JobEnded) -> None:
    if (job := desk.jobs.get(event.job)) is not None:
        _end(desk, job, event.status)


def _end(desk: Desk, job: SharedJob, status: str) -> None:
    del desk.jobs[job.job]
    ended = desk.state.ended.put(job.job, status)
    if len(ended) > 2 * ENDED_KEPT:
        ended = Table(dict(list(ended.items())[ENDED_KEPT:]))
    desk.state = replace(desk.state, ended=ended)


def _stop_asked(desk: Desk, event: asks.StopAsked) -> None:
    job = desk.jobs.get(event.job)
    if job is None:
        desk.do(asks.Refuse(event.job, _unknown(desk, event.job)))
    elif job.phase == "stopping":
        return
    elif not job.has_room and not job.releasing:
        _end(desk, job, "stopped")
    else:
        desk.change(job.job, phase="stopping", target=0, leaving=job.held)
        desk.do(asks.StopJob(job.job, "somebody asked for it"))


def _unknown(desk: Desk, job: asks.JobId) -> str:
    how = desk.state.ended.get(job)
    return f"it has {how}" if how else f"there is no job {job}"


# --------------------------------------------------------------------------------------- nodes


def _capacity_changed(desk: Desk, event: asks.CapacityChanged) -> None:
    nodes = {node: slots for node, slots in event.nodes if slots > 0}
    desk.state = replace(desk.state, nodes=Table(nodes))
    for job in list(desk.jobs.values()):
        held = tuple(place for place in job.held if place[0] in nodes)
        if held == job.held:
            continue
        leaving = tuple(place for place in job.leaving if place[0] in nodes)
        target = job.target
        if job.has_room:  # what is below its minimum is owed: see ``SharedJob.owed``
            stays = job.floor(count(held) - count(leaving))
            target = min(job.target, max(job.least, stays))
            leaving = as_many((*leaving, *held), max(0, count(held) - target))
        lost = count(job.held) - count(held)
        desk.change(job.job, held=held, leaving=leaving, target=target)
        if job.has_room and target != job.target:
            desk.change(job.job, resized_at_s=desk.at_s)
            why = f"{plural(lost)} went with a lost node"
            told = removed(leaving, job.leaving)
            desk.do(asks.ResizeJob(job.job, target, why, less=told))


def _ticked(desk: Desk, event: asks.Ticked) -> None:
    """What is due is found by whoever watches it."""


def _ask_autoscaler(desk: Desk, found: Admission) -> Bundles:
    """What it is asked for: all minima together, those included that no room is found for. For it
    sizes a cluster for what it is told, whatever runs there. Nothing, if nothing is missing."""
    state = desk.state
    running = desk.running()
    asked: Bundles = ()
    if desk.terms.autoscaler and (found.blocked or any(job.owed for job in running)):
        sizes: Counter[int] = Counter()
        late = (job for job in found.grants if not desk.jobs[job.job].has_room)
        for job in (*running, *late, *found.later):
            sizes[job.slots] += job.least
        for kind, jobs in found.blocked.items():
            room = max(0, BUNDLES_MAX - sizes.total()) // kind.least
            sizes[kind.slots] += min(jobs, room) * kind.least
        asked = tuple(sorted(sizes.items()))
    if asked != state.asked:
        desk.do(asks.AskAutoscaler(asked, _why_asked(found) if asked else "nothing is missing"))
    return asked


def _why_asked(found: Admission) -> str:
    if not found.blocked:
        return "workers that went with a lost node have no room"
    jobs = sum(found.blocked.values())
    kind = next(iter(found.blocked))
    each = f"queue {kind.queue}, priority {kind.priority}, {plural(kind.least)}"
    return f"{jobs} job{'s' * (jobs != 1)} can't start without: the first of {each}"


# ---------------------------------------------------------------------------------------- time


def _arm(desk: Desk, after: Sharing) -> float | None:
    """When time alone may change something: a ``Ticked`` is due then."""
    ageing_s = desk.terms.ageing_s
    apart = (after.jobs[name] for name in after.apart)
    waits = [job for job in apart if job.phase in ("queued", "suspended")]
    for job in (*waits, *who_ages_next(after, desk.at_s, ageing_s)):
        desk.wake(job.not_before_s, f"{job.job} may be started again")
        desk.wake(job.ages_at_s(desk.at_s, ageing_s), f"{job.job} has waited long")
    at_s, reason = min(desk.wakes, default=(None, ""))
    armed = after.wake_at_s
    if at_s is not None and (armed is None or armed <= desk.at_s or at_s < armed):
        desk.do(asks.WakeAt(at_s, reason))
        return at_s
    return armed


handlers: dict[type[Any], Callable[[Desk, Any], None]] = {
    asks.JobSubmitted: _job_submitted,
    asks.JobBegan: _job_began,
    asks.StartFailed: _start_failed,
    asks.JobControllerLost: _controller_lost,
    asks.WorkersReleased: _workers_released,
    asks.JobSuspended: _job_suspended,
    asks.JobEnded: _job_ended,
    asks.CapacityChanged: _capacity_changed,
    asks.PriorityChanged: _priority_changed,
    asks.ResizeAsked: _resize_asked,
    asks.StopAsked: _stop_asked,
    asks.Ticked: _ticked,
}
