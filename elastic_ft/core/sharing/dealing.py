"""After each event: who starts, gives, grows, waits. Its own outcome gives it nothing to do.

The order: owed workers are placed; minima are granted (``admission``); what that lacks is taken
from those who have most beyond their share; who can start starts, at once where room is free;
what is left over goes to who has least of its share, if it has not just been resized; and equals
give to equals only where more than one worker's difference lies between them.

A grant has two phases: capacity is counted at once, so that nobody else gets it, but a worker is
placed only where slots are free, and those of workers told to go are not until they are released.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from elastic_ft.core.sharing import admission
from elastic_ft.core.sharing.asks import JobId, Places, StartJob
from elastic_ft.core.sharing.desk import Desk, named
from elastic_ft.core.sharing.fair import ideal_shares
from elastic_ft.core.sharing.ledger import SharedJob, added, count, removed
from elastic_ft.core.sharing.rooms import Rooms
from elastic_ft.core.words import plural


def deal_slots(desk: Desk) -> admission.Admission:
    """Returns who was admitted, and why others wait."""
    rooms = desk.rooms()
    _place_owed(desk, rooms)
    found = _admit(desk, rooms)
    for name in desk.jobs.reserving - {job.job for job in found.grants}:
        desk.change(name, reserved=())
    for victim, beneficiary in found.victims.items():
        _suspend(desk, victim, beneficiary)
    grants = list(found.grants)
    counted = [*desk.running(), *grants]
    ideal = _ideal(desk, rooms, counted)
    _take(desk, rooms, grants, ideal)
    started = _start(desk, rooms, grants, found)
    late = [job for job in grants if job.job not in started]
    _grow(desk, rooms, started, late, ideal)
    _even_out(desk, rooms, late, ideal)
    for job in found.refused:
        if desk.jobs[job.job].why:  # by now it waits for what all of its kind wait for
            desk.change(job.job, why="")
    return found


def _place_owed(desk: Desk, rooms: Rooms) -> None:
    """Jobs that lost a node are made whole before anybody else gets anything."""
    owed = [job for job in desk.running() if job.owed]
    for job in sorted(owed, key=lambda job: (-job.rank, job.number)):
        placed = rooms.place(job, job.owed, _avoided(desk, job))
        if placed:
            why = f"{plural(count(placed))} in place of those that went with a lost node"
            job = desk.grow(job, job.target, placed, why)
        if job.owed and rooms.free_slots >= job.owed * job.slots and not _pending(desk):
            desk.suspend(job, "suspended: a node was lost, and free slots lie apart", True)


def _pending(desk: Desk) -> int:
    """Workers that are to go by what was told already."""
    return sum(count(job.leaving) for job in desk.jobs.values())


def _avoided(desk: Desk, job: SharedJob) -> frozenset[str]:
    """Nodes that are reserved for others."""
    others = desk.jobs.reserving - {job.job}
    return frozenset(node for other in others for node in desk.jobs[other].reserved)


def _admit(desk: Desk, rooms: Rooms) -> admission.Admission:
    slots, holds_ever = sum(rooms.slots.values()), functools.cache(rooms.holds_ever)
    return admission.admitted(desk.running(), desk.waiting(), slots, desk.terms, holds_ever)


def _suspend(desk: Desk, victim: JobId, beneficiary: JobId) -> None:
    job = desk.jobs[victim]
    if not beneficiary:
        desk.suspend(job, "suspended: the nodes that are left do not hold every minimum", True)
        return
    urgent = desk.jobs[beneficiary]
    what = f"suspended for {named([urgent])}, which waits for {plural(urgent.least)}"
    backfilled = beneficiary in job.behind
    why = f"{what}: it waited before this one started" if backfilled else what
    desk.suspend(job, why, not backfilled)


def _ideal(desk: Desk, rooms: Rooms, jobs: list[SharedJob]) -> dict[JobId, int]:
    used = dict.fromkeys(desk.terms.queues, 0)
    for job in jobs:
        used[job.wish.queue] += job.least * job.slots
    return ideal_shares(jobs, sum(rooms.slots.values()), desk.terms, used)


# ------------------------------------------------------------------------------ what others give


def _take(desk: Desk, rooms: Rooms, grants: list[SharedJob], ideal: dict[JobId, int]) -> None:
    """What the grants and those with a cap lack, from who has most beyond its share."""
    for job in desk.running():
        if job.target > job.most:
            why = f"{plural(job.most)} at most was asked for"
            desk.shrink(rooms, job, job.most, why)
    lacking = sum(job.target * job.slots for job in desk.running())
    lacking += sum(job.least * job.slots for job in grants) - sum(rooms.slots.values())
    _collect(desk, rooms, desk.running(), lacking, grants, ideal)
    for name, queue in desk.terms.queues.items():
        if queue.ceiling is None:
            continue
        inside = [job for job in desk.running() if job.wish.queue == name]
        mine = [job for job in grants if job.wish.queue == name]
        over = sum(job.target * job.slots for job in inside) - queue.ceiling
        over += sum(job.least * job.slots for job in mine)
        _collect(desk, rooms, inside, over, mine, ideal)


def _collect(
    desk: Desk,
    rooms: Rooms,
    donors: list[SharedJob],
    lacking: int,
    grants: list[SharedJob],
    ideal: dict[JobId, int],
) -> None:
    """Down to shares first, then to minima; lower priorities first; few give much."""
    ordered = sorted(
        donors, key=lambda job: (job.wish.priority, ideal[job.job] - job.target, -job.number)
    )
    floors = [(job, max(job.least, ideal[job.job])) for job in ordered]
    floors += [(job, job.least) for job in ordered]
    reach: dict[JobId, int] = {}
    for job, floor in floors:
        if lacking <= 0:
            break
        at = reach.get(job.job, job.target)
        step = job.unit * job.slots
        less = min(max(0, at - floor) // job.unit, -(-lacking // step)) * job.unit
        if less > 0:
            reach[job.job] = at - less
            lacking -= less * job.slots
    for name, workers in reach.items():
        job = desk.jobs[name]
        desk.shrink(rooms, job, workers, _gave(job.target - workers, grants))


def _gave(workers: int, grants: list[SharedJob]) -> str:
    if not grants:
        return f"gave up {plural(workers)}: fewer slots are there than were promised"
    waits = f"it waits for {grants[0].least}" if len(grants) == 1 else "they wait for their minima"
    kind = "job" if len(grants) == 1 else "jobs"
    return f"gave {plural(workers)} to {kind} {named(grants)}: {waits}"


# ----------------------------------------------------------------------------------- who starts


def _start(
    desk: Desk, rooms: Rooms, grants: list[SharedJob], found: admission.Admission
) -> dict[JobId, SharedJob]:
    """Those whose minimum fits into free slots now. ``_grow`` tells them, with what it adds."""
    started: dict[JobId, SharedJob] = {}
    releasing = _pending(desk)
    for job in grants:
        lack = "its workers are to be released by others first"
        placed: Places = ()
        if _fits_ceiling(desk, job, job.least):
            placed = rooms.place_all(job, job.least, _avoided(desk, job))
            if not placed and not releasing:
                lack = _reserve(desk, rooms, desk.jobs[job.job], started)
        if not placed:
            desk.change(job.job, why=f"waits for {plural(job.least)}: {lack}")
            continue
        rank = job.aged(desk.at_s, desk.terms.ageing_s)
        waited_s = job.waited_s + max(0.0, desk.at_s - job.waits_since_s)
        desk.unstarted[job.job] = desk.jobs[job.job]
        started[job.job] = desk.change(
            job.job,
            phase="starting",
            target=job.least,
            held=placed,
            leaving=(),
            resized_at_s=desk.at_s,
            waited_s=waited_s,
            rank=rank,
            behind=found.behind[job.job],
            start=job.start + 1,
            first=False,
            reserved=(),
            why="",
            not_before_s=0.0,
        )
    return started


def _fits_ceiling(desk: Desk, job: SharedJob, workers: int) -> bool:
    """Counting what its queue's workers take until they are released."""
    ceiling = desk.terms.queues[job.wish.queue].ceiling
    if ceiling is None:
        return True
    return desk.jobs.used_slots(job.wish.queue) + workers * job.slots <= ceiling


