"""Committing steps and checkpoints, and the end of the job (I4, I5)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from statistics import median

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import CheckpointRef, WorkerId
from elastic_ft.core.intervals import checkpoint_every_s
from elastic_ft.core.keepers import drop_old, note_held
from elastic_ft.core.records import CheckpointAttempt, PendingStep, Writers
from elastic_ft.core.state import CLOSED_KEPT, State, Turn, is_current

PLANNED = (
    "worker_joined",
    "node_draining",
    "resized",
    "straggler_evicted",
)  # causes of recoveries that are no failures
PRIOR_BETWEEN_FAILURES_S = 6 * 3600.0  # what is assumed before any was seen
FIRST_WRITE_S = 5.0  # before one was measured
WRITES_REMEMBERED = 5  # their median counts: one slow upload is no new truth
UNSAVED = "but not in a checkpoint"  # of a job's last steps, why it is not complete
PUBLISH = "publish"  # a timer; its name goes on with the attempt's step and generation
CHECKPOINT_MIN_S, CHECKPOINT_MAX_S = 60.0, 3600.0
ENDED = "the job has ended"

# --------------------------------------------------------------------- committing steps


def step_applied(turn: Turn, event: ev.StepApplied) -> None:
    pending = _pending_for(turn, event.worker, event.generation, event.step)
    if pending is None:
        return
    bit = 1 << turn.state.ranks[event.worker]
    metrics = pending.metrics or event.metrics
    _set_pending(turn, event.step, replace(pending, applied=pending.applied | bit, metrics=metrics))
    commit_steps(turn)


def step_held(turn: Turn, event: ev.StepHeld) -> None:
    pending = _pending_for(turn, event.worker, event.generation, event.step)
    if pending is None:
        return
    bit = 1 << turn.state.ranks[event.worker]
    if not pending.held & bit:  # else it was said before the worker lost its keeper
        turn.set(unkept=turn.state.unkept - {event.worker})
    note_held(turn, event)
    _set_pending(turn, event.step, replace(pending, held=pending.held | bit))
    commit_steps(turn)


def _pending_for(turn: Turn, worker: WorkerId, generation: int, step: int) -> PendingStep | None:
    """The entry of a step that this message may still change, or None (I1)."""
    state = turn.state
    if not is_current(turn, worker, generation) or worker not in state.ranks:
        return None
    if step <= state.committed:
        return None
    assert state.assignment is not None
    fresh = PendingStep(generation, len(turn.members), str(state.assignment.layout), {})
    return state.pending.get(step, fresh)


def _set_pending(turn: Turn, step: int, pending: PendingStep) -> None:
    turn.set(pending={**turn.state.pending, step: pending})


def commit_steps(turn: Turn) -> None:
    """Commits every step that all members applied and whose state survives one node (I4).

    It does once a snapshot of that step, or of a later one, is held by all that are to hold it
    (``Assignment.holding``). Nothing commits while a generation forms.
    """
    state = turn.state
    if state.assignment is None or state.phase not in ("running", "pausing"):
        return
    everyone = turn.everyone()
    held = turn.to_be_held_by()
    safe = [s for s, p in state.pending.items() if p.held & held == held]
    durable = max(safe, default=0)
    while (pending := turn.state.pending.get(turn.state.committed + 1)) is not None:
        number = turn.state.committed + 1
        if number > durable or pending.applied != everyone:
            break
        turn.do(
            cmd.RecordStep(
                number, pending.generation, pending.world_size, pending.layout, pending.metrics
            )
        )
        rest = {s: p for s, p in turn.state.pending.items() if s != number}
        made_by = turn.state.writers.get(pending.generation)
        blame = turn.state.blame.forgiven(made_by.workers if made_by else None)
        turn.set(committed=number, pending=rest, blame=blame)
    drop_old(turn)
    _commit_checkpoints(turn)
    finish_if_done(turn)


# --------------------------------------------------------------------------- checkpoints


def await_checkpoint(turn: Turn) -> None:
    """A generation trains: when is its next checkpoint due?"""
    every_s = _checkpoint_every_s(turn)
    if every_s is None:
        return
    if turn.at_s < turn.state.uploads.asked_at_s:  # the clock was set back: count from now
        turn.set(uploads=replace(turn.state.uploads, asked_at_s=turn.at_s))
    turn.timer("checkpoint", max(0.0, turn.state.uploads.asked_at_s + every_s - turn.at_s))


def ask_for_checkpoint(turn: Turn) -> None:
    """It is due; not while the one before is being written, nor when nothing is new."""
    state = turn.state
    if state.adoption is not None and state.adoption.workers:  # who is to begin it, may not hear
        turn.timer("checkpoint", turn.policy.return_timeout_s)
        return
    newest = max((ref.step for ref in state.checkpoints), default=0)
    if not state.uploads.attempts and state.committed > newest and not state.stopping:
        turn.do(cmd.TakeCheckpoint(turn.members[0].worker))
    turn.set(uploads=replace(turn.state.uploads, asked_at_s=turn.at_s))
    await_checkpoint(turn)


def _checkpoint_every_s(turn: Turn) -> float | None:
    """As told, or as what one costs and how often workers fail advise."""
    state, policy = turn.state, turn.policy
    if not policy.checkpoint_auto:
        return policy.checkpoint_every_s
    ran_s = max(0.0, turn.at_s - state.started_at_s)  # a clock may be set back
    between_s = (ran_s + PRIOR_BETWEEN_FAILURES_S) / (state.failures + 1)
    every_s = checkpoint_every_s(_write_s(turn), between_s)
    return min(max(every_s, CHECKPOINT_MIN_S), CHECKPOINT_MAX_S)


def _write_s(turn: Turn) -> float:
    writes_s = turn.state.uploads.writes_s
    return median(writes_s) if writes_s else FIRST_WRITE_S


def shards_written(turn: Turn, event: ev.ShardsWritten) -> None:
    attempt = _attempt(turn, event.step, event.generation)
    if attempt is None or not attempt.awaits(event.worker):
        return
    written = attempt.written.put(event.worker, event.shards)
    tensors = attempt.tensors
    if not event.tensors.keys() <= tensors.keys():
        tensors = {**tensors, **event.tensors}
    is_first = not attempt.written  # who leaves, or is done, later on ends it then
    took_s = max(attempt.took_s, event.took_s)
    attempt = replace(attempt, written=written, tensors=tensors, took_s=took_s)
    if is_first and (gone := _without_hope(turn, attempt)):
        reason = f"{', '.join(sorted(gone))} left or was done before writing its shards"
        abandon(turn, attempt, reason)
        finish_if_done(turn)
        return
    _put_attempt(turn, attempt)
    _commit_checkpoints(turn)
    finish_if_done(turn)


def _without_hope(turn: Turn, attempt: CheckpointAttempt) -> list[WorkerId]:
    """Who will not write its part: who is done has written all it ever will."""
    state = turn.state

    def has_left(worker: WorkerId) -> bool:
        rank = state.ranks.get(worker)
        return worker not in state.ready or (rank is not None and bool(state.done >> rank & 1))

    return [w for w in attempt.writers if attempt.awaits(w) and has_left(w)]


def shards_failed(turn: Turn, event: ev.ShardsFailed) -> None:
    attempt = _attempt(turn, event.step, event.generation)
    if attempt is not None and attempt.awaits(event.worker):
        abandon(turn, attempt, f"{event.worker}: {event.reason}")
        finish_if_done(turn)


def _attempt(turn: Turn, step: int, generation: int) -> CheckpointAttempt | None:
    """The attempt, begun by the first message about it, or None if it is void (I1)."""
    state = turn.state
    writers = state.writers.get(generation)
    if writers is None or _is_closed(state, step, generation):
        return None
    if writers.until is not None and step > writers.until:
        return None
    for attempt in state.uploads.attempts:
        if (attempt.step, attempt.generation) == (step, generation):
            return attempt
    return CheckpointAttempt(step, generation, writers.workers)


def _is_closed(state: State, step: int, generation: int) -> bool:
    """It has ended, or is older than all those of which that is still known."""
    closed = state.uploads.closed_attempts
    if (step, generation) in closed:
        return True
    oldest = min(((g, s) for s, g in closed), default=(0, 0))
    return len(closed) == CLOSED_KEPT and (generation, step) < oldest


def _put_attempt(turn: Turn, attempt: CheckpointAttempt) -> None:
    key = (attempt.step, attempt.generation)
    others = [a for a in turn.state.uploads.attempts if (a.step, a.generation) != key]
    turn.set(uploads=replace(turn.state.uploads, attempts=(*others, attempt)))


def abandon(turn: Turn, attempt: CheckpointAttempt, reason: str) -> None:
    _close(turn, attempt)
    turn.do(cmd.AbandonCheckpoint(attempt.step, attempt.generation, reason))
    turn.journal("checkpoint_abandoned", reason, step=attempt.step)


def _close(turn: Turn, attempt: CheckpointAttempt) -> None:
    """A late message about it begins no new attempt."""
    key = (attempt.step, attempt.generation)
    uploads = turn.state.uploads
    others = tuple(a for a in uploads.attempts if (a.step, a.generation) != key)
    closed = (*uploads.closed_attempts, key)[-CLOSED_KEPT:]
    turn.set(uploads=replace(uploads, attempts=others, closed_attempts=closed))


def abandon_void_attempts(turn: Turn, writers: dict[int, Writers]) -> None:
    """A new generation forms: what can't be completed, or is no part of the history, ends (I4)."""
    for attempt in turn.state.uploads.attempts:
        known = writers.get(attempt.generation)
        if attempt.committing:
            continue
        if known is None:
            abandon(turn, attempt, "its generation is too old")
        elif known.until is not None and attempt.step > known.until:
            abandon(turn, attempt, f"not every writer reached its step: {known.until} was the last")
    uploads = turn.state.uploads
    known_still = tuple(key for key in uploads.closed_attempts if key[1] in writers)
    turn.set(uploads=replace(uploads, closed_attempts=known_still))


