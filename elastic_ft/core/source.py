"""Which step to go on from, and who has each shard of it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from elastic_ft.core.assignment import TIER_ORDER, CheckpointRef, Holding, Source, Tier
from elastic_ft.core.layouts.layout import Layout

# (holder or URL, step, shard) whose state proved damaged; no shard: all that it has of the step.
RefusedSources = frozenset[tuple[str, int, str]]
HoldersByTier = tuple[tuple[str, Tier], ...]  # of one shard, nearest tier first
StateAt = tuple[int, int, str]  # step, generation that computed it, shard space


def choose(
    holdings: Mapping[str, Sequence[Holding]],
    checkpoints: Sequence[CheckpointRef],
    refused: RefusedSources = frozenset(),
) -> tuple[Source, str]:
    """Returns the newest state that is complete, and the reason in words.

    A step is complete in memory when every shard of one shard space has a holder, all of them as
    one generation computed it. Memory wins over a checkpoint of the same or an older step, a later
    generation's state of a step over an earlier one's, and near memory over far. Shards that no
    memory has come from a checkpoint of the same state; with nothing, step 0 is made from the seed.
    """
    held = _by_state_and_space(holdings, refused)
    usable = [ref for ref in checkpoints if (ref.url, ref.step, "") not in refused]
    checkpoint = max(usable, key=lambda ref: ref.step, default=None)
    floor = checkpoint.step if checkpoint else 0
    if checkpoint is not None:
        _fill(held, checkpoint)
    skipped = []
    for step, generation, space in sorted(
        held, key=lambda key: (-key[0], -key[1], *_reach(held[key]), key[2])
    ):
        if step < floor or (checkpoint is None and step == 0):
            break
        shards = held[step, generation, space]
        missing = sorted(Layout.of_shard_space(space).shards() - shards.keys())
        if missing:
            skipped.append(f"step {step} lacks {', '.join(missing)}")
            continue
        farthest = TIER_ORDER[_reach(shards)[0]]
        if farthest is Tier.CHECKPOINT:
            assert checkpoint is not None
            read = sorted(shard for shard, who in shards.items() if who[0][1] is farthest)
            why = f"step {step} is in memory but for {', '.join(read)}: from its checkpoint"
            source = Source(step, farthest, space, shards, checkpoint.url, generation)
            return source, _because(why, skipped)
        why = f"step {step} is complete in memory, farthest tier {farthest}"
        source = Source(step, farthest, space, shards, generation=generation)
        return source, _because(why, skipped)
    if checkpoint is not None:
        why = f"nothing newer than checkpoint {checkpoint.step} is complete in memory"
        ref = checkpoint
        source = Source(ref.step, Tier.CHECKPOINT, url=ref.url, generation=ref.generation)
        return source, _because(why, skipped)
    return Source(0, Tier.INITIAL), _because("no state is held and no checkpoint is good", skipped)


def missing_of(
    holdings: Mapping[str, Sequence[Holding]], refused: RefusedSources, newer_than: int
) -> dict[StateAt, int]:
    """Of each state newer than a step, how many of its shards nobody has."""
    return {
        cut: len(Layout.of_shard_space(cut[2]).shards() - shards.keys())
        for cut, shards in _by_state_and_space(holdings, refused).items()
        if cut[0] > newer_than
    }


def _reach(shards: Mapping[str, HoldersByTier]) -> tuple[int, float]:
    """The farthest tier that must be read, as an index of TIER_ORDER, and the share that it has."""
    tiers = Counter([who[0][1] for who in shards.values()])
    farthest = max(tiers, key=TIER_ORDER.index)
    return TIER_ORDER.index(farthest), tiers[farthest] / len(shards)


def _fill(held: dict[StateAt, dict[str, HoldersByTier]], checkpoint: CheckpointRef) -> None:
    """The checkpoint has each shard of its state that memory lacks, however the state is cut."""
    for (step, generation, space), shards in held.items():
        if (step, generation) == (checkpoint.step, checkpoint.generation):
            for shard in sorted(Layout.of_shard_space(space).shards() - shards.keys()):
                shards[shard] = ((checkpoint.url, Tier.CHECKPOINT),)


def _because(why: str, skipped: Iterable[str]) -> str:
    return "; ".join([why, *skipped])


def _by_state_and_space(
    holdings: Mapping[str, Sequence[Holding]], refused: RefusedSources
) -> dict[StateAt, dict[str, HoldersByTier]]:
    """Shard -> its holders, nearest tier first, by state and how it is cut.

    Of a large world most shards have one or two: as little as can be is made for each, or garbage
    collections take longer than all the rest.
    """
    by_tier: dict[Tier, tuple[list[str], list[Holding]]] = {tier: ([], []) for tier in TIER_ORDER}
    for worker, held in sorted(holdings.items()):
        for holding in held:
            if not refused or not _is_refused(worker, holding, refused):
                workers, those = by_tier[holding.tier]
                workers.append(worker)
                those.append(holding)
    found: dict[StateAt, dict[str, HoldersByTier]] = {}
    several: dict[tuple[StateAt, str], list[tuple[str, Tier]]] = {}
    cut, shards = None, {}
    for tier, some in by_tier.items():  # so that no shard's holders need sorting
        for worker, holding in zip(*some, strict=True):
            if cut != (at := (holding.step, holding.generation, holding.space)):
                cut, shards = at, found.setdefault(at, {})
            if (first := shards.get(holding.shard)) is None:
                shards[holding.shard] = ((worker, tier),)
            elif len(first) == 1:
                shards[holding.shard] = (*first, (worker, tier))
            else:
                several.setdefault((at, holding.shard), [*first]).append((worker, tier))
    for (at, shard), who in several.items():
        found[at][shard] = tuple(who)
    return found


def _is_refused(holder: str, held: Holding, refused: RefusedSources) -> bool:
    """Live state has no digest, so none that differs."""
    named = {(holder, held.step, held.shard), (holder, held.step, "")}
    return held.tier is not Tier.LIVE and not refused.isdisjoint(named)
