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
from dataclasses import asdict, replace
from typing import Any

from elastic_ft.core.commits import (
    abandon_attempts_of,
    abandon_void_attempts,
    ask_for_checkpoint,
    await_checkpoint,
    checkpoint_committed,
    checkpoint_failed,
    commit_steps,
    finish,
    shards_failed,
    shards_written,
    step_applied,
    step_held,
    worker_done,
)
from elastic_ft.core.events import (
    Assignment,
    CheckpointCommitted,
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
    NodeDraining,
    NodeLost,
    Paused,
    PauseWorkers,
    ReleaseWorker,
    Resumed,
    ShardsFailed,
    ShardsWritten,
    SourceRefused,
    StartTimer,
    StepApplied,
    StepHeld,
    StopAtBoundary,
    StopRequested,
    Tier,
    TimerFired,
    UseKeeper,
    WantWorkers,
    WorkerDone,
    WorkerHung,
    WorkerId,
    WorkerLost,
    WorkerRaised,
    WorkerReady,
)
from elastic_ft.core.layout import plan_layout
from elastic_ft.core.recovery import choose_buddies
from elastic_ft.core.restoring import (
    choose_source,
    count_redone,
    forget_keeper,
    forget_later_steps,
    held_by,
    is_worth_waiting,
    keeper_holds,
    keeper_ready,
    needed_donors,
    pending_after_restore,
    recent_writers,
    roll_back,
)
from elastic_ft.core.state import (
    Episode,
    Policy,
    Recovery,
    State,
    Turn,
    is_current,
)

NODE_LOSS_LAG_S = 90.0  # Ray's health checks need up to 63 s by default


def step(state: State, event: Event, policy: Policy) -> tuple[State, tuple[Command, ...]]:
    """Returns the next state and what is to be done about it."""
    if state.phase == "ended":
        return state, ()
    turn = Turn(state, policy, event.at_s)
    handlers[type(event)](turn, event)
    return turn.state, tuple(turn.commands)


# -------------------------------------------------------------------- opening a generation


def _pause(turn: Turn, cause: str, reason: str, *, abort: bool, noticed_s: float = 0.0) -> None:
    """Opens the next generation: fence the running one and collect what the survivors hold."""
    state = turn.state
    if state.fruitless >= turn.policy.max_generations_without_progress:
        reason = f"{state.fruitless} generations without a committed step, the last one: {reason}"
        finish(turn, "failed", f"{reason}; {turn.last_good()}")
        return
    if state.episode is None and state.assignment is not None:
        episode = Episode(cause, turn.at_s, noticed_s, state.assignment)
        turn.set(episode=episode)
    turn.set(phase="pausing", generation=state.generation + 1, paused={}, abort=abort)
    turn.set(fruitless=state.fruitless + 1)
    workers = tuple(turn.live_members())
    if workers:
        turn.do(PauseWorkers(turn.state.generation, workers, abort, reason))
    if abort:
        turn.timer("pause", turn.policy.pause_timeout_s)
    else:
        turn.timer("boundary", turn.policy.boundary_timeout_s)
    _form_if_paused(turn)


def _escalate(turn: Turn, reason: str) -> None:
    """A planned pause can't wait for the boundary any longer: break collectives off."""
    turn.set(abort=True)
    workers = tuple(w for w in turn.live_members() if w not in turn.state.paused)
    if workers:
        turn.do(PauseWorkers(turn.state.generation, workers, True, reason))
    turn.timer("pause", turn.policy.pause_timeout_s)


def _form_if_paused(turn: Turn) -> None:
    if turn.state.phase == "pausing" and all(
        worker in turn.state.paused for worker in turn.live_members()
    ):
        _form(turn)


