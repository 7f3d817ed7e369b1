"""Keepers, and what ended workers left with them: the only writer of ``State.left``. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from elastic_ft.core.assignment import Holding, NodeId, Tier, WorkerId
from elastic_ft.core.commands import DropKept, UseKeeper
from elastic_ft.core.events import KeeperHolds, KeeperReady, StepHeld, Unkept
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.records import Lacking, LeftBy, PendingStep
from elastic_ft.core.source import StateAt
from elastic_ft.core.state import Turn

Holder = TypeVar("Holder")

# ------------------------------------------------------------------------- a keeper


def keeper_ready(turn: Turn, event: KeeperReady) -> None:
    keeper = event.keeper
    forget_keeper(turn, keeper.node)
    turn.set(keepers={**turn.state.keepers, keeper.node: keeper})
    turn.journal(
        "keeper_ready", "snapshots of its node's workers outlive them now", node=keeper.node
    )
    for member in turn.state.ready.values():
        if member.node == keeper.node:
            turn.do(UseKeeper(member.worker, keeper))


def unkept(turn: Turn, event: Unkept) -> None:
    """Until a step is held by a keeper again, none waits for this worker's."""
    state = turn.state
    if event.worker not in state.ready or event.worker in state.unkept:
        return
    others = frozenset(worker for worker in state.unkept if worker in state.ready)
    turn.set(unkept=others | {event.worker})
    node = state.ready[event.worker].node
    turn.journal("snapshots_unkept", event.reason, worker=event.worker, node=node)


def reads_from(turn: Turn, node: NodeId) -> bool:
    """Whether the forming generation gets a shard from the node's keeper, as no worker has it."""
    state = turn.state
    keeper = state.keepers.get(node)
    if state.phase != "forming" or state.assignment is None or keeper is None:
        return False
    shards = state.assignment.source.holders.values()
    left = [who[0][0] for who in shards if who and all(tier is Tier.KEEPER for _, tier in who)]
    return any(holder.startswith(f"{keeper.name}/") for holder in left)


def forget_keeper(turn: Turn, node: NodeId) -> None:
    left, adoption = turn.state.left, turn.state.adoption
    if adoption is not None and node in adoption.keepers:
        turn.set(adoption=replace(adoption, keepers=adoption.keepers.without([node])))
    turn.set(
        keepers={n: keeper for n, keeper in turn.state.keepers.items() if n != node},
        left=replace(
            left,
            shards={pair: held for pair, held in left.shards.items() if pair[0] != node},
            awaited={pair: since for pair, since in left.awaited.items() if pair[0] != node},
            early=frozenset(pair for pair in left.early if pair[0] != node),
        ),
    )


# ------------------------------------------------------------- what its workers left


def await_report(turn: Turn, node: NodeId, worker: WorkerId, since: int) -> None:
    """``worker`` is lost: its keeper may have told already, or will.

    Args:
        since: the first generation that the worker had no part in.
    """
    left, pair = turn.state.left, (node, worker)
    if pair in left.early:
        turn.set(left=replace(left, early=left.early - {pair}))
    elif node in turn.state.keepers:
        turn.set(left=replace(left, awaited={**left.awaited, pair: since}))


def keeper_holds(turn: Turn, event: KeeperHolds) -> None:
    """Notes what an ended worker left; repeats are ignored."""
    _note_left(turn, event)
    _look_if_decisive(turn, event)


def _note_left(turn: Turn, event: KeeperHolds) -> None:
    state, left, pair = turn.state, turn.state.left, (event.node, event.worker)
    if event.node not in state.keepers:
        return
    if (pair in left.early or pair in left.shards) and not _is_newer(turn, event):
        return
    early = left.early
    if event.worker in state.ready:  # the keeper saw it first
        early = early | {pair}
    elif pair not in left.awaited:  # it was released, or the wait has ended
        drop_left(turn, [pair])
        return
    steps = {
        (line.step, line.generation): PendingStep(
            line.generation, line.world_size, line.layout, line.metrics
        )
        for line in event.record
    }
    turn.set(
        left=replace(
            left,
            shards={**left.shards, pair: event.holdings},
            awaited={other: since for other, since in left.awaited.items() if other != pair},
            early=early,
            steps=left.steps | steps,
        )
    )
    drop_left(turn, _void(turn, {pair: event.holdings}))


def _is_newer(turn: Turn, event: KeeperHolds) -> bool:
    """Than what the keeper told of this worker before, taking it for ended: it lived, and has used
    the keeper again since the controller changed."""
    known = turn.state.left.shards.get((event.node, event.worker))
    if known is None:
        return any(held.step >= turn.state.committed for held in event.holdings)
    before, now = (
        max(((held.generation, held.step) for held in some), default=(0, 0))
        for some in (known, event.holdings)
    )
    return now > before


