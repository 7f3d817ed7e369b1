"""What once went wrong, each thing in a scenario of its own: seen again without its correction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.core import (
    blame,
    generations,
    keepers,
    membership,
    restoring,
    state,
)
from elastic_ft.core import events as events
from elastic_ft.core.assignment import Holding, Source
from elastic_ft.core.lineage import Lineage
from elastic_ft.sim import SimFault, SimScenario, SimViolation, sim_policy, simulate
from elastic_ft.sim.nodes import Key, ObjectStore
from elastic_ft.sim.scenario import POLICY
from elastic_ft.sim.sim_keeper import SimCopy, SimKeeper
from tests.sim.histories import STRATEGIES, failures, is_seen, strikes_the_unreadable


def grown(seed: int) -> SimScenario:
    """One worker of two is lost and replaced; the replacement dies about when it has joined."""
    first = SimFault("crash_worker", 2, "running", 0.0, 0, 1.0)
    second = SimFault("crash_worker", 4, "forming", seed % 50 / 33, 1, 1.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 2, strategy="fsdp"),
        nodes=3,
        workers_per_node=1,
        steps=12,
        keepers=False,  # else the one worker's state survives in its node's
        checkpoint_every=0,
        faults=(first, second),
    )


def test_the_state_before_growing_is_kept_until_the_new_cut_is_held() -> None:
    """One worker alone commits what nobody else has. Growing cuts that state in two: unless the
    old one stays in host memory until the halves have their copies, the joiner's loss is fatal."""
    kept = [simulate(grown(seed)) for seed in range(60)]
    assert all(report.rollbacks == 0 for report in kept)
    dropped = [simulate(grown(seed), retain_live=False) for seed in range(60)]
    assert any(report.rollbacks for report in dropped), "the window is never hit: nothing is shown"


def trained_again(seed: int) -> SimScenario:
    """Worker and node go at once, with no copies: back to the checkpoint. While the same steps are
    trained again one more worker goes; its keeper, and the first one's, have the same step."""
    return SimScenario(
        seed=seed,
        policy=sim_policy(3, 3, strategy="fsdp", copies=1),
        nodes=3,
        workers_per_node=1,
        steps=12,
        checkpoint_every=4,
        faults=(
            SimFault("crash_worker", 6, "running", 0.0, 1, 1.0),
            SimFault("crash_node", 6, "running", 0.05, 2, 1.0),
            SimFault("crash_worker", 1, "forming", 1.0 + seed % 60 / 10, 1 + seed % 2, 1.0),
        ),
    )


def test_what_was_left_of_void_steps_is_never_mixed_with_those_trained_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not failures(trained_again(seed) for seed in range(60))
    without_identity(monkeypatch)
    assert is_seen(trained_again(seed) for seed in range(60))


def without_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core takes every state for this history's state of its step, and so do keepers."""
    Holdings = Mapping[str, tuple[Holding, ...]]

    def believed(lineage: Lineage, holdings: Holdings) -> Holdings:
        return {
            holder: tuple(replace(h, generation=lineage.generation_of(h.step) or 0) for h in held)
            for holder, held in holdings.items()
        }

    def find(keeper: SimKeeper, worker: str, key: Key) -> SimCopy | None:
        left = keeper.left.get(worker)
        same = (key[0], *key[2:])
        named = {(k[0], *k[2:]): copy for k, copy in left.copies.items()} if left else {}
        return named.get(same) if keeper.alive and not (keeper.hung or keeper.node.cut) else None

    for module in (restoring, keepers):
        monkeypatch.setattr(module, "of_this_history", believed)
    monkeypatch.setattr(SimKeeper, "find", find)


def deaf_keeper(seed: int) -> SimScenario:
    """Some workers' lines to their keepers end; then a worker dies, or all do."""
    last = ("crash_worker", "crash_every_worker", "crash_node")[seed % 3]
    lines = tuple(SimFault("lose_keeper_line", 2 + n, "running", 0.3 * n, n, 1.0) for n in range(2))
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 3, strategy=STRATEGIES[seed // 3 % 3]),
        nodes=3,
        workers_per_node=1,
        steps=12,
        checkpoint_every=5,
        faults=(*lines, SimFault(last, 4 + seed % 4, "running", seed % 10 / 10, seed % 2, 2.0)),
    )


def test_a_keeper_line_that_ends_is_no_keepers_copy_and_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [deaf_keeper(seed) for seed in range(90)]
    assert not failures(scenarios)
    for scenario in scenarios[:3]:
        assert simulate(scenario).fired["lose_keeper_line"] == 2
    monkeypatch.setitem(membership.handlers, events.Unkept, lambda turn, event: None)
    assert is_seen(scenarios)  # nobody tells: what is not held is awaited for ever


def slow_restore(seed: int) -> SimScenario:
    """Getting the state takes several times as long as forming may; somebody dies, perhaps then."""
    faults = (
        SimFault("crash_worker", 3, "running", seed % 10 / 10, seed, 1.0),
        SimFault("crash_node", 3, "forming", 11.0, seed % 2, 9.0),
    )
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 4, strategy=STRATEGIES[seed % 3], max_generations_without_progress=8),
        nodes=4,
        workers_per_node=1,
        steps=8,
        restore_s=3 * POLICY.form_timeout_s,
        faults=faults,
    )