def _form(turn: Turn) -> None:
    """Everyone alive is paused: lay out the next world, or wait for more workers."""
    members = turn.usable()
    if len(members) < turn.policy.min_workers:
        _suspend(turn, len(members))
        return
    state, policy = turn.state, turn.policy
    source, why = choose_source(turn)
    if source.step < state.committed and is_worth_waiting(turn, source.step):
        return
    layout, why_layout = plan_layout(
        policy.strategy, len(members), policy.shard_size, policy.tp, policy.pp
    )
    if source.step < state.committed:
        roll_back(turn, source.step, why)
    count_redone(turn, source.step)
    donors = tuple(needed_donors(turn, members, source.holders.values()))
    keep = {m.worker for m in (*members, *donors)}
    assignment = Assignment(
        generation=state.generation,
        members=tuple(members),
        donors=donors,
        layout=layout,
        source=held_by(source, keep),
        buddies=choose_buddies(members, layout, policy.copies),
        reason=f"{why_layout}; {why}",
        keepers=tuple(keeper for _, keeper in sorted(state.keepers.items())),
    )
    for member in state.ready.values():
        if member.worker not in keep and member.node in state.draining:
            _release(turn, member.worker, "its node is draining")
    writers = recent_writers(turn, assignment)
    abandon_void_attempts(turn, writers)
    turn.set(
        phase="forming",
        assignment=assignment,
        ranks={m.worker: rank for rank, m in enumerate(members)},
        resumed=0,
        done=0,
        bytes_moved=0,
        writers=writers,
        pending=pending_after_restore(turn, assignment),
    )
    forget_later_steps(turn, source.step)
    turn.do(FormGeneration(assignment))
    turn.timer("form", policy.form_timeout_s)


def _checkpoint_committed(turn: Turn, event: CheckpointCommitted) -> None:
    checkpoint_committed(turn, event)
    _form_if_paused(turn)


def _checkpoint_failed(turn: Turn, event: CheckpointFailed) -> None:
    checkpoint_failed(turn, event)
    _form_if_paused(turn)


def _suspend(turn: Turn, workers: int) -> None:
    needed = turn.policy.min_workers
    reason = (
        f"{workers} workers are usable, min_workers is {needed}: waiting up to "
        f"{turn.policy.suspend_timeout_s:g} s for {needed - workers} more; {turn.last_good()}"
    )
    if turn.state.phase != "suspended":
        turn.journal("suspended", reason, workers=workers, min_workers=needed)
        turn.timer("suspend", turn.policy.suspend_timeout_s)
    turn.set(phase="suspended")


# ------------------------------------------------------------------------- who is there


def _job_started(turn: Turn, event: JobStarted) -> None:
    committed = event.checkpoints[0].step if event.checkpoints else 0
    turn.set(checkpoints=event.checkpoints, committed=committed, generation=event.generation)
    turn.set(started_at_s=event.at_s, checkpoint_asked_at_s=event.at_s)
    start = (
        f"resuming from checkpoint {event.checkpoints[0].url}"
        if event.checkpoints
        else "starting from the seed"
    )
    turn.journal("job_started", start, step=committed)
    turn.do(WantWorkers(turn.policy.max_workers, "max_workers"))
    turn.timer("start", turn.policy.start_timeout_s)


def _worker_ready(turn: Turn, event: WorkerReady) -> None:
    state, member = turn.state, event.member
    if member.worker in state.ready or member.worker in state.gone:
        return
    turn.set(ready={**state.ready, member.worker: member})
    turn.journal("worker_ready", "up and warm", worker=member.worker, node=member.node)
    if keeper := state.keepers.get(member.node):
        turn.do(UseKeeper(member.worker, keeper))
    if member.node in state.draining:
        _release(turn, member.worker, "its node is draining")
    elif state.phase == "starting":
        count = len(turn.usable())
        if count == turn.policy.max_workers:
            _form_first(turn)
        elif count == turn.policy.min_workers:
            turn.timer("gather", turn.policy.gather_s)
    elif state.phase == "suspended":
        if len(turn.usable()) >= turn.policy.min_workers:
            _form_again(turn)
    elif state.phase == "running":
        _await_joiners(turn)


def _form_first(turn: Turn) -> None:
    turn.set(generation=turn.state.generation + 1)
    _form(turn)


def _form_again(turn: Turn) -> None:
    """Leave suspension: a generation of its own, as everyone is paused in an older one."""
    turn.set(generation=turn.state.generation + 1, phase="pausing")
    _form(turn)


def _await_joiners(turn: Turn) -> None:
    """Joiners that come together join together, unless the world is full with them."""
    if turn.state.stopping or not turn.joiners():
        return
    if len(turn.usable()) == turn.policy.max_workers:
        _admit(turn)
    else:
        turn.timer("join", turn.policy.join_batch_s)


def _admit(turn: Turn) -> None:
    names = ", ".join(m.worker for m in turn.joiners())
    _pause(turn, "worker_joined", f"{names} joins", abort=False)


