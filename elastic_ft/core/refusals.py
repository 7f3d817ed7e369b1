"""Workers that can't take part: their data or their device is not as the others'. Pure.

Such an error is the worker's own, and its node's; it ends the job only where so many have it that
too few workers are left to begin with. A device that fails a worker that trains costs that worker.
"""

from __future__ import annotations

from itertools import islice

from elastic_ft.core.commands import AvoidNode, KillWorker
from elastic_ft.core.commits import finish
from elastic_ft.core.events import EVERYONES, ITS_OWN, WorkerRaised
from elastic_ft.core.standby import release
from elastic_ft.core.state import Turn
from elastic_ft.core.world import wanted

UNFIT_KEPT = 256  # of the last ones it is known where they were
AVOIDED_MAX_S = 86_400.0  # of times that double


def is_its_own(turn: Turn, event: WorkerRaised) -> bool:
    """Whether it is the trouble of a worker that the others can do without: a joiner's, a spare's,
    that of any worker before the first generation, and what the worker itself says."""
    state = turn.state
    if event.whose == EVERYONES:
        return False
    if state.assignment is None:
        return True
    if event.worker in state.gone:  # late: it is out
        return False
    if event.whose == ITS_OWN:
        return True
    return not turn.takes_part(event.worker) and event.worker not in state.benched


def refuse(turn: Turn, event: WorkerRaised) -> None:
    """The worker is released; its node is avoided once that has happened there often enough."""
    state, worker = turn.state, event.worker
    if worker in state.unfit:
        return
    node = event.node or (state.ready[worker].node if worker in state.ready else "")
    times = _count(turn, worker, node, event.error)
    fields = {"worker": worker, "node": node, "times": times, "frames": list(event.frames)}
    turn.journal("worker_refused", event.error, **fields)
    if state.assignment is None and _is_hopeless(turn, worker):
        finish(turn, "failed", f"{worker}: {event.error}; {turn.last_good()}")
        return
    release(turn, worker, f"it can't take part: {event.error}")
    _avoid_if_due(turn, node, times, event.error)


def lose_device(turn: Turn, event: WorkerRaised) -> None:
    """The worker can use its GPU no more, and ends: a GPU needs another process after an error.
    Its node is avoided once that has happened there often enough."""
    node = event.node or turn.state.ready[event.worker].node
    times = _count(turn, event.worker, node, event.error)
    fields = {"worker": event.worker, "node": node, "times": times, "step": event.step}
    turn.journal("device_lost", event.error, **fields)
    turn.do(KillWorker(event.worker, event.error))
    _avoid_if_due(turn, node, times, event.error)


def _count(turn: Turn, worker: str, node: str, error: str) -> int:
    """Returns how many workers were unfit on ``node`` so far."""
    before = turn.state.unfit
    kept = islice(before.items(), max(0, len(before) + 1 - UNFIT_KEPT), None)
    unfit = {**dict(kept), worker: node}
    turn.set(unfit=unfit, unfit_why=f"{worker}: {error}")
    return sum(where == node for where in unfit.values())


def _avoid_if_due(turn: Turn, node: str, times: int, error: str) -> None:
    policy = turn.policy
    if node and times >= policy.max_node_failures:
        doubled = min(times - policy.max_node_failures, 16)
        for_s = max(policy.avoid_node_s, min(AVOIDED_MAX_S, policy.avoid_node_s * 2.0**doubled))
        reason = (
            f"{times} workers could not take part there, the last one: {error}; "
            f"no worker is started there for {for_s:g} s"
        )
        turn.journal("node_avoided", reason, node=node)
        turn.do(AvoidNode(node, for_s, reason))


def _is_hopeless(turn: Turn, worker: str) -> bool:
    """Before the first generation: nobody is ready, and as many as are wanted have failed.

    Where some could and others not, replacements may: the timer of the start ends the wait.
    """
    ready = any(other != worker for other in turn.state.ready)
    return not ready and len(turn.state.unfit) >= wanted(turn)
