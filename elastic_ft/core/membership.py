"""The membership state machine: ``step(state, event, policy) -> (state, commands)``.

Pure: equal state and event give equal answers. The life of a job:

    starting ──form──> forming ──all resumed──> running ──loss, join, drain──> pausing ─┐
                          ^                                                             │
                          ├──────────────── enough workers, all paused ─────────────────┤
                          └── suspended <── fewer than min_workers ─────────────────────┘

``pausing`` opens a new generation, which fences every older one (I1): the survivors break off or
reach a step boundary and report what they hold. ``forming`` hands out the assignment. A second
failure in either just opens the next generation. Steps are committed here and only here (I4).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_ft.core import adoption, commits, failures, generations
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Member
from elastic_ft.core.keepers import keeper_holds, keeper_ready, stop_awaiting, unkept
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.measuring import note_experts, note_step
from elastic_ft.core.outages import REREAD, may_read_again
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import Uploads
from elastic_ft.core.restoring import no_way_on
from elastic_ft.core.standby import RELEASE, release, release_overdue
from elastic_ft.core.state import State, Turn
from elastic_ft.core.stragglers import judge_stragglers
from elastic_ft.core.words import are, were
from elastic_ft.core.world import (
    choose_world,
    has_joiners,
    joiners,
    wanted,
    why_not_resized,
    why_wait,
)


def step(state: State, event: ev.Event, policy: Policy) -> tuple[State, tuple[cmd.Command, ...]]:
    """Returns the next state and what is to be done about it."""
    if state.phase == "ended" and not isinstance(event, AFTER_THE_END):
        return state, ()
    turn = Turn(state, policy, event.at_s)
    handlers[type(event)](turn, event)
    settle(turn, before=state)
    return turn.state, tuple(turn.commands)


def settle(turn: Turn, before: State) -> None:
    """Whatever the event was: what ends a phase by itself ends it here, and nowhere else."""
    adoption.note_complete(turn)
    if turn.state.phase == "running" and before.phase == "forming":
        _follow_wishes(turn)
    if (
        turn.state.phase == "pausing"
        and generations.has_news(before, turn.state)
        and generations.have_paused(turn)
    ):
        generations.form(turn)


# -------------------------------------------------------------------------------------- who comes


def _job_started(turn: Turn, event: ev.JobStarted) -> None:
    committed = event.checkpoints[0].step if event.checkpoints else 0
    lineage = Lineage()
    for ref in sorted(event.checkpoints, key=lambda ref: ref.step):
        lineage = lineage.on(ref.generation, ref.step - 1)
    turn.set(checkpoints=event.checkpoints, committed=committed, generation=event.generation)
    turn.set(lineage=lineage)
    turn.set(started_at_s=event.at_s, uploads=Uploads(asked_at_s=event.at_s))
    if not event.checkpoints and event.recorded and not turn.policy.from_scratch:
        turn.set(committed=event.recorded)
        commits.finish(turn, "failed", no_way_on(event.recorded, "there is no checkpoint"))
        return
    start = (
        f"resuming from checkpoint {event.checkpoints[0].url}"
        if event.checkpoints
        else f"starting from {turn.policy.beginning}"
    )
    turn.journal("job_started", start, step=committed)
    spares = f" and {turn.policy.spares} spares" if turn.policy.spares else ""
    turn.do(cmd.WantWorkers(wanted(turn), f"max_workers{spares}"))
    turn.timer("start", turn.policy.start_timeout_s)


def _worker_ready(turn: Turn, event: ev.WorkerReady) -> None:
    state, member = turn.state, event.member
    if member.worker in state.ready or member.worker in state.gone:
        return
    turn.set(ready=state.ready.put(member.worker, member))
    note_experts(turn, event.experts)
    turn.journal("worker_ready", "up and warm", worker=member.worker, node=member.node)
    if keeper := state.keepers.get(member.node):
        turn.do(cmd.UseKeeper(member.worker, keeper))
    if member.node in state.draining:
        release(turn, member.worker, "its node is draining")
    elif state.phase == "starting":
        count = min(turn.count_not_leaving(), turn.workers_max)
        if count == turn.workers_max:
            generations.form_first(turn)
        elif count == turn.policy.min_workers:
            turn.timer("gather", turn.policy.gather_s)
    elif state.phase == "suspended":
        if turn.count_usable() >= turn.policy.min_workers and not isinstance(
            choose_world(turn), str
        ):
            generations.form_again(turn)
    elif state.phase == "running":
        _await_joiners(turn)


def _await_joiners(turn: Turn) -> None:
    """Joiners that come together join together, unless the world is full with them."""
    if turn.state.stopping or not has_joiners(turn):
        return
    if turn.count_usable() == turn.workers_max:
        _admit(turn)
    else:
        turn.timer("join", turn.policy.join_batch_s)


def _admit(turn: Turn) -> None:
    """Unless the gain is not worth the pause for now: then a little later."""
    coming = joiners(turn)
    if turn.state.stopping or not coming:
        return
    names = ", ".join(m.worker for m in coming)
    if why := why_wait(turn, len(turn.members) + len(coming)):
        if turn.state.deferred_at_s is None:
            delay_s = turn.policy.regrow_delay_max_s
            reason = f"{names}, ready to join, may wait up to {delay_s:g} s: {why}"
            turn.journal("join_deferred", reason, workers=[m.worker for m in coming])
            turn.set(deferred_at_s=turn.at_s)
            turn.timer("regrow", delay_s)
        return
    generations.pause(
        turn, "worker_joined", f"{names} {'joins' if len(coming) == 1 else 'join'}", abort=False
    )


def _resize_requested(turn: Turn, event: ev.ResizeRequested) -> None:
    fields = {"workers": event.workers, "request": event.request}
    if why := why_not_resized(turn, event):
        turn.journal("resize_refused", why, **fields)
        return
    turn.journal(
        "resize_requested", are(event.workers, "wanted"), before=turn.workers_max, **fields
    )
    turn.set(target=event.workers)
    turn.do(cmd.WantWorkers(wanted(turn), "resize"))
    phase = turn.state.phase
    if phase == "starting" and len(turn.usable()) == turn.workers_max:
        generations.form_first(turn)
    elif phase == "suspended" and not isinstance(choose_world(turn), str):
        generations.form_again(turn)
    elif phase == "running" and not _shrink(turn):
        _await_joiners(turn)


def _shrink(turn: Turn) -> bool:
    """To what was asked for, at the next boundary: nothing is lost."""
    before, after = len(turn.members), turn.workers_max
    if before <= after or turn.state.stopping:
        return False
    generations.pause(turn, "resized", f"{were(after, 'asked for')}, not {before}", abort=False)
    return True


# ----------------------------------------------------------------------------------- who is to go


def _node_draining(turn: Turn, event: ev.NodeDraining) -> None:
    state = turn.state
    if event.node in state.draining:
        return
    turn.set(draining={**state.draining, event.node: event.deadline_s})
    left_s = event.deadline_s - event.at_s
    turn.journal(
        "node_draining",
        f"{event.reason}; {left_s:.1f} s left",
        node=event.node,
        deadline_s=event.deadline_s,
    )
    for member in state.ready.values():
        if member.node == event.node and _newest_of(turn, member) < state.committed:
            release(turn, member.worker, "its node is draining")
    if state.phase == "running":
        _leave_draining(turn)


def _newest_of(turn: Turn, member: Member) -> int:
    """The last step of this history that it may hold something of; -1: it never had a part."""
    if member.worker in turn.state.ranks:
        return turn.state.committed
    if member.worker not in turn.state.benched:
        return -1
    last = turn.state.lineage.last_before(turn.state.benched[member.worker])
    return turn.state.committed if last is None else last


def _leave_draining(turn: Turn) -> bool:
    """Moves off draining nodes at the next boundary, if enough workers remain."""
    leaving = [m for m in turn.members if m.node in turn.state.draining]
    if not leaving:
        return False
    reason = ""
    if len(turn.staying()) < turn.policy.min_workers:
        reason = "leaving now would fall below min_workers: training on until the node goes"
    elif isinstance(world := choose_world(turn), str):
        reason = f"{world}: training on until the node goes"
    if reason:
        turn.journal("drain_deferred", reason, workers=[m.worker for m in leaving])
        return False
    names = ", ".join(m.worker for m in leaving)
    generations.pause(
        turn,
        "node_draining",
        f"{names} {'leaves' if len(leaving) == 1 else 'leave'} a draining node",
        abort=False,
    )
    return True


def _follow_wishes(turn: Turn) -> None:
    """A generation has formed: what was asked for meanwhile comes next."""
    if turn.state.stopping:
        _stop(turn)
    elif not _leave_draining(turn) and not _shrink(turn):
        _await_joiners(turn)


def _unkept(turn: Turn, event: ev.Unkept) -> None:
    unkept(turn, event)
    commits.commit_steps(turn)  # what waited for it


# ---------------------------------------------------------------------------- stragglers, the end


def _step_applied(turn: Turn, event: ev.StepApplied) -> None:
    commits.step_applied(turn, event)
    note_step(turn, event)
    state = turn.state
    first = state.ranks.get(event.worker) == 0  # once a step is often enough
    if state.phase != "running" or not first or not event.pace_s or state.stopping:
        return
    if why := judge_stragglers(turn):
        generations.pause(turn, "straggler_evicted", why, abort=False)


def _stop_requested(turn: Turn, event: ev.StopRequested) -> None:
    if turn.state.stopping:
        again = ", asked twice" if event.reason == turn.state.stopping else ""
        commits.finish(turn, "stopped", f"{event.reason}{again}; {turn.last_good()}")
        return
    turn.set(stopping=event.reason)
    turn.journal("stop_requested", event.reason)
    if turn.state.phase in ("starting", "suspended"):
        commits.finish(turn, "stopped", f"{event.reason}; {turn.last_good()}")
        return
    if turn.state.phase == "running":
        _stop(turn)
    turn.do(cmd.StartTimer("stop", 0, turn.policy.stop_timeout_s))


def _stop(turn: Turn) -> None:
    turn.do(cmd.StopAtBoundary(tuple(turn.live_members()), turn.state.stopping))


# -------------------------------------------------------------------------------------- deadlines


def _timer_fired(turn: Turn, event: ev.TimerFired) -> None:
    """Every wait ends here (I7). A timer of another generation or phase is stale."""
    name, _, whose = event.timer.partition(" ")
    if act := LASTING_TIMERS.get(name):
        act(turn, whose)
    elif event.generation == turn.state.generation and (name, turn.state.phase) in TIMERS:
        if left_s := adoption.respite_s(turn, name):
            turn.timer(name, left_s)
        else:
            TIMERS[name, turn.state.phase](turn)


def _stop_overdue(turn: Turn, _: str) -> None:
    reason = f"{turn.state.stopping}, not clean in time"
    commits.finish(turn, "stopped", f"{reason}; {turn.last_good()}")


def _read_again(turn: Turn, _: str) -> None:
    if may_read_again(turn) and turn.state.phase == "suspended":
        generations.form_again(turn)


def _gathered(turn: Turn) -> None:
    if len(turn.usable()) >= turn.policy.min_workers:
        generations.form_first(turn)


def _start_overdue(turn: Turn) -> None:
    usable, policy = len(turn.usable()), turn.policy
    if usable >= policy.min_workers:
        generations.form_first(turn)
        return
    reason = f"{usable} workers ready after {policy.start_timeout_s:g} s"
    unfit = f"; {turn.state.unfit_why}" if turn.state.unfit_why else ""
    commits.finish(turn, "failed", f"{reason}, min_workers is {policy.min_workers}{unfit}")


def _suspended_too_long(turn: Turn) -> None:
    usable, policy = len(turn.usable()), turn.policy
    reason = f"{usable} workers after {policy.suspend_timeout_s:g} s suspended"
    why = choose_world(turn)
    if usable < policy.min_workers or not isinstance(why, str):
        why = f"min_workers is {policy.min_workers}"
    commits.finish(turn, "suspended", f"{reason}, {why}; {turn.last_good()}")


# By name and the phase in which they count, of the present generation.
TIMERS: dict[tuple[str, str], Callable[[Turn], None]] = {
    ("start", "starting"): _start_overdue,
    ("gather", "starting"): _gathered,
    ("join", "running"): _admit,
    ("regrow", "running"): _admit,
    ("checkpoint", "running"): commits.ask_for_checkpoint,
    ("boundary", "pausing"): generations.boundary_overdue,
    ("pause", "pausing"): failures.pause_overdue,
    ("keeper", "pausing"): stop_awaiting,
    ("form", "forming"): generations.form_overdue,
    ("suspend", "suspended"): _suspended_too_long,
}
# Of whatever generation and phase, by the first word of their names; the others say whose.
LASTING_TIMERS: dict[str, Callable[[Turn, str], None]] = {
    "stop": _stop_overdue,
    RELEASE: release_overdue,
    commits.PUBLISH: commits.publish_overdue,
    REREAD: _read_again,
    adoption.RETURN: adoption.return_overdue,
}
# What the core has to say to, although there is nothing to decide any more.
AFTER_THE_END = (ev.ControllerChanged, ev.WorkerReturned)

handlers: dict[type, Callable[[Turn, Any], None]] = {
    ev.JobStarted: _job_started,
    ev.WorkerReady: _worker_ready,
    ev.WorkerLost: failures.worker_lost,
    ev.WorkerHung: failures.worker_hung,
    ev.NodeLost: failures.node_lost,
    ev.NodeDraining: _node_draining,
    ev.KeeperReady: keeper_ready,
    ev.KeeperReturned: adoption.keeper_returned,
    ev.KeeperLost: failures.keeper_lost,
    ev.KeeperHolds: keeper_holds,
    ev.Unkept: _unkept,
    ev.CollectiveFailed: generations.collective_failed,
    ev.NobodyMoves: generations.nobody_moves,
    ev.WorkerRaised: failures.worker_raised,
    ev.Paused: generations.paused,
    ev.Resumed: generations.resumed,
    ev.Restoring: generations.restoring,
    ev.SourceRefused: failures.source_refused,
    ev.StepApplied: _step_applied,
    ev.StepHeld: commits.step_held,
    ev.ShardsWritten: commits.shards_written,
    ev.ShardsFailed: commits.shards_failed,
    ev.CheckpointCommitted: commits.checkpoint_committed,
    ev.CheckpointFailed: commits.checkpoint_failed,
    ev.CheckpointDamaged: commits.checkpoint_damaged,
    ev.WorkerDone: commits.worker_done,
    ev.StopRequested: _stop_requested,
    ev.ResizeRequested: _resize_requested,
    ev.TimerFired: _timer_fired,
    ev.ControllerChanged: adoption.controller_changed,
    ev.WorkerReturned: adoption.worker_returned,
}