def test_who_restores_for_long_is_waited_for_while_bytes_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [slow_restore(seed) for seed in range(30)]
    assert not failures(scenarios)
    assert simulate(scenarios[0]).fired["crash_worker"] == 1
    monkeypatch.setitem(membership.handlers, events.Restoring, lambda turn, event: None)
    assert len(failures(scenarios)) == len(scenarios)  # no generation ever forms


def hushed_keepers(seed: int) -> SimScenario:
    """All workers crash. What they left is with keepers, of which one can't be reached at first."""
    crash = SimFault("crash_every_worker", 4 + seed % 3, "running", seed % 10 / 10, 0, 1.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(3, 3, strategy=STRATEGIES[1 + seed % 2], copies=1),
        nodes=3,
        workers_per_node=1,
        steps=12,
        checkpoint_every=0,
        faults=(crash, replace(crash, kind="hush_keeper", target=seed % 3, lasts_s=6.0)),
    )


def test_a_keeper_that_can_not_be_reached_for_a_moment_costs_no_step() -> None:
    scenarios = [hushed_keepers(seed) for seed in range(40)]
    assert [simulate(scenario).steps_lost for scenario in scenarios] == [0] * 40
    struck = [simulate(scenario, decide=strikes_the_unreadable) for scenario in scenarios]
    assert sum(report.steps_lost > 0 for report in struck) > 20


def away_base(seed: int) -> SimScenario:
    """A worker goes while the folder of frozen weights is away, and all else is in memory. Others
    fail, or the controller does, meanwhile."""
    away = SimFault("base_away", 3 + seed % 3, "running", 0.0, 0, 25.0)
    crash = replace(away, kind="crash_worker", after_s=0.2, lasts_s=1.0)
    kinds = ("crash_worker", "crash_node", "crash_controller", "drain_node", "damage_memory")
    other = SimFault(kinds[seed % 5], 3, "suspended", seed % 4, seed % 3, 4.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(2, 4, strategy=STRATEGIES[1 + seed % 2]),
        nodes=4,
        workers_per_node=1,
        steps=12,
        faults=(away, crash, *(other,) * (seed % 7 > 0)),
    )


def test_frozen_weights_that_are_away_are_waited_for_in_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the first loss alone, no step is lost, and few generations are tried."""
    scenarios = [away_base(seed) for seed in range(140)]
    assert not failures(scenarios)
    alone = scenarios[::7]
    paused = [simulate(scenario) for scenario in alone]
    assert all(report.fired["base_away"] == 1 for report in paused)
    assert not any(report.steps_lost for report in paused)

    def at_once(turn: state.Turn, source: Source | None = None) -> bool:
        outage = turn.state.outage
        return outage is not None and outage.waiting and (source is None or bool(source.url))

    monkeypatch.setattr(generations, "waits_for_store", at_once)
    hurried = [simulate(scenario) for scenario in alone]
    most = max(report.generations for report in paused)
    assert most < sum(report.generations for report in hurried) / len(hurried)


def slow_copies(seed: int) -> SimScenario:
    """Two nodes go at once: back to the checkpoint, while copies of later steps still run. Then one
    more node goes, which two copies of each step are to bear."""
    two = (SimFault("crash_node", 7, "running", seed % 20 / 10, seed % 3, 60.0),) * 2
    third = SimFault("crash_node", 1, "forming", 2.0 + seed % 40 / 2, seed % 5, 60.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 5, strategy=STRATEGIES[1 + seed % 2]),
        nodes=5,
        workers_per_node=1,
        steps=12,
        keepers=False,
        checkpoint_every=4,
        copy_s=8.0,
        faults=(*two, third),
    )


def test_a_snapshot_whose_copy_outlives_its_generation_is_not_held() -> None:
    """Held, it is of no history, and newer than all that is trained again: that is dropped."""
    kept = [simulate(slow_copies(seed)) for seed in range(80)]
    assert {report.rollbacks for report in kept} == {0, 1}
    late = [simulate(slow_copies(seed), hold_late=True) for seed in range(80)]
    assert any(report.rollbacks > 1 for report in late)


def left_over(seed: int) -> SimScenario:
    """Worlds of two or four: one of four goes, and another has no rank. Then two more go."""
    phase = ("running", "forming")[seed // 3 % 2]
    two = (SimFault("crash_worker", 5, phase, 0.0, 0, 1.0),) * 2
    return SimScenario(
        seed=seed,
        policy=sim_policy(
            2, 4, strategy=STRATEGIES[seed % 3], multiple_of=2, shard_size=2, copies=2 + seed % 2
        ),
        nodes=4,
        workers_per_node=1,
        steps=14,
        keepers=seed // 2 % 2 == 1,
        checkpoint_every=4,
        faults=(SimFault("crash_node", 3, "running", seed % 7 / 7, seed % 4, 25.0), *two),
        spread_s=1.0,
    )


def test_what_workers_without_a_rank_hold_is_neither_forgotten_nor_mixed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [left_over(seed) for seed in range(240)]
    assert not failures(scenarios)
    bench = generations.bench

    def not_told(turn: state.Turn, keep: set[str], step: int) -> dict[str, int]:
        asked = len(turn.commands)
        benched = bench(turn, keep, step)
        del turn.commands[asked:]
        return benched

    monkeypatch.setattr(generations, "bench", lambda turn, keep, step: {})
    assert is_seen(scenarios)
    monkeypatch.setattr(generations, "bench", not_told)  # what they keep then is of no history
    assert not failures(scenarios)
    without_identity(monkeypatch)
    assert is_seen(scenarios)


def taken_over(seed: int) -> SimScenario:
    """A controller is stopped while it publishes, another takes the job; the first wakes up. Later
    the second one crashes: what does the third find?"""
    stopped = SimFault("stop_controller", 4 + seed % 3, "running", seed % 11 / 4, 0, 2.0)
    crashed = SimFault("crash_controller", 6, "running", 12.0 + seed % 7, 0, 1.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(2, 2, strategy="ddp"),
        nodes=2,
        workers_per_node=1,
        steps=40,
        keepers=False,  # what they save, the next one would go on from
        checkpoint_every=4,
        faults=(stopped, crashed),
    )


def test_a_controller_that_wakes_up_publishes_nothing_that_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [taken_over(seed) for seed in range(60)]
    assert not failures(scenarios)
    monkeypatch.setattr(ObjectStore, "counts", lambda store, checkpoint: True)
    assert is_seen(scenarios), "without the fence nothing goes wrong: nothing is shown"


def closed_joiner(seed: int) -> SimScenario:
    """A worker is lost, and whoever takes its place can't be reached by the others."""
    strategy = STRATEGIES[seed % 3]
    keepers = seed // 3 % 2 == 1
    closed = SimFault("close_ports", 3, "running", 0.0, 2, 1000.0)
    return SimScenario(
        seed=seed,
        policy=sim_policy(1 + seed % 2, 3, strategy=strategy, max_generations_without_progress=10),
        nodes=3,
        workers_per_node=1,
        steps=40,
        keepers=keepers,
        faults=(closed, replace(closed, kind="crash_worker_there", after_s=0.5)),
        heal_at_s=600.0,
    )


