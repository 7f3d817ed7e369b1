"""What must hold after every event (safety). Each check looks at the truth of the simulated world,
never at what the core believes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Protocol

from elastic_ft.core.assignment import Assignment, Tier, WorkerId
from elastic_ft.core.commands import AbandonCheckpoint, CommitCheckpoint, RecordStep, RollBack
from elastic_ft.core.commits import UNSAVED
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.policy import Policy
from elastic_ft.core.source import RefusedSources
from elastic_ft.core.state import State
from elastic_ft.sim.group import Group
from elastic_ft.sim.nodes import ComputedBy, Key, ObjectStore, SimSavedShard
from elastic_ft.sim.scenario import SimScenario
from elastic_ft.sim.sim_keeper import SimKeeper, SimNode
from elastic_ft.sim.sim_worker import SimWorker


class Truth(Protocol):
    """What the checks look at."""

    scenario: SimScenario
    policy: Policy
    core: State
    store: ObjectStore
    recorded: list[tuple[int, int]]
    told_formed: set[int]
    formed: int
    stop_requested: bool
    overdue: set[int]
    nodes: list[SimNode]

    @property
    def adopts(self) -> bool: ...
    @property
    def silenced(self) -> Sequence[CommitCheckpoint]: ...
    @property
    def publishing(self) -> Sequence[CommitCheckpoint]: ...
    @property
    def groups(self) -> Mapping[int, Group]: ...
    @property
    def workers(self) -> Mapping[WorkerId, SimWorker]: ...
    def keeper_of(self, holder: str) -> tuple[SimKeeper | None, WorkerId]: ...


class SimViolation(AssertionError):
    """An invariant does not hold in the simulated world."""


def require(truth: bool, invariant: str, what: str) -> None:
    if not truth:
        raise SimViolation(f"{invariant}: {what}")


def world_is_allowed(world: Truth, assignment: Assignment) -> None:
    """Policy: as many workers as may be and are there, no more than were asked for."""
    core, policy = world.core, world.policy
    count, most = len(assignment.members), core.target or policy.max_workers
    where = f"generation {assignment.generation} of {count} workers"
    require(policy.min_workers <= count <= most, "policy", f"{where}, {most} asked for")
    require(count % policy.multiple_of == 0, "policy", f"{where}, not {policy.multiple_of}n")
    require(count == assignment.layout.world_size, "policy", f"{where}: {assignment.layout}")
    there = {w.worker for w in core.ready.values() if w.node not in core.draining}
    there -= core.leaving.keys()
    able = min(len(there), most) // policy.multiple_of * policy.multiple_of
    require(policy.planning is not None or count >= able, "policy", f"{where}, {able} are there")
    named = core.ready.keys() & core.idle.keys()
    idle = there - {member.worker for member in assignment.members}
    require(idle <= named, "I8", f"{where}: {sorted(idle - named)} idle without a reason")


def restored(worker: SimWorker, group: Group, lineage: ComputedBy) -> None:
    """I4: what a member trains on from now is the state that was chosen."""
    what = f"{worker.id} trains in generation {group.generation} on what was never filled"
    require(worker.laid is not None and worker.laid.lineage == lineage, "I4", what)


def hangs(world: Truth, name: WorkerId) -> None:
    """I6: who is well, and waits for somebody, is not taken for hung."""
    require(world.workers[name].hung, "I6", f"{name} is well, and taken for hung")


def applied(world: Truth, worker: SimWorker, group: Group, step: int) -> None:
    """I1: who can hear the controller never trains in a generation older than one that formed.

    A node cut off with a whole world of its own trains on until the cut heals and it is killed:
    that changes nothing, as its messages are refused and its uploads never published.
    """
    assert worker.live is not None
    require(
        group.generation >= world.formed or worker.node.cut or worker.node.lost,
        "I1",
        f"{worker.id} applies step {step} in generation {group.generation}, {world.formed} formed",
    )
    require(worker.live.step == step - 1, "I4", f"{worker.id} applies {step} on {worker.live.step}")


def check_formed(world: Truth, group: Group) -> None:
    """I1: a generation is taken for formed once each of its members has said so, in this one."""
    missing = sorted({worker.id for worker in group.members} - group.resumed)
    require(not missing, "I1", f"generation {group.generation} is formed without {missing}")


def left_out(world: Truth, worker: WorkerId, reason: str) -> None:
    """Fairness: where groups break, nobody is blamed who took part in the last recorded step."""
    if "broke" not in reason or not world.recorded:
        return
    group = world.groups[world.recorded[-1][1]]
    able = {member.id for member in group.members}
    require(worker not in able, "policy", f"{worker} is left out, and took part in the last step")


def same_history(world: Truth, lineage: ComputedBy, what: str) -> None:
    """I4: state never contradicts the record: the same generations computed the same steps.

    The generations stand for the samples, too: one entry per step, so one batch per step.
    """
    record = tuple(generation for _, generation in world.recorded)
    both = min(len(record), len(lineage))
    require(
        record[:both] == lineage[:both],
        "I4",
        f"{what} comes from generations {lineage}, the record from {record}",
    )


def check_recorded(world: Truth, command: RecordStep) -> None:
    """I2: every step once and in order."""
    step = command.step
    require(step == len(world.recorded) + 1, "I2", f"{step} recorded after {len(world.recorded)}")
    require(bool(command.metrics), "I2", f"{step} is recorded, and nobody knows what was in it")
    by, is_told = command.generation, command.generation in world.told_formed
    require(is_told, "I1", f"{step} is of generation {by}, which never formed as far as is told")


def survives(world: Truth, step: int) -> None:
    """I4: the state of a step that is to be recorded is there, and survives any one node."""
    members = [worker for worker in world.workers.values() if worker.id in world.core.ranks]
    if any(not worker.answers() for worker in members):
        return  # a fault is under way: what it took is not the rule's fault
    layout = world.core.assignment.layout if world.core.assignment else Layout()
    if world.policy.copies < 2 and layout.is_cut:
        return  # the user wants no second copy
    require(_complete_from(members, step), "I4", f"step {step} is recorded, but nowhere complete")
    nodes = sorted({worker.node.id for worker in members})
    for lost in combinations(nodes, min(max(world.policy.copies, 2), len(nodes)) - 1):
        rest = [worker for worker in members if worker.node.id not in lost]
        what = f"step {step} is recorded, but all copies of a shard are on {', '.join(lost)}"
        require(_complete_from(rest, step), "I4", what)


def rolled_back(world: Truth, command: RollBack) -> None:
    """I4: committed steps are given up only when no whole copy of any of them is left."""
    require(command.step < len(world.recorded), "I4", f"rolls back to {command.step}, no older")
    require(
        command.step > 0 or world.policy.from_scratch,
        "I4",
        "rolls back to the seed, and nobody has allowed that",
    )
    nothing_newer(world, command.step, f"rolls back to {command.step}")


def nothing_newer(world: Truth, step: int, what: str) -> None:
    """Nothing that is whole and good is newer than ``step``, in any memory or in the store."""
    core = world.core
    alive = [w for w in world.workers.values() if w.answers() and w.id in core.ready]
    refused = core.refused
    left = _left(world, refused)
    require(
        not _complete_from(alive, step + 1, refused, left),
        "I4",
        f"{what}, but a newer state is complete in memory",
    )
    newer = [c for c in world.store.good() if c.step > step and not c.damaged]
    require(not newer, "I4", f"{what}, but checkpoints are newer: {newer}")


def _left(world: Truth, refused: RefusedSources) -> list[tuple[Key, ComputedBy]]:
    """What keepers have of the dead that is of use: told of, or yet to be told in time."""
    found = []
    for node in world.nodes:
        keeper = node.keeper
        if keeper is None or not keeper.alive or node.id not in world.core.keepers:
            continue
        for worker, left in keeper.left.items():
            name = keeper.keeper.left_by(worker)
            if left.void or (node.cut and not left.told) or worker in world.core.ready:
                continue
            for key, copy in left.copies.items():
                entries = {(name, key[0], key[3]), (name, key[0], "")}
                if refused.isdisjoint(entries) and _agrees(world, copy.lineage):
                    found.append((key, copy.lineage))
    return found


def _agrees(world: Truth, lineage: ComputedBy) -> bool:
    record = tuple(generation for _, generation in world.recorded)
    return all(a == b for a, b in zip(record, lineage, strict=False))


def _complete_from(
    workers: Iterable[SimWorker],
    step: int,
    refused: RefusedSources = frozenset(),
    left: Iterable[tuple[Key, ComputedBy]] = (),
) -> bool:
    """Whether the workers hold every shard of one state of ``step`` or later. Deliberately dumb."""
    shards: dict[tuple[int, str, ComputedBy], set[str]] = {}
    for (number, _, space, shard), lineage in left:
        if number >= step:
            shards.setdefault((number, space, lineage), set()).add(shard)
    for worker in workers:
        for held, lineage in worker.everything():
            if held.step < step:
                continue
            if held.tier is not Tier.LIVE and (worker.id, held.step, held.shard) in refused:
                continue
            shards.setdefault((held.step, held.space, lineage), set()).add(held.shard)
    return any(
        names >= Layout.of_shard_space(space).shards() for (_, space, _), names in shards.items()
    )


def source(world: Truth, group: Group) -> ComputedBy:
    """What the listed holders really have: all of one history. Returns it."""
    chosen = group.assignment.source
    where = f"generation {group.generation}: step {chosen.step}"
    fenced = group.generation < max(world.groups)  # behind a cut, where the news has not come
    if chosen.tier is Tier.INITIAL:
        require(chosen.step == 0, "I4", f"{where} from the seed")
        return ()
    lineages: set[ComputedBy] = set()
    if chosen.tier is Tier.CHECKPOINT:
        found = [c for c in world.store.published if c.url == chosen.url]
        require(bool(found), "I5", f"{where}: {chosen.url} is not published")
        require(found[0].step == chosen.step, "I5", f"{where}: {chosen.url} is of {found[0].step}")
        lineages.add(found[0].lineage)
    for shard, holders in chosen.holders.items():
        require(bool(holders), "I4", f"{where}: nobody holds {shard}")
        for name, tier in holders:
            if tier is Tier.CHECKPOINT:
                require(name == chosen.url, "I5", f"{where}: {name} is another checkpoint")
                continue
            key = (chosen.step, chosen.generation, chosen.space, shard)
            lineage = _lineage_at(world, group, name, key, tier)
            if lineage is not None:
                lineages.add(lineage)
    if chosen.holders:
        missing = Layout.of_shard_space(chosen.space).shards() - chosen.holders.keys()
        require(not missing, "I4", f"{where}: nobody is asked for {sorted(missing)}")
    require(len(lineages) < 2, "I4", f"{where} is mixed from {len(lineages)} histories")
    if not lineages:
        return ()  # all of it was with keepers that died meanwhile: it is refused
    (lineage,) = lineages
    require(len(lineage) == chosen.step, "I2", f"{where} consumed {len(lineage)} batches")
    require(
        lineage[-1:] == (chosen.generation,)[: chosen.step],
        "I4",
        f"{where} of generation {chosen.generation} is really of {lineage[-1:]}",
    )
    refused = chosen.tier is Tier.CHECKPOINT and world.store.is_damaged(chosen.url)
    if not fenced and not refused:
        same_history(world, lineage, f"{where}, the source")
    return lineage


def _lineage_at(world: Truth, group: Group, name: str, key: Key, tier: Tier) -> ComputedBy | None:
    """What a holder has. None: it was with a keeper that died meanwhile, and is refused."""
    if tier is Tier.KEEPER:
        keeper, worker = world.keeper_of(name)
        return keeper.lineage_of(worker, key) if keeper else None
    where = f"generation {group.generation}: {name}"
    require(name in group.all, "I4", f"{where} takes no part")
    lineage = group.all[name].lineage_of(key, tier)
    require(lineage is not None, "I4", f"{where} has no {key} in {tier}")
    return lineage


def rescued(
    world: Truth, step: int, shards: Iterable[SimSavedShard], since: Iterable[RecordStep]
) -> ComputedBy:
    """I4, I2: what keepers had saved is of one history, the record's, and leaves no hole in that.

    Returns its history. ``since``: the steps that are recorded with it.
    """
    what, record = f"step {step}, saved by keepers,", [number for number, _ in world.recorded]
    lineages = {shard.lineage for shard in shards}
    require(len(lineages) == 1, "I4", f"{what} is mixed from {len(lineages)} histories")
    lineage: ComputedBy = lineages.pop()
    require(len(lineage) == step, "I2", f"{what} consumed {len(lineage)} batches")
    same_history(world, lineage, what)
    for line in since:
        record.append(line.step)
        right = line.generation == lineage[line.step - 1] and bool(line.metrics)
        require(right, "I2", f"{what} is recorded with {line}")
    require(record == [*range(1, max(step, len(record)) + 1)], "I2", f"{what} is on {record}")
    return lineage


def nothing_saved_is_newer(world: Truth, saved: Iterable[SimSavedShard], chosen: int) -> None:
    """I4: no later state than ``chosen`` is whole, of this history, and known up to there."""
    shards: dict[tuple[int, str, ComputedBy], set[str]] = {}
    known = {number for number, _ in world.recorded}
    for one in saved:
        (step, _, space, shard), lineage = one.key, one.lineage
        if step > chosen and _agrees(world, lineage):
            shards.setdefault((step, space, lineage), set()).add(shard)
            known |= one.record.keys()
    passed_over = [
        step
        for (step, space, _), names in shards.items()
        if names >= Layout.of_shard_space(space).shards() and known >= set(range(1, step + 1))
    ]
    what = f"keepers had saved steps {passed_over}, the next one has {chosen}"
    require(not passed_over, "I4", what)


def published(world: Truth, command: CommitCheckpoint) -> ComputedBy:
    """I5: whole, of one state, and not ahead of the record. Returns its history."""
    what = f"the checkpoint of step {command.step}"
    require(command.step <= len(world.recorded), "I5", f"{what} is ahead of {len(world.recorded)}")
    require(bool(command.shards), "I5", f"{what} is empty")
    spaces = {entry["space"] for entry in command.shards}
    lineages = {tuple(entry["lineage"]) for entry in command.shards}
    require(len(spaces) == 1 and len(lineages) == 1, "I5", f"{what} is a mixture")
    names = {entry["shard"] for entry in command.shards}
    require(names == Layout.of_shard_space(spaces.pop()).shards(), "I5", f"{what} has {names}")
    lineage: ComputedBy = lineages.pop()
    require(len(lineage) == command.step, "I5", f"{what} holds step {len(lineage)}")
    same_history(world, lineage, what)
    return lineage


def attempt_dropped(world: Truth, command: AbandonCheckpoint) -> None:
    """I5: its shards are deleted, so nobody publishes it, or has."""
    step, generation = command.step, command.generation
    there = [c for c in world.store.good() if c.url.startswith(f"mem://{step}-{generation}-")]
    asked = [c for c in world.publishing if (c.step, c.generation) == (step, generation)]
    what = f"the checkpoint of step {step}, generation {generation}, is abandoned: {command.reason}"
    require(not there and not asked, "I5", what)


def finished(world: Truth, status: str, reason: str) -> None:
    """The job is done, and every member ends with the state that the record describes."""
    if world.stop_requested and status == "stopped":
        return
    if status == "failed" and "--from-scratch" in reason and not world.policy.from_scratch:
        nothing_newer(world, 0, "ends for want of any state")
        return
    unheard = bool(world.silenced) or world.adopts
    if status == "suspended" and unheard and "may yet be published" in reason:
        return
    steps = world.scenario.steps
    if status == "suspended" and UNSAVED in reason:
        is_true = steps in world.overdue or bool(world.silenced)
        require(is_true, "I5", f"nothing has kept the last state from a checkpoint: {reason}")
    else:
        require(status == "completed", "I7", f"the job ends {status}: {reason}")
        is_saved = any(c.step == steps for c in world.store.good())
        is_saved |= not world.policy.final_checkpoint
        require(is_saved, "I5", "the job is complete, and its last state is in no checkpoint")
    require(len(world.recorded) == steps, "I2", f"only {len(world.recorded)} steps")
    for name in world.core.ranks:
        live = world.workers[name].live
        if world.workers[name].answers() and live is not None:
            require(live.step == world.scenario.steps, "I4", f"{name} ends at step {live.step}")
            same_history(world, live.lineage, f"the final state of {name}")
