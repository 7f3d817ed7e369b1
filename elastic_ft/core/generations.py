"""How a generation ends and the next one begins: pausing, forming, formed; or suspended.

``pausing`` opens a new generation, which fences every older one (I1); ``forming`` hands out its
assignment. ``membership.settle`` asks after every event whether all have paused. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Assignment, NodeId, Source, Tier, WorkerId
from elastic_ft.core.blame import (
    begin_to_count,
    blame_joiners,
    count_end,
    count_losses,
    explain_break,
)
from elastic_ft.core.buddies import choose_buddies
from elastic_ft.core.commits import abandon_void_attempts, await_checkpoint, commit_steps, finish
from elastic_ft.core.deadlines import form_s
from elastic_ft.core.keepers import forget_void, look_again
from elastic_ft.core.measuring import learn_rate, restart_paces
from elastic_ft.core.outages import suspend_reading, waits_for_store
from elastic_ft.core.records import Episode
from elastic_ft.core.recoveries import close_episode
from elastic_ft.core.restoring import (
    choose_source,
    count_redone,
    held_by,
    is_worth_waiting,
    lineage_of,
    needed_donors,
    no_way_on,
    pending_after_restore,
    recent_writers,
    roll_back,
)
from elastic_ft.core.standby import bench, dismiss, idle_in_words, release
from elastic_ft.core.state import State, Turn, is_current
from elastic_ft.core.table import Table
from elastic_ft.core.world import World, choose_world, deal_experts, why_idle

# ----------------------------------------------------------------------------------- how one ends


def pause(
    turn: Turn,
    cause: str,
    reason: str,
    *,
    abort: bool,
    noticed_s: float = 0.0,
    nodes: Iterable[NodeId] = (),
    counts: bool = True,
) -> None:
    """Opens the next generation: fence the running one and collect what the survivors hold.

    ``nodes``: where somebody was lost, if that is why. ``counts``: as a failure, if it is broken
    off; what is meant does not.
    """
    begin_to_count(turn)
    if abort and counts and not count_end(turn, cause, reason, nodes):
        return
    state = turn.state
    if state.episode is None and state.assignment is not None:
        episode = Episode(cause, turn.at_s, noticed_s, state.assignment, reason=reason)
        turn.set(episode=episode)
    workers = tuple(turn.holders())
    turn.set(phase="pausing", generation=turn.next_generation(), abort=abort)
    turn.set(asked=workers, answered=0, paused=Table())
    if workers:
        turn.do(cmd.PauseWorkers(turn.state.generation, workers, abort, reason))
    if abort:
        turn.timer("pause", turn.policy.pause_timeout_s)
    else:
        turn.timer("boundary", turn.policy.boundary_timeout_s)


def escalate(turn: Turn, reason: str) -> None:
    """A planned pause can't wait for the boundary any longer: break collectives off."""
    turn.set(abort=True)
    workers = tuple(w for w in turn.holders() if w not in turn.state.paused)
    if workers:
        turn.do(cmd.PauseWorkers(turn.state.generation, workers, True, reason))
    turn.timer("pause", turn.policy.pause_timeout_s)


def _break_off(turn: Turn, cause: str, why: str) -> None:
    """On the way to a boundary: it is no planned end any more."""
    if count_end(turn, cause, why):
        escalate(turn, why)


def explain_ending(turn: Turn, why: str, nodes: Iterable[NodeId]) -> None:
    """Meanwhile somebody was lost on ``nodes``, who may be why the generation broke."""
    explain_break(turn)
    if count_losses(turn, nodes, why) and not turn.state.abort:
        escalate(turn, why)


def collective_failed(turn: Turn, event: ev.CollectiveFailed) -> None:
    if is_current(turn, event.worker, event.generation):
        _give_up_group(turn, f"{event.worker} saw its group break: {event.error}")


def nobody_moves(turn: Turn, event: ev.NobodyMoves) -> None:
    """Whoever then fails to reach its safe point is the one."""
    assignment = turn.state.assignment
    if assignment is not None and event.generation == assignment.generation:
        _give_up_group(turn, event.reason)


def _give_up_group(turn: Turn, reason: str) -> None:
    if turn.state.phase in ("running", "forming"):
        pause(turn, "collective_failed", reason, abort=True)
    elif turn.state.phase == "pausing" and not turn.state.abort:
        _break_off(turn, "collective_failed", reason)


def who_is_late(turn: Turn) -> list[WorkerId]:
    return [w for w in turn.holders() if w not in turn.state.paused]


def boundary_overdue(turn: Turn) -> None:
    late = who_is_late(turn)
    if late and not turn.state.abort:
        reason = f"{', '.join(late)} reached no step boundary in time"
        _break_off(turn, "boundary_overdue", reason)


