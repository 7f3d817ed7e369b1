"""Another controller has the job: who is waited for, and what is said again. Pure.

A controller replays what an earlier one was told, then tells ``ControllerChanged``. Workers and
keepers, who trained on meanwhile, call it, say so (``WorkerReturned``, ``KeeperReturned``), and
tell again what nobody has acknowledged. No generation is opened for all of that, unless somebody
is missing, or the present one was being formed: its store went with the controller.

*What is said again* follows from the state alone, so whether the earlier controller said it or not:
at once what is for the host and the store, to each worker what is for it as it returns. All of it
may come twice, and does nothing then (``follower``; a publication knows its own; a keeper tells of
whatever it still has, and is told to drop it). Not said again is TakeCheckpoint: one that was not
heard is made up for by the next.

*Timers* are not started again here, but ``RETURN``: who runs the core lets those that are pending
go on, to the same unix time, and does again each AvoidNode whose time is not over. Where somebody
was to answer meanwhile, a timer that fires gets the full time from the change on (``respite_s``).

*A journal that has lost its end*, with its node, is behind what some workers have heard: they say
the newest generation that they know of, and the next one is opened above it (I1). Nothing worse is
lost: ``commands.LASTING`` waits until the journal is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.core.commits import ENDED, publish_again
from elastic_ft.core.failures import lose, lose_keeper
from elastic_ft.core.generations import pause
from elastic_ft.core.keepers import await_report, keeper_ready
from elastic_ft.core.policy import Policy
from elastic_ft.core.records import Adoption
from elastic_ft.core.state import Turn
from elastic_ft.core.table import Table
from elastic_ft.core.world import wanted

RETURN = "return"  # a timer; its name goes on with the controller's number
CAUSE = "controller_changed"


def controller_changed(turn: Turn, event: ev.ControllerChanged) -> None:
    state = turn.state
    newest = state.adoption.newest if state.adoption else 0
    workers, keepers = Table(dict.fromkeys(state.ready)), Table(dict.fromkeys(state.keepers))
    is_known = state.finish is not None or not (workers or keepers)
    turn.set(adoption=Adoption(event.controller, event.at_s, workers, keepers, newest, is_known))
    if state.finish is not None:
        turn.do(cmd.WantWorkers(0, ENDED))
        turn.do(state.finish)
        return
    where = f" {event.where}" if event.where else ""
    turn.journal(
        CAUSE,
        f"controller {event.controller}{where} goes on after step {state.committed}: "
        f"{len(workers)} workers and {len(keepers)} keepers are to call it",
        controller=event.controller,
        where=event.where,
        step=state.committed,
        workers=list(workers),
    )
    turn.do(cmd.WantWorkers(wanted(turn), "the controller has changed"))
    publish_again(turn)
    if state.phase == "forming":
        _open_next(turn, "what it was formed through went with the controller")
    timer = f"{RETURN} {event.controller}"
    turn.do(cmd.StartTimer(timer, 0, turn.policy.return_timeout_s))


def _open_next(turn: Turn, why: str) -> None:
    """Nobody's failure: it counts for nothing."""
    pause(turn, CAUSE, why, abort=True, counts=False)


# ------------------------------------------------------------------------------ who returns


def worker_returned(turn: Turn, event: ev.WorkerReturned) -> None:
    state, worker = turn.state, event.worker
    if state.finish is not None:
        turn.do(cmd.ReleaseWorker(worker, ENDED))
    elif worker in state.releasing:
        turn.do(cmd.ReleaseWorker(worker, "it was released before the controller changed"))
    elif worker in state.gone:  # whoever was to kill it may not have come to that (I1)
        turn.do(cmd.KillWorker(worker, "it was lost before the controller changed"))
    elif worker in state.ready and state.adoption is not None:
        _welcome(turn, worker, event.generation)


def _welcome(turn: Turn, worker: WorkerId, newest: int) -> None:
    adoption, phase = turn.state.adoption, turn.state.phase
    assert adoption is not None
    waiting = adoption.workers.without([worker])
    newest = max(newest, adoption.newest)
    turn.set(adoption=replace(adoption, workers=waiting, newest=newest))
    if keeper := turn.state.keepers.get(turn.state.ready[worker].node):
        turn.do(cmd.UseKeeper(worker, keeper))
    if newest > turn.state.generation and phase in ("running", "pausing"):
        _open_next(turn, f"{worker} has heard of generation {newest}, of which nothing is known")
    else:
        _say_again(turn, worker)


def _say_again(turn: Turn, worker: WorkerId) -> None:
    """What its phase asks of it, and it may not have heard."""
    state = turn.state
    if state.phase == "pausing" and turn.may_hold(worker) and worker not in state.paused:
        reason = "asked again: the controller has changed"
        turn.do(cmd.PauseWorkers(state.generation, (worker,), state.abort, reason))
    elif state.phase == "running" and turn.takes_part(worker):
        if state.stopping:
            turn.do(cmd.StopAtBoundary((worker,), state.stopping))
    elif state.phase == "running" and worker in state.benched:
        assert state.assignment is not None
        turn.do(cmd.Bench(worker, state.generation, state.assignment.source.step))


