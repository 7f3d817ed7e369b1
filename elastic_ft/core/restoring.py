"""What the next generation starts from: whose state, of which step, and what that makes void.

Pure, like all of the core; ``membership`` says when. What ended workers left with their nodes'
keepers is accounted for here, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from elastic_ft.core.commits import drop_left
from elastic_ft.core.events import (
    Assignment,
    Holding,
    KeeperHolds,
    KeeperReady,
    Member,
    NodeId,
    RollBack,
    Source,
    Tier,
    Unkept,
    UseKeeper,
    WorkerId,
)
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.source import choose, missing_of
from elastic_ft.core.state import Lacking, PendingStep, Turn, Writers

Holder = TypeVar("Holder")

WRITERS_KEPT = 4  # generations whose checkpoints may still be on their way

# ------------------------------------------------------------------------------ the source


def choose_source(turn: Turn) -> tuple[Source, str]:
    """From what the living hold; from what the dead left too where that is better."""
    state, (held, left) = turn.state, _known_holdings(turn)
    found = choose(held, state.checkpoints, state.refused)
    if not state.left:
        return found
    with_left = choose(held | left, state.checkpoints, state.refused)
    if not _is_better(with_left[0], found[0]):
        return found
    if state.unreached:  # others have the same, perhaps
        reached = choose(held | left, state.checkpoints, state.refused | state.unreached.keys())
        return with_left if _is_better(with_left[0], reached[0]) else reached
    return with_left


Holdings = dict[str, tuple[Holding, ...]]


def _known_holdings(turn: Turn) -> tuple[Holdings, Holdings]:
    """Of this history: the living's, and what the dead left."""
    state = turn.state
    held = {worker: held for worker, held in state.paused.items() if worker in state.ready}
    left = {state.keepers[n].left_by(worker): some for (n, worker), some in state.left.items()}
    return _of_this_history(state.lineage, held), _of_this_history(state.lineage, left)