def _worker_lost(turn: Turn, event: WorkerLost) -> None:
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
    forget_keeper(turn, event.node)
    turn.set(recoveries=tuple(_blame_node(r, event) for r in state.recoveries))
    if state.episode and any(
        m.node == event.node and m.worker in state.episode.lost
        for m in state.episode.before.members
    ):
        turn.set(episode=replace(state.episode, cause="node_lost"))
    _lose(turn, gone, "node_lost", event.cause)
    if not gone:  # they were lost before; now nothing of theirs is awaited any more
        _form_if_paused(turn)


def _blame_node(recovery: Recovery, lost: NodeLost) -> Recovery:
    """A node's loss is noticed after that of its workers, whose connections end at once."""
    if (
        recovery.cause == "worker_lost"
        and lost.node in recovery.lost_nodes
        and lost.at_s - recovery.noticed_at_s < NODE_LOSS_LAG_S
    ):
        return replace(recovery, cause="node_lost")
    return recovery


def _lose(
    turn: Turn, workers: list[WorkerId], cause: str, reason: str, noticed_s: float = 0.0
) -> None:
    """Takes workers out of the world. Those already out are no news."""
    state = turn.state
    gone = [worker for worker in workers if worker in state.ready]
    involved = [w for w in gone if w in turn.live_members()]
    turn.forget(workers)  # those that were not ready yet, too
    if not gone:
        return
    for worker in gone:
        event = "worker_hung" if cause == "worker_hung" else "worker_lost"
        node = state.ready[worker].node
        if (node, worker) in state.told:
            turn.set(told=turn.state.told - {(node, worker)})
        elif node in state.keepers:
            turn.set(awaited={**turn.state.awaited, (node, worker): None})
        turn.journal(event, reason, worker=worker, node=node, rank=state.ranks.get(worker))
    abandon_attempts_of(turn, gone)
    if involved and state.phase in ("running", "forming"):
        _pause(turn, cause, f"{', '.join(involved)}: {reason}", abort=True, noticed_s=noticed_s)
    elif involved and state.phase == "pausing" and not state.abort:
        _escalate(turn, f"{', '.join(involved)}: {reason}")
    if turn.state.episode:
        _note_lost(turn, involved, cause, noticed_s)
    _form_if_paused(turn)


def _note_lost(turn: Turn, workers: list[WorkerId], cause: str, noticed_s: float) -> None:
    episode = turn.state.episode
    assert episode is not None
    if workers and episode.cause in ("collective_failed", "worker_joined"):
        episode = replace(episode, cause=cause, noticed_s=noticed_s)
    turn.set(episode=replace(episode, lost=(*episode.lost, *workers)))


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
        if member.node == event.node and member.worker not in state.ranks:
            _release(turn, member.worker, "its node is draining")
    if state.phase == "running":
        _leave_draining(turn)


def _leave_draining(turn: Turn) -> bool:
    """Moves off draining nodes at the next boundary, if enough workers remain."""
    leaving = [m for m in turn.members if m.node in turn.state.draining]
    if not leaving:
        return False
    if len(turn.staying()) < turn.policy.min_workers:
        reason = "leaving now would fall below min_workers: training on until the node goes"
        turn.journal("drain_deferred", reason, workers=[m.worker for m in leaving])
        return False
    names = ", ".join(m.worker for m in leaving)
    _pause(turn, "node_draining", f"{names} leaves a draining node", abort=False)
    return True


def _release(turn: Turn, worker: WorkerId, reason: str) -> None:
    turn.do(ReleaseWorker(worker, reason))
    turn.forget([worker])
    abandon_attempts_of(turn, [worker])


# ---------------------------------------------------------------------- what the dead left


def _keeper_holds(turn: Turn, event: KeeperHolds) -> None:
    keeper_holds(turn, event)
    _form_if_paused(turn)


def _keeper_lost(turn: Turn, event: KeeperLost) -> None:
    if event.node not in turn.state.keepers:
        return
    turn.journal("keeper_lost", "its workers' snapshots are their own now", node=event.node)
    forget_keeper(turn, event.node)
    _form_if_paused(turn)


# ---------------------------------------------------------------- how a generation forms


