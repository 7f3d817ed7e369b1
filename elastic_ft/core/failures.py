"""What breaks a generation: a worker, node or keeper lost; what a worker raises or finds.

Pure. Planned changes are with ``membership``.
"""

from __future__ import annotations

from dataclasses import replace

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import NodeId, Source, Tier, WorkerId
from elastic_ft.core.blame import explain_break, forget_losses, note_explained
from elastic_ft.core.commits import abandon_attempts_of, finish
from elastic_ft.core.generations import escalate, explain_ending, pause, who_is_late
from elastic_ft.core.keepers import await_report, forget_keeper, reads_from
from elastic_ft.core.outages import note_unreached, note_unread
from elastic_ft.core.recoveries import blame_node, note_lost
from elastic_ft.core.refusals import is_its_own, lose_device, refuse
from elastic_ft.core.standby import has_ended
from elastic_ft.core.state import Turn, is_current

# ------------------------------------------------------------------------------------ who is lost


def worker_lost(turn: Turn, event: ev.WorkerLost) -> None:
    if turn.state.phase == "starting" and event.worker not in turn.state.ready and not event.asked:
        _note_unready(turn, event.worker, event.cause)
    has_ended(turn, event.worker)
    if event.worker in turn.state.ready:  # cut off, perhaps alive: it must not come back (I1)
        turn.do(cmd.KillWorker(event.worker, f"it is lost: {event.cause}"))
    lose(turn, [event.worker], "worker_lost", event.cause, event.silent_s)


def _note_unready(turn: Turn, worker: WorkerId, cause: str) -> None:
    """It was in no world, so no other line tells why a job does not start. Of one worker several
    say what they saw."""
    known = turn.state.unfit_why
    if not known.startswith(f"{worker}: "):
        if worker not in turn.state.gone:
            turn.set(unfit_why=f"{worker}: {cause}")
    elif cause not in known:
        turn.set(unfit_why=f"{known}, {cause}")


def worker_hung(turn: Turn, event: ev.WorkerHung) -> None:
    if event.worker in turn.state.ready:
        turn.do(cmd.KillWorker(event.worker, event.reason))
    lose(turn, [event.worker], "worker_hung", event.reason, event.silent_s)


def node_lost(turn: Turn, event: ev.NodeLost) -> None:
    state = turn.state
    gone = [m.worker for m in state.ready.values() if m.node == event.node]
    turn.journal("node_lost", event.cause, node=event.node, workers=gone)
    for worker in gone:  # cut off, perhaps still running: it must not come back (I1)
        turn.do(cmd.KillWorker(worker, f"node {event.node} is lost"))
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
    lose(turn, gone, "node_lost", event.cause)
    if is_read and turn.state.generation == state.generation:  # none of its workers takes part
        _stop_reading(turn, event.node)


def pause_overdue(turn: Turn) -> None:
    late = who_is_late(turn)
    if not late:
        return
    for worker in late:
        turn.do(cmd.KillWorker(worker, "it reached no safe point in time"))
    lose(turn, late, "worker_hung", "it reached no safe point in time")


