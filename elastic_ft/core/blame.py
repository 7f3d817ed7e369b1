"""Generations that end before a step: what each counts for, and which joiners are done without.

One that broke with all of its members alive counts for the job; one that ended with a loss, for
the node where that was. ``max_generations_without_progress`` bounds each count: losses here and
there are what a job is to bear, a node that takes its workers again and again is not. A committed
step forgives them all. Where generations break again and again since somebody joined, the world
that made the last step goes on without those. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.core.commands import AvoidNode
from elastic_ft.core.commits import finish
from elastic_ft.core.standby import release
from elastic_ft.core.state import Turn
from elastic_ft.core.world import choose_world

# Causes of which nobody's loss is one.
BROKEN = ("collective_failed", "form_timeout", "boundary_overdue")
TRIES_MAX = 3  # generations that a joiner is in and that break, before it is blamed

# ---------------------------------------------------------------------- what is borne how often


def begin_to_count(turn: Turn) -> None:
    """A generation ends: it counts for nobody yet."""
    turn.set(blame=replace(turn.state.blame, charged=frozenset(), broke=""))


def count_end(turn: Turn, cause: str, why: str, nodes: Iterable[NodeId] = ()) -> bool:
    """A generation ends before its time; ``nodes``: where somebody was lost, if that is why.

    Returns False if it was one too many: the job has ended.
    """
    nodes = tuple(nodes)
    if nodes:
        return count_losses(turn, nodes, why)
    turn.set(blame=replace(turn.state.blame, broke=why if cause in BROKEN else ""))
    fruitless = turn.state.blame.fruitless
    if fruitless >= turn.policy.max_generations_without_progress:
        reason = f"{fruitless} generations without a committed step, the last one: {why}"
        finish(turn, "failed", f"{reason}; {turn.last_good()}")
        return False
    turn.set(blame=replace(turn.state.blame, fruitless=fruitless + 1))
    return True


def count_losses(
    turn: Turn, nodes: Iterable[NodeId], why: str, *, times: int = 1, what: str = "a loss on"
) -> bool:
    """For each of the nodes, once a generation. Returns as ``count_end`` does."""
    for node in dict.fromkeys(nodes):
        blame = turn.state.blame
        if node in blame.charged:
            continue
        count = blame.losses.get(node, 0) + times
        if count > turn.policy.max_generations_without_progress:
            ended = f"{count} generations without a committed step have ended with {what} {node}"
            finish(turn, "failed", f"{ended}, the last one: {why}; {turn.last_good()}")
            return False
        losses, charged = {**blame.losses, node: count}, blame.charged | {node}
        turn.set(blame=replace(blame, losses=losses, charged=charged))
    return True


def explain_break(turn: Turn) -> None:
    """The generation that ended last did so for a reason that has come to light since."""
    blame = turn.state.blame
    if blame.broke:
        turn.set(blame=replace(blame, broke="", fruitless=max(0, blame.fruitless - 1)))


def note_explained(turn: Turn) -> None:
    """The generation that ended last is none that broke for no known reason."""
    turn.set(blame=replace(turn.state.blame, broke=""))


def forget_losses(turn: Turn, node: NodeId) -> None:
    """The node itself is gone: it takes nobody any more."""
    blame = turn.state.blame
    losses = {where: count for where, count in blame.losses.items() if where != node}
    turn.set(blame=replace(blame, losses=losses))


# ------------------------------------------------------------------------------- joiners


def blame_joiners(turn: Turn) -> bool:
    """Everyone is paused: was it a joiner once more? Returns as ``count_end`` does.

    Those of the world that made the last step are never blamed: they have shown that they can.
    """
    state, blame, why = turn.state, turn.state.blame, turn.state.blame.broke
    note_explained(turn)
    new = [worker for worker in state.ranks if worker not in blame.proven]
    if not why or not new or len(new) == len(state.ranks):
        return True
    suspects = {worker: blame.suspects.get(worker, 0) + 1 for worker in new}
    turn.set(blame=replace(turn.state.blame, suspects=suspects))
    limit = min(TRIES_MAX, turn.policy.max_generations_without_progress)
    bad = [worker for worker, times in suspects.items() if times >= limit]
    return not bad or _leave_out(turn, bad, limit, why)


def _leave_out(turn: Turn, bad: list[WorkerId], times: int, why: str) -> bool:
    """At once, or where a joiner has some of the state, once it has given that."""
    state, for_s = turn.state, turn.policy.avoid_node_s
    nodes = {worker: state.ready[worker].node for worker in bad if worker in state.ready}
    holding = [worker for worker in nodes if state.paused.get(worker)]
    reason = (
        f"{times} generations in a row broke that it had joined, with all of their members alive, "
        f"the last one: {why}; no worker is started on its node for {for_s:g} s"
    )
    turn.set(leaving={**state.leaving, **dict.fromkeys(holding, reason)})
    if holding and isinstance(choose_world(turn), str):  # without their state there is no way on
        turn.set(leaving=state.leaving)
        return True
    for worker, node in nodes.items():
        turn.journal("worker_left_out", reason, worker=worker, node=node)
        if worker not in holding:
            release(turn, worker, reason)
    for node in dict.fromkeys(nodes.values()):
        turn.do(AvoidNode(node, for_s, reason))
    blame = turn.state.blame  # they count for the nodes instead
    turn.set(blame=replace(blame, fruitless=max(0, blame.fruitless - times)))
    what = "workers left out on"
    return count_losses(turn, nodes.values(), why, times=times, what=what)