def abandon_attempts_of(turn: Turn, gone: list[WorkerId], how: str = "left") -> None:
    for attempt in turn.state.uploads.attempts:
        missing = sorted(worker for worker in gone if attempt.awaits(worker))
        if missing:
            abandon(turn, attempt, f"{', '.join(missing)} {how} before writing its shards")


def _commit_checkpoints(turn: Turn) -> None:
    """Publishes what is written, once its step is committed: no checkpoint runs ahead of steps."""
    for attempt in turn.state.uploads.attempts:
        if not attempt.is_whole or attempt.step > turn.state.committed:
            continue
        if any(ref.step == attempt.step for ref in turn.state.checkpoints):
            abandon(turn, attempt, "this step has a checkpoint already")
        elif not any(a.committing and a.step == attempt.step for a in turn.state.uploads.attempts):
            _put_attempt(turn, replace(attempt, committing=True))
            turn.do(_publication(attempt))
            timer = f"{PUBLISH} {attempt.step} {attempt.generation}"
            turn.do(cmd.StartTimer(timer, 0, turn.policy.publish_timeout_s))


def _publication(attempt: CheckpointAttempt) -> cmd.CommitCheckpoint:
    shards = tuple(chain.from_iterable(attempt.written.values()))
    return cmd.CommitCheckpoint(attempt.step, attempt.generation, shards, attempt.tensors)