def lose(
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
        await_report(turn, node, worker, out_since[worker])
        turn.journal(event, reason, worker=worker, node=node, rank=before.ranks.get(worker))
    abandon_attempts_of(turn, gone)
    why = f"{', '.join(involved)}: {reason}"
    if involved and before.phase in ("running", "forming"):
        pause(turn, cause, why, abort=True, noticed_s=noticed_s, nodes=nodes)
    elif involved and before.phase == "pausing":
        explain_ending(turn, why, nodes)
    if turn.state.episode:
        note_lost(turn, involved, cause, noticed_s)


def keeper_lost(turn: Turn, event: ev.KeeperLost) -> None:
    lose_keeper(turn, event.node, event.cause)


def lose_keeper(turn: Turn, node: NodeId, cause: str) -> None:
    """``cause`` as of ``KeeperLost``."""
    if node not in turn.state.keepers:
        return
    what = "until there is another, its workers keep their snapshots themselves"
    reason = f"{cause}: {what}" if cause else what
    turn.journal("keeper_lost", reason, node=node)
    is_read = reads_from(turn, node)
    forget_keeper(turn, node)
    if is_read:
        _stop_reading(turn, node)


def _stop_reading(turn: Turn, node: NodeId) -> None:
    """Its keeper may be stopped, or its machine gone: who asks it would wait for long."""
    reason = f"the keeper of {node}, from which a shard is read, is lost"
    pause(turn, "keeper_lost", reason, abort=True, nodes=(node,))


# --------------------------------------------------------------------------- what a worker raises


def worker_raised(turn: Turn, event: ev.WorkerRaised) -> None:
    state = turn.state
    if is_its_own(turn, event):
        _refuse_worker(turn, event)
        return
    everyones = event.whose == ev.EVERYONES and state.assignment is None
    if not everyones and not is_current(turn, event.worker, event.generation):
        return
    if everyones or event.usage:
        finish(turn, "failed", f"{event.worker}: {event.error}; {turn.last_good()}")
        return
    count = _count_failure(turn, event)
    if event.whose == ev.ITS_DEVICE:
        lose_device(turn, event)
    else:
        _journal_raised(turn, event, count)
    if count > turn.policy.max_user_failures:
        again = f", {count} times in a row" if count > 1 else ""
        reason = f"{event.worker} raised at step {event.step}{again}: {event.error}"
        finish(turn, "failed", f"{reason}; {turn.last_good()}")
    elif event.whose == ev.ITS_DEVICE:
        lose(turn, [event.worker], "worker_lost", event.error)
    elif state.phase in ("running", "forming"):
        pause(turn, "worker_raised", f"{event.worker} raised: {event.error}", abort=True)
    elif state.phase == "pausing":
        note_explained(turn)  # by that
        if not state.abort:
            escalate(turn, f"{event.worker} raised: {event.error}")


def _count_failure(turn: Turn, event: ev.WorkerRaised) -> int:
    """Returns how many generations in a row something was raised at this step."""
    step, count, generation = turn.state.user_failures
    if generation != event.generation:  # else another rank raises the same
        # The step after it as well: what raises once a step is applied may find it kept.
        count = count + 1 if step <= event.step <= step + 1 else 1
        turn.set(user_failures=(event.step, count, event.generation))
    return count


def _journal_raised(turn: Turn, event: ev.WorkerRaised, times: int) -> None:
    fields = {"worker": event.worker, "step": event.step, "times": times}
    turn.journal("worker_raised", event.error, **fields, frames=list(event.frames))


def _refuse_worker(turn: Turn, event: ev.WorkerRaised) -> None:
    nodes = [m.node for m in turn.members if m.worker == event.worker]
    involved, why = event.worker in turn.live_members(), f"{event.worker}: {event.error}"
    refuse(turn, event)
    if involved and turn.state.phase in ("running", "forming"):
        pause(turn, "worker_refused", why, abort=True, nodes=nodes)
    elif involved and turn.state.phase == "pausing":
        explain_ending(turn, why, nodes)


# ---------------------------------------------------------------------------- what a worker finds


def source_refused(turn: Turn, event: ev.SourceRefused) -> None:
    """Also late, once the generation that found it was given up: the next must not try it again."""
    state = turn.state
    is_late = state.phase == "pausing"
    if not is_current(turn, event.worker, event.generation):
        return
    if state.phase != "forming" and not is_late:
        return
    assert state.assignment is not None
    source = state.assignment.source
    is_unread = event.kind == ev.UNREACHABLE
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
        turn.set(refused=state.refused | {entry})
        note_explained(turn)
        _strike(turn, source, event)
    if not is_late:
        reason = f"{event.holder}: {event.reason}"
        pause(turn, "source_refused", reason, abort=True, counts=not is_unread)


def _strike(turn: Turn, source: Source, event: ev.SourceRefused) -> None:
    """It is damaged: nobody is to go on from it."""
    if source.tier is Tier.CHECKPOINT and event.holder == source.url:
        kept = tuple(ref for ref in turn.state.checkpoints if ref.url != event.holder)
        turn.set(checkpoints=kept)
        turn.journal("checkpoint_refused", event.reason, step=source.step, url=event.holder)
    else:
        turn.journal("source_refused", event.reason, step=source.step, holder=event.holder)