def _collective_failed(turn: Turn, event: CollectiveFailed) -> None:
    if not is_current(turn, event.worker, event.generation):
        return
    if turn.state.phase in ("running", "forming"):
        reason = f"{event.worker} saw its group break: {event.error}"
        _pause(turn, "collective_failed", reason, abort=True)
    elif turn.state.phase == "pausing" and not turn.state.abort:
        _escalate(turn, f"{event.worker} saw its group break: {event.error}")


def _worker_raised(turn: Turn, event: WorkerRaised) -> None:
    state = turn.state
    if event.usage or state.assignment is None:
        finish(turn, "failed", f"{event.worker}: {event.error}; {turn.last_good()}")
        return
    if not is_current(turn, event.worker, event.generation):
        return
    step, count, generation = state.user_failures
    if step != event.step:
        count = 1
    elif generation != event.generation:  # else another rank raises the same
        count += 1
    turn.set(user_failures=(event.step, count, event.generation))
    turn.journal("worker_raised", event.error, worker=event.worker, step=event.step, times=count)
    if count > turn.policy.max_user_failures:
        reason = f"{event.worker} raised {count} times at step {event.step}: {event.error}"
        finish(turn, "failed", f"{reason}; {turn.last_good()}")
    elif state.phase in ("running", "forming"):
        _pause(turn, "worker_raised", f"{event.worker} raised: {event.error}", abort=True)
    elif state.phase == "pausing" and not state.abort:
        _escalate(turn, f"{event.worker} raised: {event.error}")


def _paused(turn: Turn, event: Paused) -> None:
    state = turn.state
    if event.generation != state.generation or state.phase != "pausing":
        return
    if event.worker not in state.ready:
        return
    turn.set(paused={**state.paused, event.worker: event.holdings})
    _form_if_paused(turn)


def _source_refused(turn: Turn, event: SourceRefused) -> None:
    state = turn.state
    if not is_current(turn, event.worker, event.generation) or state.phase != "forming":
        return
    assert state.assignment is not None
    source = state.assignment.source
    turn.set(refused=state.refused | {(event.holder, source.step, event.shard)})
    if source.tier is Tier.CHECKPOINT and event.holder == source.url:
        kept = tuple(ref for ref in state.checkpoints if ref.url != event.holder)
        turn.set(checkpoints=kept)
        turn.journal("checkpoint_refused", event.reason, step=source.step, url=event.holder)
    else:
        turn.journal("source_refused", event.reason, step=source.step, holder=event.holder)
    _pause(turn, "source_refused", f"{event.holder}: {event.reason}", abort=True)


def _resumed(turn: Turn, event: Resumed) -> None:
    state = turn.state
    rank = state.ranks.get(event.worker)
    if event.generation != state.generation or state.phase != "forming" or rank is None:
        return
    turn.set(resumed=state.resumed | 1 << rank)
    turn.set(bytes_moved=state.bytes_moved + event.bytes_received)
    if turn.state.resumed == turn.everyone():
        _formed(turn)


def _formed(turn: Turn) -> None:
    state = turn.state
    assignment = state.assignment
    assert assignment is not None
    # A worker drops what it finds damaged: what it holds of the same step from now on is new.
    refused = frozenset(entry for entry in state.refused if entry[0] not in state.ready)
    turn.set(phase="running", refused=refused)
    members = [
        {"worker": m.worker, "rank": rank, "pid": m.pid, "node": m.node, "host": m.host}
        | {"raylet_pid": m.raylet_pid, "domain": m.domain}
        for rank, m in enumerate(assignment.members)
    ]
    turn.journal(
        "generation_formed",
        assignment.reason,
        step=assignment.source.step,
        layout=str(assignment.layout),
        world_size=len(members),
        source=str(assignment.source.tier),
        members=members,
        buddies=list(assignment.buddies),
    )
    for donor in assignment.donors:
        _release(turn, donor.worker, "it has handed over its state; its node is draining")
    _close_episode(turn, assignment)
    await_checkpoint(turn)
    commit_steps(turn)
    if turn.state.phase != "running":  # that was the last step: the job has ended
        return
    if turn.state.stopping:
        _stop(turn)
    elif not _leave_draining(turn):
        _await_joiners(turn)


