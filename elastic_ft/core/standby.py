"""Workers without a rank: who idles and keeps what it holds, and who leaves, when. Pure."""

from __future__ import annotations

from dataclasses import replace

from elastic_ft.core.assignment import Assignment, WorkerId
from elastic_ft.core.commands import Bench, KillWorker, ReleaseWorker, StartTimer
from elastic_ft.core.commits import abandon_attempts_of
from elastic_ft.core.keepers import await_report
from elastic_ft.core.state import Turn
from elastic_ft.core.words import are
from elastic_ft.core.world import surplus, wanted

RELEASE = "release"  # a timer; its name goes on with the worker that it is for


def release(turn: Turn, worker: WorkerId, reason: str) -> None:
    """It is to end by itself; a hung one would keep its place for good. What it leaves with its
    keeper is of use until those who stay hold a newer step."""
    turn.do(ReleaseWorker(worker, reason))
    if (member := turn.state.ready.get(worker)) is not None:
        await_report(turn, member.node, worker, turn.out_since(worker))
    turn.forget([worker])
    turn.set(releasing=turn.state.releasing | {worker})
    turn.do(StartTimer(f"{RELEASE} {worker}", 0, turn.policy.release_timeout_s))
    abandon_attempts_of(turn, [worker])


def release_overdue(turn: Turn, worker: WorkerId) -> None:
    if worker in turn.state.releasing:
        why = f"it was released and has not ended within {turn.policy.release_timeout_s:g} s"
        turn.journal("release_overdue", why, worker=worker)
        turn.do(KillWorker(worker, why))
        has_ended(turn, worker)


def has_ended(turn: Turn, worker: WorkerId) -> None:
    turn.set(releasing=turn.state.releasing - {worker})


def bench(turn: Turn, keep: set[WorkerId], step: int) -> dict[WorkerId, int]:
    """Members of before that have no rank now, and those benched already, with the generation since
    which each is. They need not keep later steps than the one restored. Donors are told once they
    have given."""
    state = turn.state
    before = [w for w in state.ranks if w in state.ready]
    idle = [w for w in (*before, *state.benched) if w not in keep]
    for worker in idle:
        turn.do(Bench(worker, state.generation, step))
    return {worker: state.benched.get(worker, state.generation) for worker in idle}


def dismiss(turn: Turn, assignment: Assignment) -> None:
    """The state is with the members: the others go where they are to, or idle until needed."""
    state, inside = turn.state, {m.worker for m in assignment.members}
    donors = {m.worker for m in assignment.donors}
    going = {m.worker: are(wanted(turn), "wanted") for m in surplus(turn, inside)}
    for member in state.ready.values():
        if member.worker not in inside and turn.is_leaving(member):
            going[member.worker] = state.leaving.get(member.worker, "its node is draining")
    for worker, why in going.items():
        given = "it has handed over its state; " if worker in donors else ""
        release(turn, worker, given + why)
    benched = dict(turn.state.benched)
    for donor in sorted(donors & turn.state.ready.keys()):
        turn.do(Bench(donor, assignment.generation, assignment.source.step))
        benched[donor] = assignment.generation
    turn.set(assignment=replace(assignment, donors=()), benched=benched)


def idle_in_words(idle: dict[WorkerId, str]) -> str:
    whose: dict[str, list[WorkerId]] = {}
    for worker, why in idle.items():
        whose.setdefault(why, []).append(worker)
    return "".join(f"; idle: {', '.join(some)} ({why})" for why, some in whose.items())