def paused(turn: Turn, event: ev.Paused) -> None:
    state = turn.state
    if event.generation != state.generation or state.phase != "pausing":
        return
    if event.worker not in state.ready:
        return
    turn.set(paused=state.paused.put(event.worker, event.holdings))


# ------------------------------------------------------------------------ whether all have paused


def has_news(before: State, now: State) -> bool:
    """Whether something has come that forming may wait for: an answer, an end, what a keeper has,
    the outcome of a checkpoint. To look at all there is takes long in a large world."""
    return (
        before.phase != "pausing"
        or before.paused is not now.paused
        or before.adoption is not now.adoption
        or len(before.ready) > len(now.ready)
        or len(before.keepers) > len(now.keepers)
        or (
            before.uploads is not now.uploads
            and bool(before.uploads.being_published - now.uploads.being_published)
        )
        or before.checkpoints is not now.checkpoints
        or (
            now.left.lacking is None
            and (before.left.lacking is not None or len(before.left.shards) < len(now.left.shards))
        )
    )


def have_paused(turn: Turn) -> bool:
    """Whether all holders are at a safe point, or gone; and who is ready has called the controller,
    where that has changed: nobody else can be told of what is formed.

    They only become fewer in a pause, and none takes its answer back: those at the front of
    ``asked`` that are dealt with are looked at once. Who is asked last often answers last.
    """
    state = turn.state
    first, asked, paused, ready = state.answered, state.asked, state.paused, state.ready
    if asked and asked[-1] not in paused and asked[-1] in ready:
        return False
    while first < len(asked) and (asked[first] in paused or asked[first] not in ready):
        first += 1
    if first != state.answered:
        turn.set(answered=first)
    is_known = state.adoption is None or not state.adoption.workers
    return first == len(asked) and is_known


# --------------------------------------------------------------------------------- how one begins


def form_first(turn: Turn) -> None:
    """Nobody has anything to break off: all are paused, as it were."""
    turn.set(generation=turn.next_generation(), phase="pausing")


def form_again(turn: Turn) -> None:
    """Leaves suspension: a generation of its own, as everyone is paused in an older one."""
    if not waits_for_store(turn):  # else its timer says when
        turn.set(generation=turn.next_generation(), phase="pausing")


def form(turn: Turn) -> None:
    """Everyone alive is paused: lays out the next world, or waits for more workers."""
    look_again(turn)
    if not blame_joiners(turn):
        return
    learn_rate(turn)
    world = choose_world(turn)
    if isinstance(world, str):
        _suspend(turn, world)
        return
    source, why = choose_source(turn)
    if _must_wait(turn, source, why):
        return
    if source.step < turn.state.committed:
        roll_back(turn, source.step, why)
    count_redone(turn, source.step)
    _begin(turn, deal_experts(turn, world, source), source, why)


def _must_wait(turn: Turn, source: Source, why: str) -> bool:
    """Whether nothing forms from ``source`` by now: it is waited, or the job has ended."""
    state = turn.state
    if source.step < state.committed and is_worth_waiting(turn, source.step):
        return True
    if source.step < state.committed and source.step < state.uploads.unsettled_step:
        reason = (
            f"the checkpoint of step {state.uploads.unsettled_step} may yet be published, and {why}"
        )
        finish(turn, "suspended", f"{reason}; {turn.last_good()}")
        return True
    if source.tier is Tier.INITIAL and state.committed and not turn.policy.from_scratch:
        broke = state.episode.reason if state.episode else ""
        finish(turn, "failed", no_way_on(state.committed, why, broke))
        return True
    if waits_for_store(turn, source):
        suspend_reading(turn)
        return True
    return False


def _begin(turn: Turn, world: World, source: Source, why: str) -> None:
    state, members = turn.state, world.members
    donors = tuple(needed_donors(turn, members, source.holders.values()))
    keep = {m.worker for m in (*members, *donors)}
    assignment = Assignment(
        generation=state.generation,
        members=members,
        donors=donors,
        layout=world.layout,
        source=held_by(source, keep),
        buddies=choose_buddies(members, world.layout, turn.policy.copies),
        reason=f"{world.why}; {why}",
        keepers=tuple(keeper for _, keeper in sorted(state.keepers.items())),
    )
    for member in state.ready.values():
        if member.worker not in keep and member.node in state.draining:
            release(turn, member.worker, "its node is draining")
    _tell_formed_by_its_state(turn, source)
    writers = recent_writers(turn, assignment)
    abandon_void_attempts(turn, writers)
    turn.set(lineage=lineage_of(turn, source).on(state.generation, source.step))
    turn.set(
        phase="forming",
        assignment=assignment,
        ranks={m.worker: rank for rank, m in enumerate(members)},
        resumed=0,
        done=0,
        idle=why_idle(turn, world),
        benched=bench(turn, keep, source.step),
        deferred_at_s=None,
        bytes_moved=0,
        bytes_come=False,
        writers=writers,
        pending=pending_after_restore(turn, assignment),
    )
    restart_paces(turn)
    forget_void(turn)
    turn.do(cmd.FormGeneration(assignment))
    turn.timer("form", _form_timeout_s(turn))