def test_a_joiner_that_nobody_can_reach_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [closed_joiner(seed) for seed in range(30)]
    for scenario in scenarios:
        report = simulate(scenario)
        assert report.fired["close_ports"] == report.fired["crash_worker_there"] == 1
        assert report.virtual_s < scenario.heal_at_s and not report.rollbacks
    monkeypatch.setattr(generations, "blame_joiners", lambda turn: True)
    assert len(failures(scenarios)) == len(scenarios)


def test_the_checks_see_old_members_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_rank(turn: state.Turn) -> bool:
        proven = frozenset(list(turn.state.ranks)[1:])
        turn.set(blame=replace(turn.state.blame, proven=proven))
        return blame.blame_joiners(turn)

    monkeypatch.setattr(generations, "blame_joiners", by_rank)
    with pytest.raises(SimViolation, match="took part in the last step"):
        for seed in range(30):
            simulate(closed_joiner(seed))


def spot_losses(seed: int) -> SimScenario:
    """Node after node is lost while the rest form, and no step is made between."""
    lost = SimFault("crash_node", 2, "forming", 0.0, seed % 3, 500.0)
    first = replace(lost, phase="running")
    rest = tuple(replace(lost, after_s=0.15 * n, target=n) for n in range(9))
    return SimScenario(
        seed=seed,
        policy=sim_policy(
            1, 12, strategy=STRATEGIES[seed % 3], copies=3, max_generations_without_progress=3
        ),
        nodes=12,
        workers_per_node=1,
        steps=12,
        checkpoint_every=2,
        faults=(first, *rest),
    )


def every_end_counts(turn: state.Turn, cause: str, why: str, nodes: Any = ()) -> bool:
    return blame.count_end(turn, cause, why)


def test_losses_on_many_nodes_in_a_row_end_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = [spot_losses(seed) for seed in range(12)]
    assert not failures(scenarios)
    monkeypatch.setattr(generations, "count_end", every_end_counts)
    assert is_seen(scenarios), "the losses are too far apart: nothing is shown"


def test_a_node_whose_workers_crash_again_and_again_ends_a_job_that_needs_them() -> None:
    bad = SimFault("make_deadly", 3, "running", 0.0, 1, 1.0)
    for seed in range(6):
        scenario = closed_joiner(seed)
        policy = replace(scenario.policy, min_workers=3, max_generations_without_progress=3)
        scenario = replace(
            scenario,
            policy=policy,
            faults=(bad, replace(bad, kind="crash_worker_there", after_s=0.5)),
        )
        line = r"ends failed: 4 generations .* have ended with a loss on n1, the last one: w\d+: "
        with pytest.raises(SimViolation, match=line):
            simulate(scenario)
