"""What the next generation starts from: whose state, of which step, and what that makes void.

Pure; ``generations`` says when. What ended workers left is with ``keepers``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from elastic_ft.core.assignment import Assignment, Holding, Member, Source, Tier
from elastic_ft.core.commands import RollBack
from elastic_ft.core.keepers import await_keepers, awaited_beyond, of_this_history
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.records import PendingStep, Writers
from elastic_ft.core.source import choose, missing_of
from elastic_ft.core.state import Turn

WRITERS_KEPT = 4  # generations whose checkpoints may still be on their way

# ------------------------------------------------------------------------------ the source


def choose_source(turn: Turn) -> tuple[Source, str]:
    """From what the living hold; from what the dead left too where that is better.

    Committed steps are not given up for the sake of a generation that began, and of whose steps
    nothing is left: then those that the one before it had computed, after the last committed one,
    count again.
    """
    state = turn.state
    found = _choose(turn, state.lineage)
    if found[0].step >= state.committed:
        return found
    before = _choose(turn, state.lineage.up_to(state.committed))
    return before if before[0].step >= state.committed else found


def lineage_of(turn: Turn, source: Source) -> Lineage:
    """The history that ``source`` is of."""
    lineage = turn.state.lineage
    is_of_it = lineage.has(source.step, source.generation)
    return lineage if is_of_it else lineage.up_to(turn.state.committed)


def _choose(turn: Turn, lineage: Lineage) -> tuple[Source, str]:
    state, (held, left) = turn.state, _known_holdings(turn, lineage)
    found = choose(held, state.checkpoints, state.refused)
    if not state.left.shards:
        return found
    with_left = choose(held | left, state.checkpoints, state.refused)
    if not _is_better(with_left[0], found[0]):
        return found
    if state.unreached:  # others have the same, perhaps
        reached = choose(held | left, state.checkpoints, state.refused | state.unreached.keys())
        return with_left if _is_better(with_left[0], reached[0]) else reached
    return with_left


Holdings = dict[str, tuple[Holding, ...]]


def _known_holdings(turn: Turn, lineage: Lineage) -> tuple[Holdings, Holdings]:
    """Of this history: the living's, and what the dead left."""
    state = turn.state
    held = {worker: held for worker, held in state.paused.items() if worker in state.ready}
    left = {
        state.keepers[n].left_by(worker): some for (n, worker), some in state.left.shards.items()
    }
    return of_this_history(lineage, held), of_this_history(lineage, left)


def _is_better(one: Source, other: Source) -> bool:
    """A later step, or the same one from memory rather than from the store."""
    far = [source.tier is Tier.CHECKPOINT for source in (one, other)]
    return (one.step, not far[0]) > (other.step, not far[1])


def is_worth_waiting(turn: Turn, step: int) -> bool:
    """Something newer than ``step`` may turn up: committed steps aren't given up before that."""
    if _is_publishing(turn, step):
        up_to = f"for up to {turn.policy.publish_timeout_s:g} s"
        reason = f"a checkpoint newer than step {step} is being published: it is awaited {up_to}"
        turn.journal("awaiting_checkpoint", reason)
        return True
    if not awaited_beyond(turn, step):
        return False
    held, left = _known_holdings(turn, turn.state.lineage)
    await_keepers(turn, step, missing_of(held | left, turn.state.refused, step))
    return True


def _is_publishing(turn: Turn, step: int) -> bool:
    """Whether a checkpoint newer than ``step`` may appear: rolling back past it would leave one
    ahead of the recorded steps. Its outcome, or the timer of ``commits``, ends the wait (I7)."""
    return any(a.committing and a.step > step for a in turn.state.uploads.attempts)


def no_way_on(recorded: int, why: str, broke: str = "") -> str:
    """The seed is no source once steps are recorded: going back to it is the user's decision.
    ``broke``: what training broke off with, which is what the user has to see to first."""
    way = f"{why}, and {recorded} steps are recorded; --from-scratch begins anew"
    return f"{way}; training broke off: {broke}" if broke else way


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
    said = said if said.generation == generation else unheard
    return said if said.metrics else state.left.steps.get((step, generation), said)


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
    reason = f"{lost} committed steps are lost with all who held their state: {why}"
    turn.do(RollBack(step, reason))
    turn.journal("rolled_back", reason, step=step, steps_lost=lost)
    turn.set(committed=step)
    if turn.state.episode:
        total = turn.state.episode.steps_lost + lost
        turn.set(episode=replace(turn.state.episode, steps_lost=total))


# ---------------------------------------------------------------------- what the dead left