def _suspend(turn: Turn, why: str) -> None:
    workers, needed = len(turn.usable()), turn.policy.min_workers
    more = str(needed - workers) if workers < needed else ""
    reason = (
        f"{why}; it waits up to {turn.policy.suspend_timeout_s:g} s for {more or 'some'} more; "
        f"{turn.last_good()}"
    )
    if turn.state.phase != "suspended":
        turn.journal("suspended", reason, workers=workers, min_workers=needed)
        turn.timer("suspend", turn.policy.suspend_timeout_s)
    turn.set(phase="suspended")


# -------------------------------------------------------------------------------- how it comes up


def restoring(turn: Turn, event: ev.Restoring) -> None:
    is_now = event.generation == turn.state.generation and turn.state.phase == "forming"
    if is_now and turn.takes_part(event.worker):
        turn.set(bytes_come=True)


def form_overdue(turn: Turn) -> None:
    """However large the state and slow the store, forming is not given up while bytes come."""
    timeout_s = _form_timeout_s(turn)
    if turn.state.bytes_come:
        turn.set(bytes_come=False)
        turn.timer("form", timeout_s)
        return
    reason = f"not formed within {timeout_s:g} s, in which no byte of its state came"
    pause(turn, "form_timeout", reason, abort=True)


def _form_timeout_s(turn: Turn) -> float:
    """For as many as take part, not for as many as might."""
    assignment = turn.state.assignment
    parts = 0 if assignment is None else len(assignment.members) + len(assignment.donors)
    return form_s(turn.policy.form_timeout_s, parts)


def resumed(turn: Turn, event: ev.Resumed) -> None:
    state = turn.state
    rank, assignment = state.ranks.get(event.worker), state.assignment
    if rank is None or assignment is None or event.generation != assignment.generation:
        return
    if state.phase != "forming" and not (state.phase == "pausing" and state.adoption is not None):
        return
    if state.resumed == turn.everyone():
        return
    turn.set(resumed=state.resumed | 1 << rank)
    turn.set(bytes_moved=state.bytes_moved + event.bytes_received)
    if turn.state.resumed != turn.everyone():
        return
    if state.phase == "forming":
        _formed(turn)
    else:  # all had resumed, as is told now, when the controller went and it was given up
        _tell_formed(turn, assignment)


def _formed(turn: Turn) -> None:
    state = turn.state
    assignment = state.assignment
    assert assignment is not None
    # A worker drops what it finds damaged: what it holds of the same step from now on is new.
    refused = frozenset(entry for entry in state.refused if entry[0] not in state.ready)
    turn.set(phase="running", refused=refused, outage=None, unreached={})
    dismiss(turn, assignment)
    _tell_formed(turn, assignment)
    close_episode(turn, assignment)
    await_checkpoint(turn)
    commit_steps(turn)


def _tell_formed_by_its_state(turn: Turn, source: Source) -> None:
    """A step takes all members: where one was made, they had formed, whoever lived to say so."""
    former = turn.state.assignment
    if former is None or turn.state.resumed == turn.everyone():
        return
    if source.generation == former.generation and source.step > former.source.step:
        _tell_formed(turn, former)


def _tell_formed(turn: Turn, assignment: Assignment) -> None:
    members = [
        {"worker": m.worker, "rank": rank, "pid": m.pid, "node": m.node, "host": m.host}
        | {"raylet_pid": m.raylet_pid, "domain": m.domain}
        for rank, m in enumerate(assignment.members)
    ]
    idle = {worker: why for worker, why in turn.state.idle.items() if worker in turn.state.ready}
    fields = {
        "step": assignment.source.step,
        "layout": str(assignment.layout),
        "world_size": len(members),
        "wanted": turn.workers_max,
        "idle": [{"worker": worker, "reason": why} for worker, why in idle.items()],
        "source": str(assignment.source.tier),
        "members": members,
        "buddies": list(assignment.buddies),
    }
    reason = assignment.reason + idle_in_words(idle)
    turn.do(cmd.Journal("generation_formed", assignment.generation, reason, fields))