def _close_episode(turn: Turn, after: Assignment) -> None:
    episode = turn.state.episode
    if episode is None:
        return
    before, source = episode.before, after.source
    for member in after.members:
        if before.rank_of(member.worker) is None:
            turn.journal(
                "worker_joined",
                "a new worker is part of the world",
                worker=member.worker,
                rank=after.rank_of(member.worker),
                pid=member.pid,
                node=member.node,
            )
    survivors = [m for m in after.members if before.rank_of(m.worker) is not None]
    lost = [m for m in before.members if m.worker in episode.lost]
    recovery = Recovery(
        cause=episode.cause,
        noticed_at_s=episode.at_s,
        at_step=source.step,
        noticed_s=round(episode.noticed_s, 4),
        paused_s=round(turn.at_s - episode.at_s, 4),
        steps_lost=episode.steps_lost,
        steps_redone=episode.steps_redone,
        source=str(source.tier),
        bytes_moved=turn.state.bytes_moved,
        world_before=len(before.members),
        world_after=len(after.members),
        layout_before=str(before.layout),
        layout_after=str(after.layout),
        survivors_kept_pid=bool(survivors) and all(m in before.members for m in survivors),
        generation=after.generation,
        lost_nodes=tuple(sorted({m.node for m in lost})),
    )
    turn.set(episode=None, recoveries=(*turn.state.recoveries, recovery))
    turn.journal("recovered", f"{recovery.cause}: {after.reason}", **asdict(recovery))


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
    state, policy = turn.state, turn.policy
    if event.timer == "stop":
        finish(turn, "stopped", f"{state.stopping}, not clean in time; {turn.last_good()}")
        return
    if event.generation != state.generation:
        return
    key = (event.timer, state.phase)
    usable = len(turn.usable())
    if key == ("gather", "starting") and usable >= policy.min_workers:
        _form_first(turn)
    elif key == ("start", "starting"):
        if usable >= policy.min_workers:
            _form_first(turn)
        else:
            reason = f"{usable} workers ready after {policy.start_timeout_s:g} s"
            finish(turn, "failed", f"{reason}, min_workers is {policy.min_workers}")
    elif key == ("join", "running") and turn.joiners() and not state.stopping:
        _admit(turn)
    elif key == ("checkpoint", "running"):
        ask_for_checkpoint(turn)
    elif key == ("boundary", "pausing"):
        _boundary_overdue(turn)
    elif key == ("pause", "pausing"):
        _pause_overdue(turn)
    elif key == ("keeper", "pausing"):
        turn.set(awaited={})
        _form_if_paused(turn)
    elif key == ("form", "forming"):
        reason = f"not formed within {policy.form_timeout_s:g} s"
        _pause(turn, "form_timeout", reason, abort=True)
    elif key == ("suspend", "suspended"):
        reason = f"{usable} workers after {policy.suspend_timeout_s:g} s suspended"
        reason = f"{reason}, min_workers is {policy.min_workers}"
        finish(turn, "suspended", f"{reason}; {turn.last_good()}")


def _late(turn: Turn) -> list[WorkerId]:
    return [w for w in turn.live_members() if w not in turn.state.paused]


def _boundary_overdue(turn: Turn) -> None:
    late = _late(turn)
    if late and not turn.state.abort:
        _escalate(turn, f"{', '.join(late)} reached no step boundary in time")


def _pause_overdue(turn: Turn) -> None:
    late = _late(turn)
    if not late:
        return
    for worker in late:
        turn.do(KillWorker(worker, "it reached no safe point in time"))
    _lose(turn, late, "worker_hung", "it reached no safe point in time")


handlers: dict[type, Callable[[Turn, Any], None]] = {
    JobStarted: _job_started,
    WorkerReady: _worker_ready,
    WorkerLost: _worker_lost,
    WorkerHung: _worker_hung,
    NodeLost: _node_lost,
    NodeDraining: _node_draining,
    KeeperReady: keeper_ready,
    KeeperLost: _keeper_lost,
    KeeperHolds: _keeper_holds,
    CollectiveFailed: _collective_failed,
    WorkerRaised: _worker_raised,
    Paused: _paused,
    Resumed: _resumed,
    SourceRefused: _source_refused,
    StepApplied: step_applied,
    StepHeld: step_held,
    ShardsWritten: shards_written,
    ShardsFailed: shards_failed,
    CheckpointCommitted: _checkpoint_committed,
    CheckpointFailed: _checkpoint_failed,
    WorkerDone: worker_done,
    StopRequested: _stop_requested,
    TimerFired: _timer_fired,
}