def _reserve(desk: Desk, rooms: Rooms, job: SharedJob, started: Collection[JobId]) -> str:
    """Slots enough are free, but not together: the nodes that are nearest to it are cleared.

    One job at a time; of a higher priority before another. Returns what it waits for.
    """
    reserving = sorted(map(desk.jobs.__getitem__, desk.jobs.reserving), key=lambda j: j.number)
    holder = reserving[0] if reserving else None
    if holder is not None and holder.job != job.job:
        if holder.wish.priority >= job.wish.priority:
            return f"free slots lie apart, and nodes are being cleared for {holder.job}"
        desk.change(holder.job, reserved=())
    if not job.reserved or any(node not in rooms.slots for node in job.reserved):
        job = desk.change(job.job, reserved=_nearest(desk, rooms, job))
    for other in desk.running():
        if other.job not in started:
            _clear(desk, other, job)
    return f"free slots lie apart: {', '.join(job.reserved[:4])} are being cleared for it"


def _nearest(desk: Desk, rooms: Rooms, job: SharedJob) -> tuple[str, ...]:
    """Nodes where it will fit: those first that hold least of who need not give way."""
    stay = dict.fromkeys(rooms.slots, 0)
    for other in desk.running():
        for node, workers in other.held:
            if node in stay and other.rank >= job.wish.priority:
                stay[node] += workers * other.slots
    order = sorted(rooms.slots, key=lambda node: (stay[node], -rooms.free[node], node))
    chosen, held = [], 0
    for node in order:
        if held >= job.least:
            break
        if room := rooms.slots[node] // job.slots:
            chosen.append(node)
            held += room
    return tuple(chosen)