def note_held(turn: Turn, event: StepHeld) -> None:
    """What a keeper told of a worker, taking it for ended, was not its last word, where that holds
    a newer step and may use the keeper again, since the controller changed."""
    state, left = turn.state, turn.state.left
    member = state.ready.get(event.worker)
    if member is None or state.adoption is None or (member.node, event.worker) not in left.early:
        return
    pair = (member.node, event.worker)
    told = [(held.generation, held.step) for held in left.shards.get(pair, ())]
    if (event.generation, event.step) > max(told, default=(0, 0)):
        turn.set(left=replace(left, early=left.early - {pair}))


def drop_left(turn: Turn, pairs: Iterable[LeftBy]) -> None:
    gone = sorted(pairs)
    for node, worker in gone:
        turn.do(DropKept(node, worker))
    if gone:
        left = turn.state.left
        kept = {pair: held for pair, held in left.shards.items() if pair not in gone}
        turn.set(left=replace(left, shards=kept))


def drop_old(turn: Turn) -> None:
    """A later step is safe: what ended workers left of earlier ones has no use any more, and no
    word of it is awaited."""
    shards, committed = turn.state.left.shards, turn.state.committed
    drop_left(turn, [by for by, held in shards.items() if all(h.step < committed for h in held)])
    if awaited := turn.state.left.awaited:
        last = {pair: turn.state.lineage.last_before(since) for pair, since in awaited.items()}
        kept = [pair for pair, step in last.items() if step is None or step >= committed]
        still = {pair: awaited[pair] for pair in kept}
        turn.set(left=replace(turn.state.left, awaited=still))


def forget_void(turn: Turn) -> None:
    """Frees what the dead left of steps that were trained again, and what is known of old ones."""
    state, left = turn.state, turn.state.left
    steps = {known: line for known, line in left.steps.items() if known[0] > state.committed}
    turn.set(left=replace(left, steps=steps))
    drop_left(turn, _void(turn, left.shards))


def _void(turn: Turn, shards: Mapping[LeftBy, tuple[Holding, ...]]) -> set[LeftBy]:
    """Of these, what has nothing but steps that were trained again. Those after the last committed
    one count again if the newest generation comes to nothing (``restoring.choose_source``)."""
    lineage, committed = turn.state.lineage, turn.state.committed
    good = [of_this_history(one, shards) for one in (lineage, lineage.up_to(committed))]
    return shards.keys() - good[0].keys() - good[1].keys()


def of_this_history(
    lineage: Lineage, holdings: Mapping[Holder, tuple[Holding, ...]]
) -> dict[Holder, tuple[Holding, ...]]:
    """Without the steps that were trained again, whoever still has them, and has not heard of it.

    Holders that have nothing else are left out.
    """
    states = {(h.step, h.generation) for held in holdings.values() for h in held}
    good = {state for state in states if lineage.has(*state)}
    if good == states:
        return {holder: held for holder, held in holdings.items() if held}
    kept = {
        holder: tuple(h for h in held if (h.step, h.generation) in good)
        for holder, held in holdings.items()
    }
    return {holder: held for holder, held in kept.items() if held}


# ------------------------------------------------------------------ waiting for word


def awaited_beyond(turn: Turn, step: int) -> list[WorkerId]:
    """Whose keepers may yet tell of something newer."""
    return list(_awaited(turn, step))


def _awaited(turn: Turn, step: int) -> Iterator[WorkerId]:
    for (_, worker), since in turn.state.left.awaited.items():
        last = turn.state.lineage.last_before(since)
        if last is None or last > step:
            yield worker


def await_keepers(turn: Turn, step: int, missing: Mapping[StateAt, int]) -> None:
    """Committed steps after ``step`` are not given up before keepers have told, or the timer fires.

    Args:
        missing: of each state newer than ``step``, how many of its shards nobody is known to have.
    """
    lacking = Lacking(step, frozenset(missing), min(missing.values(), default=1))
    turn.set(left=replace(turn.state.left, lacking=lacking))
    who = ", ".join(sorted(awaited_beyond(turn, step)))
    reason = (
        f"{who} may have left a newer state than step {step} with a keeper: its word is awaited"
    )
    turn.journal("awaiting_keeper", reason)
    turn.timer("keeper", turn.policy.pause_timeout_s)


def _look_if_decisive(turn: Turn, event: KeeperHolds) -> None:
    """Ends the wait for keepers, if there is one, where this may: by what it has, or as the last.

    To look what there is takes long in a large world, and as many tell as it had workers.
    """
    lacking = turn.state.left.lacking
    if lacking is None:
        return
    newer = [held for held in event.holdings if held.step > lacking.step]
    least = lacking.holdings - len(newer)
    is_known = {(held.step, held.generation, held.space) for held in newer} <= lacking.cuts
    is_last = next(_awaited(turn, lacking.step), None) is None
    ends = is_last or least <= 0 or not is_known
    still = None if ends else replace(lacking, holdings=least)
    turn.set(left=replace(turn.state.left, lacking=still))


def stop_awaiting(turn: Turn) -> None:
    """What keepers have not told by now comes too late."""
    turn.set(left=replace(turn.state.left, awaited={}, lacking=None))


def look_again(turn: Turn) -> None:
    """No keeper is waited for until it is known again that one must be."""
    if turn.state.left.lacking is not None:
        turn.set(left=replace(turn.state.left, lacking=None))