def _of_this_history(
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


def _is_better(one: Source, other: Source) -> bool:
    """A later step, or the same one from memory rather than from the store."""
    far = [source.tier is Tier.CHECKPOINT for source in (one, other)]
    return (one.step, not far[0]) > (other.step, not far[1])


def is_worth_waiting(turn: Turn, step: int) -> bool:
    """Something newer than ``step`` may turn up: committed steps aren't given up before that."""
    if _is_publishing(turn, step):
        up_to = f"for up to {turn.policy.publish_timeout_s:g} s"
        reason = f"one newer than step {step} is being published, {up_to}"
        turn.journal("awaiting_checkpoint", reason)
        return True
    if newer := _awaited_beyond(turn, step):
        held, left = _known_holdings(turn)
        missing = missing_of(held | left, turn.state.refused, step)
        least = min(missing.values(), default=1)
        turn.set(lacking=Lacking(step, frozenset(missing), least))
        who = ", ".join(sorted(newer))
        turn.journal("awaiting_keeper", f"what {who} left may be newer than step {step}")
        turn.timer("keeper", turn.policy.pause_timeout_s)
        return True
    return False


def _awaited_beyond(turn: Turn, step: int) -> list[WorkerId]:
    """Whose keepers may yet tell of something newer."""
    last_of = turn.state.lineage.last_before
    awaited = ((worker, last_of(since)) for (_, worker), since in turn.state.awaited.items())
    return [worker for worker, last in awaited if last is None or last > step]


def _look_if_decisive(turn: Turn, event: KeeperHolds) -> None:
    """Ends the wait for keepers, if there is one, where this may: by what it has, or as the last.

    To look what there is takes long in a large world, and as many tell as it had workers.
    """
    lacking = turn.state.lacking
    if lacking is None:
        return
    newer = [held for held in event.holdings if held.step > lacking.step]
    least = lacking.holdings - len(newer)
    is_known = {(held.step, held.generation, held.space) for held in newer} <= lacking.cuts
    is_last = not _awaited_beyond(turn, lacking.step)
    ends = is_last or least <= 0 or not is_known
    turn.set(lacking=None if ends else replace(lacking, holdings=least))


def stop_awaiting(turn: Turn) -> None:
    """What keepers have not told by now comes too late."""
    turn.set(awaited={}, lacking=None)


def _is_publishing(turn: Turn, step: int) -> bool:
    """Whether a checkpoint newer than ``step`` may appear: rolling back past it would leave one
    ahead of the recorded steps. Its outcome, or the timer of ``commits``, ends the wait (I7)."""
    return any(a.committing and a.step > step for a in turn.state.attempts)


def no_way_on(recorded: int, why: str) -> str:
    """The seed is no source once steps are recorded: going back to it is the user's decision."""
    return f"{why}, and {recorded} steps are recorded; --from-scratch begins anew"


def needed_donors(
    turn: Turn, members: Sequence[Member], shards: Iterable[tuple[tuple[str, Tier], ...]]
) -> list[Member]:
    """Leaving workers that alone have some shard: they give it before they go."""
    staying = {m.worker for m in members}
    leaving = [holders for holders in shards if holders[0][0] not in staying]  # the nearest is
    needed = {who[0][0] for who in leaving if not any(_is_there(*each, staying) for each in who)}
    return [turn.state.ready[worker] for worker in sorted(needed)]


def _is_there(holder: str, tier: Tier, workers: set[str]) -> bool:
    return holder in workers or tier in (Tier.KEEPER, Tier.CHECKPOINT)


def held_by(source: Source, workers: set[str]) -> Source:
    """``source`` without the holders that take no part."""
    if {holder for who in source.holders.values() for holder, _ in who} <= workers:
        return source
    holders = {
        shard: tuple((holder, tier) for holder, tier in who if _is_there(holder, tier, workers))
        for shard, who in source.holders.items()
    }
    return replace(source, holders=holders)


# ------------------------------------------------------------- what is void, what stands


def recent_writers(turn: Turn, assignment: Assignment) -> dict[int, Writers]:
    """Uploads of older generations go on, for the steps that are still part of the history.

    A step that only some had applied is restored to the others: those never begin its checkpoint.
    """
    state, until = turn.state, assignment.source.step
    while until > state.committed and until in state.pending:
        if state.pending[until].applied == turn.everyone():
            break
        until -= 1
    kept = {
        generation: replace(old, until=until if old.until is None else min(old.until, until))
        for generation, old in sorted(state.writers.items())[-(WRITERS_KEPT - 1) :]
    }
    new = Writers(frozenset(m.worker for m in assignment.members))
    return kept | {assignment.generation: new}


def pending_after_restore(turn: Turn, new: Assignment) -> dict[int, PendingStep]:
    """Steps up to the restored one are in every member's state; later ones are void (I4).

    Each has an entry, even where those who reported it are gone: none is left out of the record.
    """
    everyone = (1 << len(new.members)) - 1
    return {
        step: replace(_known(turn, step, turn.state.assignment or new), applied=everyone, held=0)
        for step in range(turn.state.committed + 1, new.source.step + 1)
    }


def _known(turn: Turn, step: int, old: Assignment) -> PendingStep:
    """Of a step of this history: what its members said, else what keepers know of the dead's."""
    state = turn.state
    computed_by = state.lineage.generation_of(step)
    generation = old.generation if computed_by is None else computed_by
    unheard = PendingStep(generation, len(old.members), str(old.layout), {})
    said = state.pending.get(step, unheard)
    return said if said.metrics else state.heard.get((step, generation), said)


def count_redone(turn: Turn, step: int) -> None:
    """Steps that every member had applied, but whose state did not survive."""
    episode = turn.state.episode
    if episode is None:
        return
    everyone = turn.everyone()
    redone = [s for s, p in turn.state.pending.items() if s > step and p.applied == everyone]
    turn.set(episode=replace(episode, steps_redone=episode.steps_redone + len(redone)))


def roll_back(turn: Turn, step: int, why: str) -> None:
    lost = turn.state.committed - step
    reason = f"{lost} committed steps are lost with their holders: {why}"
    turn.do(RollBack(step, reason))
    turn.journal("rolled_back", reason, step=step, steps_lost=lost)
    turn.set(committed=step)
    if turn.state.episode:
        total = turn.state.episode.steps_lost + lost
        turn.set(episode=replace(turn.state.episode, steps_lost=total))


# ---------------------------------------------------------------------- what the dead left


def keeper_ready(turn: Turn, event: KeeperReady) -> None:
    keeper = event.keeper
    forget_keeper(turn, keeper.node)
    turn.set(keepers={**turn.state.keepers, keeper.node: keeper})
    turn.journal("keeper_ready", "snapshots outlive their worker", node=keeper.node)
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
    state = turn.state
    turn.set(
        keepers={n: keeper for n, keeper in state.keepers.items() if n != node},
        left={pair: held for pair, held in state.left.items() if pair[0] != node},
        awaited={pair: until for pair, until in state.awaited.items() if pair[0] != node},
        told=frozenset(pair for pair in state.told if pair[0] != node),
    )


def keeper_holds(turn: Turn, event: KeeperHolds) -> None:
    """Notes what an ended worker left; repeats are ignored."""
    _note_left(turn, event)
    _look_if_decisive(turn, event)


def _note_left(turn: Turn, event: KeeperHolds) -> None:
    state, pair = turn.state, (event.node, event.worker)
    if event.node not in state.keepers or pair in state.left or pair in state.told:
        return
    if event.worker in state.ready:  # the keeper saw it first
        turn.set(told=state.told | {pair})
    elif pair not in state.awaited:  # it was released, or the wait has ended
        drop_left(turn, [pair])
        return
    awaited = {p: since for p, since in state.awaited.items() if p != pair}
    heard = {
        (line.step, line.generation): PendingStep(
            line.generation, line.world_size, line.layout, line.metrics
        )
        for line in event.record
    }
    turn.set(left={**state.left, pair: event.holdings}, awaited=awaited)
    turn.set(heard=state.heard | heard)
    if not _of_this_history(state.lineage, {pair: event.holdings}):
        drop_left(turn, [pair])


def forget_void(turn: Turn) -> None:
    """Frees what the dead left of steps that were trained again, and what is known of old ones."""
    state = turn.state
    heard = {known: line for known, line in state.heard.items() if known[0] > state.committed}
    turn.set(heard=heard)
    drop_left(turn, state.left.keys() - _of_this_history(state.lineage, state.left).keys())
