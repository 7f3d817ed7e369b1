"""Each check of the simulator, shown what it is there to see: a blinded one is noticed here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.core.assignment import Source, Tier
from elastic_ft.core.commands import (
    AbandonCheckpoint,
    CommitCheckpoint,
    Journal,
    RecordStep,
    RollBack,
)
from elastic_ft.core.commits import UNSAVED
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.membership import step as core_step
from elastic_ft.sim import SimScenario, SimViolation, checks, sim_policy
from elastic_ft.sim.nodes import SimCheckpoint, SimSavedShard
from elastic_ft.sim.runs import Chaos
from elastic_ft.sim.sim_keeper import SimCopy
from elastic_ft.sim.sim_worker import Laid, Live
from elastic_ft.sim.simulation import Simulation


@pytest.fixture
def world() -> Simulation:
    """Three workers that train, two steps recorded."""
    scenario = SimScenario(
        seed=1,
        policy=sim_policy(2, 3, strategy="fsdp"),
        nodes=3,
        workers_per_node=1,
        steps=12,
        checkpoint_every=0,
    )
    made = Simulation(scenario, core_step, True)
    made.on_turn = Chaos(made).look
    made.take_over()
    made.start_controller()
    while len(made.recorded) < 2:
        assert made.turn()
    return made


def sees(invariant: str, check: Callable[..., Any], *args: Any) -> None:
    with pytest.raises(SimViolation, match=f"^{invariant}: "):
        check(*args)


def test_a_world_smaller_than_it_could_be(world: Simulation) -> None:
    new = world.core.assignment
    assert new is not None
    checks.world_is_allowed(world, new)
    fewer = replace(new, members=new.members[:2], layout=Layout(dp_shard=2))
    sees("policy", checks.world_is_allowed, world, fewer)
    sees("policy", checks.world_is_allowed, world, replace(new, layout=Layout(dp_shard=2)))
    sees("policy", checks.world_is_allowed, world, replace(new, members=new.members[:1]))
    world.asked, world.core = 2, replace(world.core, target=2)
    sees("policy", checks.world_is_allowed, world, new)
    sees("I8", checks.world_is_allowed, world, fewer)


def test_an_old_member_that_is_blamed(world: Simulation) -> None:
    checks.left_out(world, "w99", "generations broke with it")
    checks.left_out(world, "w1", "it can't read the store")
    sees("policy", checks.left_out, world, "w1", "generations broke with it")


def test_somebody_who_trains_in_a_generation_that_is_over(world: Simulation) -> None:
    worker = world.members()[0]
    group = worker.group
    assert group is not None
    assert worker.live is not None
    step = worker.live.step + 1
    checks.applied(world, worker, group, step)
    sees("I4", checks.applied, world, worker, group, step + 1)
    world.formed = group.generation + 1
    sees("I1", checks.applied, world, worker, group, step)
    worker.node.cut = True  # it can't have heard
    checks.applied(world, worker, group, step)


def test_a_generation_formed_without_a_member(world: Simulation) -> None:
    group = world.groups[world.core.generation]
    checks.check_formed(world, group)
    group.resumed.discard(group.members[0].id)
    sees("I1", checks.check_formed, world, group)


def test_state_of_another_history(world: Simulation) -> None:
    generation = world.core.generation
    checks.same_history(world, (generation,) * 3, "state")
    sees("I4", checks.same_history, world, (generation, generation + 1), "state")


def test_a_step_recorded_twice_or_unknown_or_held_by_nobody(world: Simulation) -> None:
    number = len(world.recorded) + 1
    line = RecordStep(number, world.core.generation, 3, "fsdp3", {"loss": 1.0})
    sees("I2", checks.check_recorded, world, replace(line, step=number - 1))
    sees("I2", checks.check_recorded, world, replace(line, metrics={}))
    for worker in world.workers.values():
        worker.live, worker.copies = None, {}
    sees("I4", checks.survives, world, line.step)


def test_a_step_recorded_while_a_shard_of_it_is_on_one_node_alone(world: Simulation) -> None:
    number = len(world.recorded) + 1
    lineage = (world.core.generation,) * number
    space = Layout(dp_shard=3).shard_space
    members = world.members()
    for rank, worker in enumerate(members):
        worker.live = Live(number, lineage[-1], space, f"pp0.s{rank}.tp0", lineage)
        worker.copies = {}
    sees("I4", checks.survives, world, number)
    for rank, worker in enumerate(members):
        key = (number, lineage[-1], space, f"pp0.s{(rank + 1) % 3}.tp0")
        worker.copies = {key: SimCopy(Tier.PEER, lineage, None)}
    checks.survives(world, number)


def test_steps_given_up_that_somebody_has(world: Simulation) -> None:
    recorded = len(world.recorded)
    sees("I4", checks.rolled_back, world, RollBack(recorded, "no older"))
    sees("I4", checks.rolled_back, world, RollBack(recorded - 1, "newer in memory"))
    for worker in world.workers.values():
        worker.live, worker.copies = None, {}
    for node in world.nodes:
        assert node.keeper is not None
        node.keeper.left.clear()
    checks.rolled_back(world, RollBack(recorded - 1, "all lost"))
    world.store.published.append(SimCheckpoint(recorded, "mem://x", (1,) * recorded, 1))
    sees("I4", checks.rolled_back, world, RollBack(recorded - 1, "newer in the store"))


def test_a_seed_taken_for_a_source_unasked(world: Simulation) -> None:
    world.policy = replace(world.policy, from_scratch=False)
    sees("I4", checks.rolled_back, world, RollBack(0, "all lost"))


def test_a_source_that_nobody_has_or_that_is_mixed(world: Simulation) -> None:
    group = world.groups[world.core.generation]
    step, members = len(world.recorded), world.members()
    layout = group.assignment.layout
    generation = group.generation
    for rank, worker in enumerate(members):
        name, lineage = layout.shard_of(rank), (generation,) * step
        worker.live = Live(step, generation, layout.shard_space, name, lineage)
    holders = {
        layout.shard_of(rank): ((worker.id, Tier.LIVE),) for rank, worker in enumerate(members)
    }
    source = replace(
        group.assignment.source,
        step=step,
        generation=generation,
        tier=Tier.LIVE,
        space=layout.shard_space,
        holders=holders,
        url="",
    )

    def with_source(**changes: Any) -> Any:
        group.assignment = replace(group.assignment, source=replace(source, **changes))
        return group

    assert checks.source(world, with_source()) == (generation,) * step
    sees("I4", checks.source, world, with_source(step=step + 1))
    missing = dict(list(holders.items())[1:])
    sees("I4", checks.source, world, with_source(holders=missing))
    other = (generation + 1,) * (step - 1) + (generation,)
    first = members[0].live
    assert first is not None
    members[0].live = replace(first, lineage=other)
    sees("I4", checks.source, world, with_source())
    for worker in members:
        assert worker.live is not None
        worker.live = replace(worker.live, lineage=other)
    sees("I4", checks.source, world, with_source())  # one history, and not the recorded one
    for worker in members:
        assert worker.live is not None
        worker.live = replace(worker.live, lineage=(generation + 1,) * step)
    sees("I4", checks.source, world, with_source())  # it is not of the generation it is said to be
    group.assignment = replace(group.assignment, source=Source(3, Tier.INITIAL))
    sees("I4", checks.source, world, group)
    nowhere = Source(step, Tier.CHECKPOINT, url="mem://nowhere")
    group.assignment = replace(group.assignment, source=nowhere)
    sees("I5", checks.source, world, group)


def test_checkpoints_that_are_ahead_or_in_parts_or_mixed(world: Simulation) -> None:
    step, generation = len(world.recorded), world.core.generation
    space = Layout(dp_shard=2).shard_space
    lineage = (generation,) * step
    shards = tuple(
        {"space": space, "shard": f"pp0.s{rank}.tp0", "lineage": lineage} for rank in range(2)
    )
    command = CommitCheckpoint(step, generation, shards)
    assert checks.published(world, command) == lineage
    ahead = tuple({**shard, "lineage": (generation,) * (step + 1)} for shard in shards)
    sees("I5", checks.published, world, replace(command, step=step + 1, shards=ahead))
    sees("I5", checks.published, world, replace(command, shards=shards[:1]))
    sees("I5", checks.published, world, replace(command, shards=()))
    other = ({**shards[0], "lineage": (generation + 1,) * step}, shards[1])
    sees("I5", checks.published, world, replace(command, shards=other))
    old = tuple({**shard, "lineage": (generation,) * (step - 1)} for shard in shards)
    sees("I5", checks.published, world, replace(command, shards=old))
    void = tuple({**shard, "lineage": (generation + 1,) * step} for shard in shards)
    sees("I4", checks.published, world, replace(command, shards=void))


def test_a_job_that_ends_too_early_or_with_another_state(world: Simulation) -> None:
    sees("I7", checks.finished, world, "failed", "no reason")
    sees("I2", checks.finished, world, "completed", "too early")
    steps = world.scenario.steps
    generation = world.core.generation
    world.recorded = [(number, generation) for number in range(1, steps + 1)]
    sees("I4", checks.finished, world, "completed", "they are not there yet")
    for worker in world.members():
        worker.live = Live(steps, generation + 1, "", "", (generation + 1,) * steps)
    sees("I4", checks.finished, world, "completed", "of another history")
    for worker in world.members():
        worker.live = Live(steps, generation, "", "", (generation,) * steps)
    checks.finished(world, "completed", "done")


def test_a_checkpoint_abandoned_that_is_published_or_about_to_be(world: Simulation) -> None:
    command = AbandonCheckpoint(2, 1, "too old")
    world.publishing.append(CommitCheckpoint(2, 3, ()))
    world.store.published.append(SimCheckpoint(2, "mem://2-4-1", (1, 1), world.controller))
    checks.attempt_dropped(world, command)
    sees("I5", checks.attempt_dropped, world, replace(command, generation=3))
    sees("I5", checks.attempt_dropped, world, replace(command, generation=4))


def test_a_job_that_ends_with_its_last_state_nowhere(world: Simulation) -> None:
    steps, generation = world.scenario.steps, world.core.generation
    world.policy = replace(world.policy, final_checkpoint=True)
    world.recorded = [(number, generation) for number in range(1, steps + 1)]
    lineage = (generation,) * steps
    for worker in world.members():
        worker.live = Live(steps, generation, "", "", lineage)
    sees("I5", checks.finished, world, "completed", "done")
    sees("I5", checks.finished, world, "suspended", UNSAVED)
    sees("I7", checks.finished, world, "failed", UNSAVED)
    world.overdue.add(steps)
    checks.finished(world, "suspended", UNSAVED)
    world.store.published.append(SimCheckpoint(steps, "mem://x", lineage, world.controller))
    checks.finished(world, "completed", "done")


def test_somebody_who_trains_on_what_was_never_filled(world: Simulation) -> None:
    worker = world.members()[0]
    group = worker.group
    assert group is not None
    worker.laid = Laid("", "", (1,))
    checks.restored(worker, group, (1,))
    worker.laid = Laid("", "")
    sees("I4", checks.restored, worker, group, (1,))


def test_somebody_well_who_is_taken_for_hung(world: Simulation) -> None:
    name = world.members()[0].id
    sees("I6", checks.hangs, world, name)
    world.workers[name].hung = True
    checks.hangs(world, name)


def test_a_command_without_a_reason(world: Simulation) -> None:
    sees("I8", world.do, Journal("suspended", 1, ""), world.controller)


def test_require_is_what_all_of_them_stand_on() -> None:
    checks.require(True, "I1", "fine")
    sees("I1", checks.require, False, "I1", "not fine")


def saved(step: int, *lineages: tuple[int, ...], known: int = 9) -> list[SimSavedShard]:
    """A shard of each history."""
    layout = Layout(dp_shard=len(lineages))
    record = {n: RecordStep(n, 1, 3, "fsdp3", {"loss": 1.0}) for n in range(1, known + 1)}
    return [
        SimSavedShard((step, 1, layout.shard_space, layout.shard_of(rank)), lineage, record)
        for rank, lineage in enumerate(lineages)
    ]


def test_what_keepers_saved(world: Simulation) -> None:
    good = saved(3, (1, 1, 1), (1, 1, 1))
    since = [good[0].record[3]]
    assert checks.rescued(world, 3, good, since) == (1, 1, 1)
    sees("I4", checks.rescued, world, 3, saved(3, (1, 1, 1), (1, 1, 2)), since)
    sees("I4", checks.rescued, world, 3, saved(3, (1, 2, 1), (1, 2, 1)), since)
    sees("I2", checks.rescued, world, 3, saved(3, (1, 1), (1, 1)), since)
    sees("I2", checks.rescued, world, 3, good, [])
    sees("I2", checks.rescued, world, 3, good, [replace(since[0], generation=2)])
    sees("I2", checks.rescued, world, 3, good, [replace(since[0], metrics={})])


def test_what_keepers_saved_and_nobody_goes_on_from(world: Simulation) -> None:
    good = saved(3, (1, 1, 1), (1, 1, 1))
    checks.nothing_saved_is_newer(world, good, 3)
    checks.nothing_saved_is_newer(world, good[:1], 2)
    checks.nothing_saved_is_newer(world, saved(3, (1, 2, 1), (1, 2, 1)), 2)
    checks.nothing_saved_is_newer(world, saved(4, (1,) * 4, (1,) * 4, known=3), 2)
    sees("I4", checks.nothing_saved_is_newer, world, good, 2)