def publish_again(turn: Turn) -> None:
    """Whose outcome is not known: who was to publish it may have ended before, or after."""
    for attempt in turn.state.uploads.attempts:
        if attempt.committing:
            _put_attempt(turn, replace(attempt, again=True))
            turn.do(_publication(attempt))


def checkpoint_committed(turn: Turn, event: ev.CheckpointCommitted) -> None:
    computed_by = turn.state.lineage.generation_of(event.step)
    ref = CheckpointRef(event.step, event.url, computed_by or 0)
    _learn_write_time(turn, event)
    _settle_attempt(turn, event.step)
    older = tuple(r for r in turn.state.checkpoints if r.step != event.step)
    refs = sorted((ref, *older), key=lambda r: -r.step)
    turn.set(checkpoints=tuple(refs[: turn.policy.keep_last]))
    turn.journal(
        "checkpoint_committed",
        "every shard is there, whole by its length, and the manifest is published",
        step=event.step,
        url=event.url,
        bytes=event.bytes,
        seconds=event.seconds,
    )
    _commit_checkpoints(turn)
    finish_if_done(turn)


def _learn_write_time(turn: Turn, event: ev.CheckpointCommitted) -> None:
    """What one takes, whoever asked for it: its slowest writer's seconds, and the publishing."""
    if not turn.policy.checkpoint_auto:
        return
    before_s = _checkpoint_every_s(turn)
    attempts = [a for a in turn.state.uploads.attempts if a.step == event.step and a.committing]
    took_s = max((attempt.took_s for attempt in attempts), default=0.0)
    last = (*turn.state.uploads.writes_s, took_s + event.seconds)
    turn.set(uploads=replace(turn.state.uploads, writes_s=last[-WRITES_REMEMBERED:]))
    after_s = _checkpoint_every_s(turn)
    if before_s and after_s and abs(after_s - before_s) > 0.1 * before_s:
        turn.journal(
            "checkpoint_interval",
            f"writing one takes {_write_s(turn):.1f} s: one is due every {after_s:.0f} s, "
            f"and no longer every {before_s:.0f} s",
            every_s=round(after_s, 3),
            write_s=round(_write_s(turn), 3),
            failures=turn.state.failures,
        )