def keeper_returned(turn: Turn, event: ev.KeeperReturned) -> None:
    """One that is not known called too late, and was given up: it may have what ended members left,
    which is waited for as if they had ended now."""
    state, node = turn.state, event.keeper.node
    if state.finish is not None:
        return
    if state.keepers.get(node) != event.keeper:
        keeper_ready(turn, ev.KeeperReady(event.at_s, event.keeper))
        for member in turn.members:
            if member.node == node and member.worker not in state.ready:
                await_report(turn, node, member.worker, turn.out_since(member.worker))
    elif state.adoption is not None:
        still = state.adoption.keepers.without([node])
        turn.set(adoption=replace(state.adoption, keepers=still))


def note_complete(turn: Turn) -> None:
    """Says so once, when nobody is waited for any more."""
    adoption = turn.state.adoption
    if adoption is None or adoption.said or not adoption.is_complete:
        return
    turn.set(adoption=replace(adoption, said=True))
    took_s = round(max(0.0, turn.at_s - adoption.at_s), 4)
    reason = f"everyone has called controller {adoption.controller}, within {took_s:.1f} s"
    turn.journal("adopted", reason, controller=adoption.controller, took_s=took_s)


def return_overdue(turn: Turn, controller: str) -> None:
    """Who has not called is lost: keepers first, as what they have is not to be waited for. But one
    whose word of an ended worker is awaited has the time of that wait, like any other; and one that
    has told of such a worker's state is given up when that can't be read from it."""
    adoption = turn.state.adoption
    if adoption is None or str(adoption.controller) != controller:
        return
    if awaited := _needed(turn, adoption):
        _wait_on(turn, adoption, awaited)
        return
    left = turn.state.left
    needed = {node for node, _ in (*left.awaited, *left.shards)}
    workers = list(adoption.workers)
    nodes = [node for node in adoption.keepers if node not in needed]
    turn.set(adoption=replace(adoption, said=True))
    waited_s = turn.policy.return_timeout_s
    if adoption.waits:
        waited_s = round(turn.at_s - adoption.at_s, 1)
    why = f"it has not called the new controller within {waited_s:g} s"
    for node in nodes:
        lose_keeper(turn, node, why)
    for worker in workers:
        turn.do(cmd.KillWorker(worker, why))
    lose(turn, workers, "worker_lost", why, waited_s)


def _needed(turn: Turn, adoption: Adoption) -> list[NodeId]:
    """The nodes of which not all have called that may yet call, where committed steps may be lost
    with them: the store that says who has the job may be slow.

    Who is known to be lost counts as well: what it had, others must have.
    """
    state = turn.state
    if state.assignment is None or _looks_s(turn, adoption) <= 0:
        return []
    kept = state.keepers.keys() - adoption.keepers.keys()
    called = state.ready.keys() - adoption.workers.keys()
    awaited = dict.fromkeys(m.node for m in turn.members if m.worker in adoption.workers)
    if not state.assignment.is_cut:  # who has called has it all; so has the first one's keeper
        spared = turn.members[0].node in kept or any(m.worker in called for m in turn.members)
        return [] if spared else list(awaited)
    unheard = {m.node for m in turn.members if m.worker not in called} - kept
    nodes = {m.node for m in turn.members}
    if len(unheard) < min(turn.policy.copies, len(nodes)):
        return []
    return [node for node in awaited if node in unheard]


def _looks_s(turn: Turn, adoption: Adoption) -> float:
    """For how long, from now on, workers and keepers may look for the controller."""
    return adoption.at_s + turn.policy.controller_timeout_s - turn.at_s


def _wait_on(turn: Turn, adoption: Adoption, awaited: list[NodeId]) -> None:
    more_s = _looks_s(turn, adoption)
    if not adoption.waits:
        turn.set(adoption=replace(adoption, waits=True))
        turn.journal(
            "return_awaited",
            f"not all of {', '.join(awaited)} have called controller {adoption.controller}, and "
            f"committed steps may be lost with them: they have {more_s:.0f} s more",
            controller=adoption.controller,
            nodes=awaited,
        )
    again_s = min(turn.policy.return_timeout_s, more_s)
    turn.do(cmd.StartTimer(f"{RETURN} {adoption.controller}", 0, again_s))


# ------------------------------------------------------------------------------------ timers


def respite_s(turn: Turn, timer: str) -> float:
    """How much longer ``timer`` of the present phase is to run: its full time from the last change
    of the controller on, if somebody was to answer meanwhile; and as long as somebody looks for the
    controller, who can't answer (``RETURN`` is for who does not call). 0: its time is over."""
    adoption = turn.state.adoption
    full = _ANSWERED_WITHIN_S.get(timer)
    if adoption is None or full is None:
        return 0.0
    full_s = full(turn.policy)
    left_s = adoption.at_s + full_s - turn.at_s
    if not adoption.is_complete:
        left_s = max(left_s, _looks_s(turn, adoption))
    return min(full_s, max(0.0, left_s))


_ANSWERED_WITHIN_S: dict[str, Callable[[Policy], float]] = {
    "pause": lambda policy: policy.pause_timeout_s,
    "boundary": lambda policy: policy.boundary_timeout_s,
    "keeper": lambda policy: policy.pause_timeout_s,
}