def _clear(desk: Desk, other: SharedJob, job: SharedJob) -> None:
    """``other`` leaves the nodes reserved for ``job`` as far as its minimum lets it."""
    there = removed(other.held, other.leaving)
    there = tuple(place for place in there if place[0] in job.reserved)
    if not there:
        return
    keep = other.floor(other.target - count(there))
    why = f"cleared {there[0][0]} for {named([job])}: free slots lie apart"
    if keep >= other.least:
        more = other.target - keep - count(there)
        rest = removed(other.held, added(other.leaving, there))
        extra = tuple((node, min(n, more)) for node, n in rest[:1]) if more else ()
        if count(extra) == more:
            desk.shrink_at(other, keep, added(there, extra), why)
    elif job.wish.priority > other.rank:
        desk.suspend(other, f"suspended: {why}", True)


# ------------------------------------------------------------------------------------ who grows


def _grow(
    desk: Desk,
    rooms: Rooms,
    started: dict[JobId, SharedJob],
    late: list[SharedJob],
    ideal: dict[JobId, int],
) -> None:
    """What nobody's minimum needs, to who has least of its share; started jobs are told."""
    spare = _spare(desk, rooms, late)
    candidates = [job for job in desk.running() if not job.leaving and not job.owed]
    candidates.sort(key=lambda job: (-job.wish.priority, job.target / ideal[job.job], job.number))
    for job in candidates:
        lack = min(ideal[job.job] - job.target, job.floor(max(0, spare) // job.slots))
        cool = job.job in started or desk.is_cool(job)
        if lack > 0 and not cool:
            desk.wake(job.resized_at_s + desk.terms.cooldown_s, f"{job.job} may grow")
        placed = _placed(desk, rooms, job, lack) if lack > 0 and cool else ()
        spare -= count(placed) * job.slots
        if job.job in started:
            _tell_start(desk, desk.jobs[job.job], added(job.held, placed))
        elif placed:
            more = plural(count(placed))
            why = f"{more} more: nobody's minimum needs them, and its share is {ideal[job.job]}"
            desk.grow(job, job.target + count(placed), placed, why)


def _spare(desk: Desk, rooms: Rooms, late: list[SharedJob]) -> int:
    promised = sum(job.target * job.slots for job in desk.running())
    promised += sum(job.least * job.slots for job in late)
    return sum(rooms.slots.values()) - promised


def _placed(desk: Desk, rooms: Rooms, job: SharedJob, workers: int) -> Places:
    """As many multiples as fit into free slots and under its queue's ceiling."""
    while workers > 0 and not _fits_ceiling(desk, job, workers):
        workers -= job.unit
    placed = rooms.place(job, workers, _avoided(desk, job))
    over = count(placed) - job.floor(count(placed))
    while over:
        node, here = placed[-1]
        back = ((node, min(here, over)),)
        rooms.take_back(job, back)
        placed = removed(placed, back)
        over -= count(back)
    return placed


def _tell_start(desk: Desk, job: SharedJob, places: Places) -> None:
    workers = count(places)
    desk.change(job.job, target=workers, held=places)
    waited_s = max(0.0, desk.at_s - job.waits_since_s)  # a clock may have been set back
    behind = f", while {job.behind[0]} waits for more than is free" if job.behind else ""
    why = f"{plural(workers)} after {waited_s:.0f} s of waiting{behind}"
    desk.do(StartJob(job.job, job.start, places, why))


def _even_out(desk: Desk, rooms: Rooms, late: list[SharedJob], ideal: dict[JobId, int]) -> None:
    """Who has more than its share gives to who lacks more than one unit of its own."""
    poor = [
        job
        for job in desk.running()
        if ideal[job.job] - job.target >= 2 * job.unit and not job.leaving
    ]
    for job in poor:
        if not desk.is_cool(job):
            desk.wake(job.resized_at_s + desk.terms.cooldown_s, f"{job.job} may grow")
    poor = [job for job in poor if desk.is_cool(job)]
    lacking = sum((ideal[job.job] - job.target) * job.slots for job in poor)
    lacking -= max(0, _spare(desk, rooms, late))
    if lacking <= 0:
        return
    highest = max(job.wish.priority for job in poor)
    for job in sorted(desk.running(), key=lambda job: (job.wish.priority, -job.number)):
        over = job.target - ideal[job.job]
        if lacking <= 0:
            return
        if over < job.unit or job.leaving or job.owed:
            continue
        if job.wish.priority >= highest and not desk.is_cool(job):
            desk.wake(job.resized_at_s + desk.terms.cooldown_s, f"{job.job} may give")
            continue
        less = min(over // job.unit, -(-lacking // (job.unit * job.slots))) * job.unit
        why = f"gave {plural(less)} to {named(poor)}: its share is {ideal[job.job]} now"
        desk.shrink(rooms, job, job.target - less, why)
        lacking -= less * job.slots
