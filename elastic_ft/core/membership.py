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

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from elastic_ft.core.blame import (
    blame_joiners,
    count_end,
    count_losses,
    explain_break,
    forget_losses,
)
from elastic_ft.core.buddies import choose_buddies
from elastic_ft.core.commits import (
    PUBLISH,
    abandon_attempts_of,
    abandon_void_attempts,
    ask_for_checkpoint,
    await_checkpoint,
    checkpoint_committed,
    checkpoint_damaged,
    checkpoint_failed,
    commit_steps,
    finish,
    publish_overdue,
    shards_failed,
    shards_written,
    step_applied,
    step_held,
    worker_done,
)
from elastic_ft.core.events import (
    EVERYONES,
    ITS_DEVICE,
    UNREACHABLE,
    Assignment,
    CheckpointCommitted,
    CheckpointDamaged,
    CheckpointFailed,
    CollectiveFailed,
    Command,
    Event,
    FormGeneration,
    JobStarted,
    KeeperHolds,
    KeeperLost,
    KeeperReady,
    KillWorker,
    Member,
    NodeDraining,
    NodeId,
    NodeLost,
    Paused,
    PauseWorkers,
    ResizeRequested,
    Restoring,
    Resumed,
    ShardsFailed,
    ShardsWritten,
    Source,
    SourceRefused,
    StartTimer,
    StepApplied,
    StepHeld,
    StopAtBoundary,
    StopRequested,
    Tier,
    TimerFired,
    Unkept,
    UseKeeper,
    WantWorkers,
    WorkerDone,
    WorkerHung,
    WorkerId,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.outages import (
    REREAD,
    may_read_again,
    note_unreached,
    note_unread,
    suspend_reading,
    waits_for_store,
)
from elastic_ft.core.policy import Policy
from elastic_ft.core.recoveries import blame_node, close_episode, note_lost
from elastic_ft.core.refusals import is_its_own, lose_device, refuse
from elastic_ft.core.restoring import (
    choose_source,
    count_redone,
    forget_keeper,
    forget_void,
    held_by,
    is_worth_waiting,
    keeper_holds,
    keeper_ready,
    needed_donors,
    no_way_on,
    pending_after_restore,
    reads_from,
    recent_writers,
    roll_back,
    stop_awaiting,
    unkept,
)
from elastic_ft.core.standby import (
    RELEASE,
    bench,
    dismiss,
    has_ended,
    idle_in_words,
    release,
    release_overdue,
)
from elastic_ft.core.state import Episode, State, Turn, is_current
from elastic_ft.core.stragglers import judge
from elastic_ft.core.table import Table
from elastic_ft.core.world import (
    choose_world,
    has_joiners,
    joiners,
    learn_rate,
    note_step,
    refuses,
    wanted,
    why_idle,
    why_wait,
)


def step(state: State, event: Event, policy: Policy) -> tuple[State, tuple[Command, ...]]:
    """Returns the next state and what is to be done about it."""
    if state.phase == "ended":
        return state, ()
    turn = Turn(state, policy, event.at_s)
    handlers[type(event)](turn, event)
    settle(turn, before=state)
    return turn.state, tuple(turn.commands)


def settle(turn: Turn, before: State) -> None:
    """Whatever the event was: what ends a phase by itself ends it here, and nowhere else."""
    if turn.state.phase == "running" and before.phase == "forming":
        _follow_wishes(turn)
    if turn.state.phase == "pausing" and _has_news(before, turn.state) and _have_paused(turn):
        _form(turn)


def _has_news(before: State, now: State) -> bool:
    """Whether something has come that forming may wait for: an answer, an end, what a keeper has,
    the outcome of a checkpoint. To look at all there is takes long in a large world."""
    return (
        before.phase != "pausing"
        or before.paused is not now.paused
        or len(before.ready) > len(now.ready)
        or len(before.keepers) > len(now.keepers)
        or before.closed is not now.closed
        or before.checkpoints is not now.checkpoints
        or (
            now.lacking is None and (before.lacking is not None or len(before.left) < len(now.left))
        )
    )


def _have_paused(turn: Turn) -> bool:
    """Whether all holders are at a safe point, or gone.

    They only become fewer in a pause, and none takes its answer back: those at the front of
    ``asked`` that are dealt with are looked at once.
    """
    state = turn.state
    first, asked, paused, ready = state.answered, state.asked, state.paused, state.ready
    while first < len(asked) and (asked[first] in paused or asked[first] not in ready):
        first += 1
    turn.set(answered=first)
    return first == len(asked)


# -------------------------------------------------------------------- opening a generation


def _pause(
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
    turn.set(charged=frozenset(), broke="")
    if abort and counts and not count_end(turn, cause, reason, nodes):
        return
    state = turn.state
    if state.episode is None and state.assignment is not None:
        episode = Episode(cause, turn.at_s, noticed_s, state.assignment)
        turn.set(episode=episode)
    workers = tuple(turn.holders())
    turn.set(phase="pausing", generation=state.generation + 1, abort=abort)
    turn.set(asked=workers, answered=0, paused=Table())
    if workers:
        turn.do(PauseWorkers(turn.state.generation, workers, abort, reason))
    if abort:
        turn.timer("pause", turn.policy.pause_timeout_s)
    else:
        turn.timer("boundary", turn.policy.boundary_timeout_s)


def _escalate(turn: Turn, reason: str) -> None:
    """A planned pause can't wait for the boundary any longer: break collectives off."""
    turn.set(abort=True)
    workers = tuple(w for w in turn.holders() if w not in turn.state.paused)
    if workers:
        turn.do(PauseWorkers(turn.state.generation, workers, True, reason))
    turn.timer("pause", turn.policy.pause_timeout_s)


def _break_off(turn: Turn, cause: str, why: str) -> None:
    """On the way to a boundary: it is no planned end any more."""
    if count_end(turn, cause, why):
        _escalate(turn, why)


def _explain(turn: Turn, why: str, nodes: Iterable[NodeId]) -> None:
    """Meanwhile somebody was lost on ``nodes``, who may be why the generation broke."""
    explain_break(turn)
    if count_losses(turn, nodes, why) and not turn.state.abort:
        _escalate(turn, why)


def _form(turn: Turn) -> None:
    """Everyone alive is paused: lay out the next world, or wait for more workers."""
    turn.set(lacking=None)
    if not blame_joiners(turn):
        return
    learn_rate(turn)
    world = choose_world(turn)
    if isinstance(world, str):
        _suspend(turn, world)
        return
    state, policy, members = turn.state, turn.policy, list(world.members)
    source, why = choose_source(turn)
    if source.step < state.committed and is_worth_waiting(turn, source.step):
        return
    if source.tier is Tier.INITIAL and state.committed and not policy.from_scratch:
        finish(turn, "failed", no_way_on(state.committed, why))
        return
    if source.step < state.committed and source.step < state.unsettled:
        reason = f"the checkpoint of step {state.unsettled} may yet be published, and {why}"
        finish(turn, "suspended", f"{reason}; {turn.last_good()}")
        return
    if waits_for_store(turn, source):
        suspend_reading(turn)
        return
    if source.step < state.committed:
        roll_back(turn, source.step, why)
    count_redone(turn, source.step)
    donors = tuple(needed_donors(turn, members, source.holders.values()))
    keep = {m.worker for m in (*members, *donors)}
    assignment = Assignment(
        generation=state.generation,
        members=tuple(members),
        donors=donors,
        layout=world.layout,
        source=held_by(source, keep),
        buddies=choose_buddies(members, world.layout, policy.copies),
        reason=f"{world.why}; {why}",
        keepers=tuple(keeper for _, keeper in sorted(state.keepers.items())),
    )
    for member in state.ready.values():
        if member.worker not in keep and member.node in state.draining:
            release(turn, member.worker, "its node is draining")
    writers = recent_writers(turn, assignment)
    abandon_void_attempts(turn, writers)
    turn.set(lineage=state.lineage.on(state.generation, source.step))
    turn.set(
        phase="forming",
        assignment=assignment,
        ranks={m.worker: rank for rank, m in enumerate(members)},
        resumed=0,
        done=0,
        idle=why_idle(turn, world),
        benched=bench(turn, keep, source.step),
        paces=Table(),
        deferred_at_s=None,
        bytes_moved=0,
        bytes_come=False,
        writers=writers,
        pending=pending_after_restore(turn, assignment),
    )
    forget_void(turn)
    turn.do(FormGeneration(assignment))
    turn.timer("form", policy.form_timeout_s)


def _suspend(turn: Turn, why: str) -> None:
    workers, needed = len(turn.usable()), turn.policy.min_workers
    more = str(needed - workers) if workers < needed else ""
    reason = (
        f"{why}: waiting up to {turn.policy.suspend_timeout_s:g} s for {more or 'some'} more; "
        f"{turn.last_good()}"
    )
    if turn.state.phase != "suspended":
        turn.journal("suspended", reason, workers=workers, min_workers=needed)
        turn.timer("suspend", turn.policy.suspend_timeout_s)
    turn.set(phase="suspended")


# ------------------------------------------------------------------------- who is there


def _job_started(turn: Turn, event: JobStarted) -> None:
    committed = event.checkpoints[0].step if event.checkpoints else 0
    lineage = Lineage()
    for ref in sorted(event.checkpoints, key=lambda ref: ref.step):
        lineage = lineage.on(ref.generation, ref.step - 1)
    turn.set(checkpoints=event.checkpoints, committed=committed, generation=event.generation)
    turn.set(lineage=lineage)
    turn.set(started_at_s=event.at_s, checkpoint_asked_at_s=event.at_s)
    if not event.checkpoints and event.recorded and not turn.policy.from_scratch:
        turn.set(committed=event.recorded)
        finish(turn, "failed", no_way_on(event.recorded, "there is no checkpoint"))
        return
    start = (
        f"resuming from checkpoint {event.checkpoints[0].url}"
        if event.checkpoints
        else "starting from the seed"
    )
    turn.journal("job_started", start, step=committed)
    spares = f" and {turn.policy.spares} spares" if turn.policy.spares else ""
    turn.do(WantWorkers(wanted(turn), f"max_workers{spares}"))
    turn.timer("start", turn.policy.start_timeout_s)


def _worker_ready(turn: Turn, event: WorkerReady) -> None:
    state, member = turn.state, event.member
    if member.worker in state.ready or member.worker in state.gone:
        return
    turn.set(ready=state.ready.put(member.worker, member))
    turn.journal("worker_ready", "up and warm", worker=member.worker, node=member.node)
    if keeper := state.keepers.get(member.node):
        turn.do(UseKeeper(member.worker, keeper))
    if member.node in state.draining:
        release(turn, member.worker, "its node is draining")
    elif state.phase == "starting":
        count = min(turn.count_not_leaving(), turn.workers_max)
        if count == turn.workers_max:
            _form_first(turn)
        elif count == turn.policy.min_workers:
            turn.timer("gather", turn.policy.gather_s)
    elif state.phase == "suspended":
        if turn.count_usable() >= turn.policy.min_workers and not isinstance(
            choose_world(turn), str
        ):
            _form_again(turn)
    elif state.phase == "running":
        _await_joiners(turn)


def _follow_wishes(turn: Turn) -> None:
    """A generation has formed: what was asked for meanwhile comes next."""
    if turn.state.stopping:
        _stop(turn)
    elif not _leave_draining(turn) and not _shrink(turn):
        _await_joiners(turn)


def _form_first(turn: Turn) -> None:
    """Nobody has anything to break off: all are paused, as it were."""
    turn.set(generation=turn.state.generation + 1, phase="pausing")


def _form_again(turn: Turn) -> None:
    """Leaves suspension: a generation of its own, as everyone is paused in an older one."""
    if not waits_for_store(turn):  # else its timer says when
        turn.set(generation=turn.state.generation + 1, phase="pausing")


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
            reason = f"{names} waits up to {delay_s:g} s: {why}"
            turn.journal("join_deferred", reason, workers=[m.worker for m in coming])
            turn.set(deferred_at_s=turn.at_s)
            turn.timer("regrow", delay_s)
        return
    _pause(turn, "worker_joined", f"{names} joins", abort=False)


def _resize_requested(turn: Turn, event: ResizeRequested) -> None:
    fields = {"workers": event.workers, "request": event.request}
    if why := refuses(turn, event):
        turn.journal("resize_refused", why, **fields)
        return
    turn.journal("resize_requested", f"{event.workers} workers are wanted", **fields)
    turn.set(target=event.workers)
    turn.do(WantWorkers(wanted(turn), "resize"))
    phase = turn.state.phase
    if phase == "starting" and len(turn.usable()) == turn.workers_max:
        _form_first(turn)
    elif phase == "suspended" and not isinstance(choose_world(turn), str):
        _form_again(turn)
    elif phase == "running" and not _shrink(turn):
        _await_joiners(turn)


def _shrink(turn: Turn) -> bool:
    """To what was asked for, at the next boundary: nothing is lost."""
    before, after = len(turn.members), turn.workers_max
    if before <= after or turn.state.stopping:
        return False
    _pause(turn, "resized", f"{after} workers were asked for, not {before}", abort=False)
    return True


def _worker_lost(turn: Turn, event: WorkerLost) -> None:
    has_ended(turn, event.worker)
    _lose(turn, [event.worker], "worker_lost", event.cause, event.silent_s)


def _worker_hung(turn: Turn, event: WorkerHung) -> None:
    if event.worker in turn.state.ready:
        turn.do(KillWorker(event.worker, event.reason))
    _lose(turn, [event.worker], "worker_hung", event.reason, event.silent_s)


def _node_lost(turn: Turn, event: NodeLost) -> None:
    state = turn.state
    gone = [m.worker for m in state.ready.values() if m.node == event.node]
    turn.journal("node_lost", event.cause, node=event.node, workers=gone)
    for worker in gone:  # cut off, perhaps still running: it must not come back (I1)
        turn.do(KillWorker(worker, f"node {event.node} is lost"))
    turn.set(draining={n: at_s for n, at_s in state.draining.items() if n != event.node})
    is_read = reads_from(turn, event.node)
    forget_keeper(turn, event.node)
    forget_losses(turn, event.node)
    turn.set(recoveries=tuple(blame_node(r, event) for r in state.recoveries))
    if state.episode and any(
        m.node == event.node and m.worker in state.episode.lost
        for m in state.episode.before.members
    ):
        turn.set(episode=replace(state.episode, cause="node_lost"))
    _lose(turn, gone, "node_lost", event.cause)
    if is_read and turn.state.generation == state.generation:  # none of its workers takes part
        _stop_reading(turn, event.node)


def _lose(
    turn: Turn, workers: list[WorkerId], cause: str, reason: str, noticed_s: float = 0.0
) -> None:
    """Removes workers from the world; repeats are ignored."""
    before = turn.state
    gone = [worker for worker in workers if worker in before.ready]
    involved = [worker for worker in gone if turn.takes_part(worker)]
    nodes = [before.ready[worker].node for worker in involved]
    out_since = {worker: turn.out_since(worker) for worker in gone}
    turn.forget(workers)  # those that were not ready yet, too
    if not gone:
        return
    for worker in gone:
        event = "worker_hung" if cause == "worker_hung" else "worker_lost"
        node = before.ready[worker].node
        if (node, worker) in before.told:
            turn.set(told=turn.state.told - {(node, worker)})
        elif node in before.keepers:
            turn.set(awaited={**turn.state.awaited, (node, worker): out_since[worker]})
        turn.journal(event, reason, worker=worker, node=node, rank=before.ranks.get(worker))
    abandon_attempts_of(turn, gone)
    why = f"{', '.join(involved)}: {reason}"
    if involved and before.phase in ("running", "forming"):
        _pause(turn, cause, why, abort=True, noticed_s=noticed_s, nodes=nodes)
    elif involved and before.phase == "pausing":
        _explain(turn, why, nodes)
    if turn.state.episode:
        note_lost(turn, involved, cause, noticed_s)


def _node_draining(turn: Turn, event: NodeDraining) -> None:
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
    _pause(turn, "node_draining", f"{names} leaves a draining node", abort=False)
    return True


# ---------------------------------------------------------------------- what the dead left


def _unkept(turn: Turn, event: Unkept) -> None:
    unkept(turn, event)
    commit_steps(turn)  # what waited for it


def _keeper_lost(turn: Turn, event: KeeperLost) -> None:
    if event.node not in turn.state.keepers:
        return
    what = "its workers' snapshots are their own now"
    reason = f"{event.cause}: {what}" if event.cause else what
    turn.journal("keeper_lost", reason, node=event.node)
    is_read = reads_from(turn, event.node)
    forget_keeper(turn, event.node)
    if is_read:
        _stop_reading(turn, event.node)


def _stop_reading(turn: Turn, node: NodeId) -> None:
    """Its keeper may be stopped, or its machine gone: who asks it would wait for long."""
    reason = f"the keeper of {node}, from which a shard is read, is lost"
    _pause(turn, "keeper_lost", reason, abort=True, nodes=(node,))


# ---------------------------------------------------------------- how a generation forms


def _collective_failed(turn: Turn, event: CollectiveFailed) -> None:
    if not is_current(turn, event.worker, event.generation):
        return
    if turn.state.phase in ("running", "forming"):
        reason = f"{event.worker} saw its group break: {event.error}"
        _pause(turn, "collective_failed", reason, abort=True)
    elif turn.state.phase == "pausing" and not turn.state.abort:
        _break_off(turn, "collective_failed", f"{event.worker} saw its group break: {event.error}")


def _worker_raised(turn: Turn, event: WorkerRaised) -> None:
    state = turn.state
    if is_its_own(turn, event):
        _refuse_worker(turn, event)
        return
    everyones = event.whose == EVERYONES and state.assignment is None
    if not everyones and not is_current(turn, event.worker, event.generation):
        return
    if everyones or event.usage:
        finish(turn, "failed", f"{event.worker}: {event.error}; {turn.last_good()}")
        return
    count = _count_failure(turn, event)
    if event.whose == ITS_DEVICE:
        lose_device(turn, event)
    else:
        _journal_raised(turn, event, count)
    if count > turn.policy.max_user_failures:
        again = f", {count} times in a row" if count > 1 else ""
        reason = f"{event.worker} raised at step {event.step}{again}: {event.error}"
        finish(turn, "failed", f"{reason}; {turn.last_good()}")
    elif event.whose == ITS_DEVICE:
        _lose(turn, [event.worker], "worker_lost", event.error)
    elif state.phase in ("running", "forming"):
        _pause(turn, "worker_raised", f"{event.worker} raised: {event.error}", abort=True)
    elif state.phase == "pausing":
        turn.set(broke="")  # by that
        if not state.abort:
            _escalate(turn, f"{event.worker} raised: {event.error}")


def _count_failure(turn: Turn, event: WorkerRaised) -> int:
    """Returns how many generations in a row something was raised at this step."""
    step, count, generation = turn.state.user_failures
    if generation != event.generation:  # else another rank raises the same
        # The step after it as well: what raises once a step is applied may find it kept.
        count = count + 1 if step <= event.step <= step + 1 else 1
        turn.set(user_failures=(event.step, count, event.generation))
    return count


def _journal_raised(turn: Turn, event: WorkerRaised, times: int) -> None:
    fields = {"worker": event.worker, "step": event.step, "times": times}
    turn.journal("worker_raised", event.error, **fields, frames=list(event.frames))


def _refuse_worker(turn: Turn, event: WorkerRaised) -> None:
    nodes = [m.node for m in turn.members if m.worker == event.worker]
    involved, why = event.worker in turn.live_members(), f"{event.worker}: {event.error}"
    refuse(turn, event)
    if involved and turn.state.phase in ("running", "forming"):
        _pause(turn, "worker_refused", why, abort=True, nodes=nodes)
    elif involved and turn.state.phase == "pausing":
        _explain(turn, why, nodes)


def _paused(turn: Turn, event: Paused) -> None:
    state = turn.state
    if event.generation != state.generation or state.phase != "pausing":
        return
    if event.worker not in state.ready:
        return
    turn.set(paused=state.paused.put(event.worker, event.holdings))


def _source_refused(turn: Turn, event: SourceRefused) -> None:
    """Also late, once the generation that found it was given up: the next must not try it again."""
    state = turn.state
    is_late = state.phase == "pausing"
    if not is_current(turn, event.worker, event.generation):
        return
    if state.phase != "forming" and not is_late:
        return
    assert state.assignment is not None
    source = state.assignment.source
    is_unread = event.kind == UNREACHABLE
    entry = (event.holder, source.step, event.shard)
    if is_unread:
        note = note_unread if event.holder == source.url else note_unreached
        if not note(turn, event) or turn.state.phase == "ended":
            return
        if is_late:
            explain_break(turn)
    elif entry in state.refused:
        return
    else:
        turn.set(refused=state.refused | {entry}, broke="")
        _strike(turn, source, event)
    if not is_late:
        reason = f"{event.holder}: {event.reason}"
        _pause(turn, "source_refused", reason, abort=True, counts=not is_unread)


def _strike(turn: Turn, source: Source, event: SourceRefused) -> None:
    """It is damaged: nobody is to go on from it."""
    if source.tier is Tier.CHECKPOINT and event.holder == source.url:
        kept = tuple(ref for ref in turn.state.checkpoints if ref.url != event.holder)
        turn.set(checkpoints=kept)
        turn.journal("checkpoint_refused", event.reason, step=source.step, url=event.holder)
    else:
        turn.journal("source_refused", event.reason, step=source.step, holder=event.holder)


def _resumed(turn: Turn, event: Resumed) -> None:
    state = turn.state
    rank = state.ranks.get(event.worker)
    if event.generation != state.generation or state.phase != "forming" or rank is None:
        return
    turn.set(resumed=state.resumed | 1 << rank)
    turn.set(bytes_moved=state.bytes_moved + event.bytes_received)
    if turn.state.resumed == turn.everyone():
        _formed(turn)


def _restoring(turn: Turn, event: Restoring) -> None:
    is_now = event.generation == turn.state.generation and turn.state.phase == "forming"
    if is_now and turn.takes_part(event.worker):
        turn.set(bytes_come=True)


def _form_overdue(turn: Turn) -> None:
    """However large the state and slow the store, forming is not given up while bytes come."""
    timeout_s = turn.policy.form_timeout_s
    if turn.state.bytes_come:
        turn.set(bytes_come=False)
        turn.timer("form", timeout_s)
        return
    reason = f"not formed within {timeout_s:g} s, in which no byte of its state came"
    _pause(turn, "form_timeout", reason, abort=True)


def _formed(turn: Turn) -> None:
    state = turn.state
    assignment = state.assignment
    assert assignment is not None
    # A worker drops what it finds damaged: what it holds of the same step from now on is new.
    refused = frozenset(entry for entry in state.refused if entry[0] not in state.ready)
    turn.set(phase="running", refused=refused, outage=None, unreached={})
    dismiss(turn, assignment)
    members = [
        {"worker": m.worker, "rank": rank, "pid": m.pid, "node": m.node, "host": m.host}
        | {"raylet_pid": m.raylet_pid, "domain": m.domain}
        for rank, m in enumerate(assignment.members)
    ]
    idle = {worker: why for worker, why in state.idle.items() if worker in turn.state.ready}
    turn.journal(
        "generation_formed",
        assignment.reason + idle_in_words(idle),
        step=assignment.source.step,
        layout=str(assignment.layout),
        world_size=len(members),
        wanted=turn.workers_max,
        idle=[{"worker": worker, "reason": why} for worker, why in idle.items()],
        source=str(assignment.source.tier),
        members=members,
        buddies=list(assignment.buddies),
    )
    close_episode(turn, assignment)
    await_checkpoint(turn)
    commit_steps(turn)


# ------------------------------------------------------------------------- stragglers


def _step_applied(turn: Turn, event: StepApplied) -> None:
    step_applied(turn, event)
    note_step(turn, event)
    state = turn.state
    first = state.ranks.get(event.worker) == 0  # once a step is often enough
    if state.phase != "running" or not first or not event.pace_s or state.stopping:
        return
    if why := judge(turn):
        _pause(turn, "straggler_evicted", why, abort=False)


def _stop_requested(turn: Turn, event: StopRequested) -> None:
    if turn.state.stopping:
        finish(turn, "stopped", f"{event.reason}, asked twice; {turn.last_good()}")
        return
    turn.set(stopping=event.reason)
    turn.journal("stop_requested", event.reason)
    if turn.state.phase in ("starting", "suspended"):
        finish(turn, "stopped", f"{event.reason}; {turn.last_good()}")
        return
    if turn.state.phase == "running":
        _stop(turn)
    turn.do(StartTimer("stop", 0, turn.policy.stop_timeout_s))


def _stop(turn: Turn) -> None:
    turn.do(StopAtBoundary(tuple(turn.live_members()), turn.state.stopping))


def _timer_fired(turn: Turn, event: TimerFired) -> None:
    """Every wait ends here (I7). A timer of another generation or phase is stale."""
    name, _, whose = event.timer.partition(" ")
    if act := LASTING_TIMERS.get(name):
        act(turn, whose)
    elif event.generation == turn.state.generation and (name, turn.state.phase) in TIMERS:
        TIMERS[name, turn.state.phase](turn)


def _stop_overdue(turn: Turn, _: str) -> None:
    reason = f"{turn.state.stopping}, not clean in time"
    finish(turn, "stopped", f"{reason}; {turn.last_good()}")


def _read_again(turn: Turn, _: str) -> None:
    if may_read_again(turn) and turn.state.phase == "suspended":
        _form_again(turn)


def _gathered(turn: Turn) -> None:
    if len(turn.usable()) >= turn.policy.min_workers:
        _form_first(turn)


def _start_overdue(turn: Turn) -> None:
    usable, policy = len(turn.usable()), turn.policy
    if usable >= policy.min_workers:
        _form_first(turn)
        return
    reason = f"{usable} workers ready after {policy.start_timeout_s:g} s"
    unfit = f"; {turn.state.unfit_why}" if turn.state.unfit_why else ""
    finish(turn, "failed", f"{reason}, min_workers is {policy.min_workers}{unfit}")


def _suspended_too_long(turn: Turn) -> None:
    usable, policy = len(turn.usable()), turn.policy
    reason = f"{usable} workers after {policy.suspend_timeout_s:g} s suspended"
    why = choose_world(turn)
    if usable < policy.min_workers or not isinstance(why, str):
        why = f"min_workers is {policy.min_workers}"
    finish(turn, "suspended", f"{reason}, {why}; {turn.last_good()}")


def _late(turn: Turn) -> list[WorkerId]:
    return [w for w in turn.holders() if w not in turn.state.paused]


def _boundary_overdue(turn: Turn) -> None:
    late = _late(turn)
    if late and not turn.state.abort:
        reason = f"{', '.join(late)} reached no step boundary in time"
        _break_off(turn, "boundary_overdue", reason)


def _pause_overdue(turn: Turn) -> None:
    late = _late(turn)
    if not late:
        return
    for worker in late:
        turn.do(KillWorker(worker, "it reached no safe point in time"))
    _lose(turn, late, "worker_hung", "it reached no safe point in time")


# By name and the phase in which they count, of the present generation.
TIMERS: dict[tuple[str, str], Callable[[Turn], None]] = {
    ("start", "starting"): _start_overdue,
    ("gather", "starting"): _gathered,
    ("join", "running"): _admit,
    ("regrow", "running"): _admit,
    ("checkpoint", "running"): ask_for_checkpoint,
    ("boundary", "pausing"): _boundary_overdue,
    ("pause", "pausing"): _pause_overdue,
    ("keeper", "pausing"): stop_awaiting,
    ("form", "forming"): _form_overdue,
    ("suspend", "suspended"): _suspended_too_long,
}
# Of whatever generation and phase, by the first word of their names; the others say whose.
LASTING_TIMERS: dict[str, Callable[[Turn, str], None]] = {
    "stop": _stop_overdue,
    RELEASE: release_overdue,
    PUBLISH: publish_overdue,
    REREAD: _read_again,
}

handlers: dict[type, Callable[[Turn, Any], None]] = {
    JobStarted: _job_started,
    WorkerReady: _worker_ready,
    WorkerLost: _worker_lost,
    WorkerHung: _worker_hung,
    NodeLost: _node_lost,
    NodeDraining: _node_draining,
    KeeperReady: keeper_ready,
    KeeperLost: _keeper_lost,
    KeeperHolds: keeper_holds,
    Unkept: _unkept,
    CollectiveFailed: _collective_failed,
    WorkerRaised: _worker_raised,
    Paused: _paused,
    Resumed: _resumed,
    Restoring: _restoring,
    SourceRefused: _source_refused,
    StepApplied: _step_applied,
    StepHeld: step_held,
    ShardsWritten: shards_written,
    ShardsFailed: shards_failed,
    CheckpointCommitted: checkpoint_committed,
    CheckpointFailed: checkpoint_failed,
    CheckpointDamaged: checkpoint_damaged,
    WorkerDone: worker_done,
    StopRequested: _stop_requested,
    ResizeRequested: _resize_requested,
    TimerFired: _timer_fired,
}
