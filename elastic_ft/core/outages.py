"""A source, or the folder of frozen weights, that can't be read: nothing is given up for that.

A store is tried again, after growing pauses, until ``suspend_timeout_s`` has passed; a keeper a few
times at once: if it has ended, or hangs, that is known soon. A worker that alone can't read what
others can is left out. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ft.core.assignment import Source, WorkerId
from elastic_ft.core.commands import StartTimer
from elastic_ft.core.commits import finish
from elastic_ft.core.events import SourceRefused
from elastic_ft.core.records import Outage, Unreached
from elastic_ft.core.state import Turn
from elastic_ft.core.world import choose_world

REREAD = "reread"  # a timer, of whatever generation
REREAD_MIN_S, REREAD_MAX_S = 1.0, 30.0
BLAMED_MAX = 3  # times in a row that a worker alone can't read: before, it may be chance
ASKED_MAX = 3  # times that a keeper is asked


def note_unread(turn: Turn, event: SourceRefused) -> bool:
    """A generation could not read its source. Returns False if that is known already."""
    state, old = turn.state, turn.state.outage
    assert state.assignment is not None
    generation = state.assignment.generation
    if old is None:
        old = Outage(turn.at_s, "", generation, tries=0)
    elif old.generation == generation:
        return False
    blamed = {worker: old.blamed.get(worker, 0) + 1 for worker in event.unread_by}
    turn.set(
        outage=replace(
            old,
            why=event.reason,
            generation=generation,
            tries=old.tries + 1,
            waiting=True,
            blamed=blamed,
            frozen=not event.holder,
        )
    )
    past_s = turn.at_s - old.since_s
    if _leave_out(turn, event.reason):
        return True
    left_s = turn.policy.suspend_timeout_s - past_s
    if left_s <= 0:
        reason = f"the store has been unreadable for {past_s:.0f} s: {event.reason}"
        finish(turn, "suspended", f"{reason}; {turn.last_good()}")
        return True
    again_s = min(REREAD_MIN_S * 2 ** min(old.tries, 10), REREAD_MAX_S, left_s)
    step, fields = state.assignment.source.step, {"url": event.holder, "tries": old.tries + 1}
    reason = f"{event.reason}; tried again in {again_s:g} s"
    turn.journal("source_unreadable", reason, step=step, again_s=again_s, **fields)
    turn.do(StartTimer(REREAD, 0, again_s))
    return True


def _leave_out(turn: Turn, why: str) -> bool:
    """Whether the world goes on without those who alone can't read the store."""
    outage = turn.state.outage
    assert outage is not None
    bad = sorted(worker for worker, times in outage.blamed.items() if times >= BLAMED_MAX)
    if not bad or outage.left_out:
        return False
    if not _do_without(turn, bad, f"it can't read the store, and others can: {why}"):
        return False
    turn.set(outage=replace(outage, waiting=False, left_out=True))
    return True


def _do_without(turn: Turn, bad: list[WorkerId], reason: str) -> bool:
    """Whether there is a world without them: they leave once it has formed."""
    leaving = turn.state.leaving
    turn.set(leaving={**leaving, **dict.fromkeys(bad, reason)})
    world = choose_world(turn)
    if isinstance(world, str) or {m.worker for m in world.members} & set(bad):
        turn.set(leaving=leaving)
        return False
    for worker in bad:
        turn.journal("worker_left_out", reason, worker=worker, node=_node_of(turn, worker))
    return True


def note_unreached(turn: Turn, event: SourceRefused) -> bool:
    """A generation could not ask a keeper. Returns False if that is known already.

    It is asked again, unless somebody else has the same; in the end it is given up for the next
    source.
    """
    state = turn.state
    assert state.assignment is not None
    step, generation = state.assignment.source.step, state.assignment.generation
    entry = (event.holder, step, "")
    alone = frozenset(event.unread_by)
    old = state.unreached.get(entry)
    if old is not None and old.generation == generation:
        return False
    tries = 1 if old is None else old.tries + 1
    alone = alone if old is None else alone & old.alone
    others = {known: tried for known, tried in state.unreached.items() if known != entry}
    fields = {"step": step, "holder": event.holder, "tries": tries}
    if tries < ASKED_MAX:
        turn.set(unreached={**others, entry: Unreached(generation, tries, alone)})
        turn.journal("source_unreadable", f"{event.reason}; it is asked again", **fields)
        return True
    turn.set(unreached=others)
    bad = sorted(alone - state.leaving.keys())
    reason = f"it can't reach a keeper, and others can: {event.reason}"
    if not bad or not _do_without(turn, bad, reason):
        turn.set(refused=state.refused | {entry})
        turn.journal("source_refused", f"{event.reason}; {tries} times in a row", **fields)
    return True


def _node_of(turn: Turn, worker: WorkerId) -> str:
    return turn.state.ready[worker].node if worker in turn.state.ready else ""


def waits_for_store(turn: Turn, source: Source | None = None) -> bool:
    """Whether ``source``, if it is given, is not to be read before the timer. What is in memory
    needs no store, but for frozen weights that nobody has."""
    outage = turn.state.outage
    if outage is None or not outage.waiting:
        return False
    return source is None or bool(source.url) or outage.frozen


def suspend_reading(turn: Turn) -> None:
    outage = turn.state.outage
    assert outage is not None
    turn.set(phase="suspended")
    if outage.said:
        return
    turn.set(outage=replace(outage, said=True))
    reason = (
        f"the store can't be read: {outage.why}: tried again for up to "
        f"{turn.policy.suspend_timeout_s:g} s; {turn.last_good()}"
    )
    workers, needed = len(turn.usable()), turn.policy.min_workers
    turn.journal("suspended", reason, workers=workers, min_workers=needed)


def may_read_again(turn: Turn) -> bool:
    """The timer has fired. False if nobody waits for it."""
    outage = turn.state.outage
    if outage is None or not outage.waiting:
        return False
    turn.set(outage=replace(outage, waiting=False))
    return True