def checkpoint_damaged(turn: Turn, event: ev.CheckpointDamaged) -> None:
    """Nobody is to go on from it. Who reads it at this moment finds out, too."""
    kept = tuple(ref for ref in turn.state.checkpoints if ref.url != event.url)
    if len(kept) < len(turn.state.checkpoints):
        turn.set(checkpoints=kept)
        turn.journal("checkpoint_refused", event.reason, step=event.step, url=event.url)


def checkpoint_failed(turn: Turn, event: ev.CheckpointFailed) -> None:
    again = any(a.again and a.step == event.step for a in turn.state.uploads.attempts)
    _settle_attempt(turn, event.step)
    if again:  # that says nothing of the first time
        _note_unsettled(turn, event.step)
    turn.journal("checkpoint_failed", event.reason, step=event.step)
    _commit_checkpoints(turn)
    finish_if_done(turn)


def publish_overdue(turn: Turn, attempt: str) -> None:
    """Its outcome has not come in time: nothing waits for it any more."""
    step, generation = map(int, attempt.split())
    for overdue in turn.state.uploads.attempts:
        if (overdue.step, overdue.generation) != (step, generation):
            continue
        _close(turn, overdue)
        _note_unsettled(turn, step)
        reason = f"neither published nor refused within {turn.policy.publish_timeout_s:g} s"
        turn.journal("checkpoint_failed", reason, step=step)
        _commit_checkpoints(turn)
        finish_if_done(turn)


def _note_unsettled(turn: Turn, step: int) -> None:
    """It may yet appear."""
    uploads = turn.state.uploads
    turn.set(uploads=replace(uploads, unsettled_step=max(uploads.unsettled_step, step)))


def _settle_attempt(turn: Turn, step: int) -> None:
    if step == turn.state.uploads.unsettled_step:
        turn.set(uploads=replace(turn.state.uploads, unsettled_step=0))
    for attempt in turn.state.uploads.attempts:
        if attempt.step == step and attempt.committing:
            _close(turn, attempt)


# -------------------------------------------------------------------------------- the end


def worker_done(turn: Turn, event: ev.WorkerDone) -> None:
    rank = turn.state.ranks.get(event.worker)
    if rank is None or not is_current(turn, event.worker, event.generation):
        return
    abandon_attempts_of(turn, [event.worker], "was done")  # it writes first, then is done (I7)
    digest = event.state_digest or turn.state.state_digest
    turn.set(done=turn.state.done | 1 << rank, state_digest=digest)
    finish_if_done(turn)


def finish_if_done(turn: Turn) -> None:
    state = turn.state
    if state.phase != "running" or state.done != turn.everyone() or state.uploads.attempts:
        return
    if any(step > state.committed for step in state.pending):
        return
    if state.stopping:
        finish(turn, "stopped", f"{state.stopping}; {turn.last_good()}")
        return
    newest = max((ref.step for ref in state.checkpoints), default=0)
    said = f"all {state.committed} steps are committed"
    if turn.policy.final_checkpoint and newest < state.committed:  # what was learnt is nowhere yet
        finish(turn, "suspended", f"{said}, {UNSAVED}; {turn.last_good()}")
    else:
        finish(turn, "completed", said)


def finish(turn: Turn, status: str, reason: str) -> None:
    end = cmd.FinishJob(status, reason, turn.state.state_digest)
    turn.set(phase="ended", finish=end)
    turn.do(cmd.WantWorkers(0, ENDED))
    for worker in turn.state.ready:
        turn.do(cmd.ReleaseWorker(worker, ENDED))
    turn.journal("finished", reason, status=status)
    turn.do(end)
