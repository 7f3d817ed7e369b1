"""The real core under a virtual clock: seeded faults (safety), then everything heals (liveness).

ELASTIC_FT_SIM_SEED and ELASTIC_FT_SIM_COUNT choose other schedules; a failure prints the command
that repeats it, and the end of its history.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core import (
    blame,
    buddies,
    commits,
    generations,
    keepers,
    membership,
    records,
    restoring,
    source,
    state,
)
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as events
from elastic_ft.core import failures as breaks
from elastic_ft.core.assignment import Assignment, Holding, Source
from elastic_ft.core.layouts import layout
from elastic_ft.core.lineage import Lineage
from elastic_ft.core.policy import Policy
from elastic_ft.sim import SimFault, SimScenario, SimViolation, sim_emergency, sim_policy, simulate
from elastic_ft.sim.nodes import Key, ObjectStore
from elastic_ft.sim.scenario import POLICY
from elastic_ft.sim.sim_keeper import SimCopy, SimKeeper
from tests.sim.scenarios import (
    CHANGES,
    ENDINGS,
    KINDS,
    OUTAGES,
    PLANNING,
    SUCCESSIONS,
    bearable,
    large,
    make_scenario,
)

FIRST_SEED = int(os.environ.get("ELASTIC_FT_SIM_SEED", "0"))
COUNT = int(os.environ.get("ELASTIC_FT_SIM_COUNT", "500"))
STRATEGIES: tuple[layout.Strategy, ...] = ("ddp", "fsdp", "hsdp")
TAIL = 40  # lines of a failing history that are printed

Decide = Callable[[state.State, events.Event, Policy], tuple[state.State, tuple[cmd.Command, ...]]]


def failures(scenarios: Iterable[SimScenario], **options: Any) -> list[SimScenario]:
    found = []
    for scenario in scenarios:
        try:
            simulate(scenario, **options)
        except (SimViolation, LookupError):  # a broken core may trip over itself first
            found.append(scenario)
    return found


def history_of(scenario: SimScenario) -> str:
    """The end of a failing history, and how to see it again."""
    try:
        simulate(scenario, trace=True)
    except SimViolation as error:
        lines = str(error).splitlines()
        policy = scenario.policy
        again = (
            f"ELASTIC_FT_SIM_SEED={scenario.seed} ELASTIC_FT_SIM_COUNT=1 "
            f"pytest tests/sim -k schedules-{'auto' if policy.planning else policy.strategy}"
        )
        return "\n".join([str(scenario), *lines[-TAIL:], f"repeat with: {again}"])
    return "it did not fail again: the simulation is not deterministic"


# --------------------------------------------------------------------- safety, then liveness


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"], ids=lambda s: f"schedules-{s}")
def test_every_schedule_is_safe_and_completes(strategy: str) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + COUNT)
    fired: Counter[str] = Counter()
    for seed in seeds:
        scenario = make_scenario(seed, None if strategy == "auto" else strategy)  # type: ignore[arg-type]
        if strategy == "auto":
            scenario = replace(scenario, policy=replace(scenario.policy, planning=PLANNING))
        try:
            fired += simulate(scenario).fired
        except SimViolation:
            pytest.fail(history_of(scenario))
    if COUNT >= 500:  # a fault that never fires tests nothing
        wanted = {*KINDS, *CHANGES, *OUTAGES, *SUCCESSIONS, *ENDINGS, "crash_everything"} - (
            {"damage_memory"} if strategy == "ddp" else set()
        )
        assert wanted <= fired.keys(), wanted - fired.keys()


def test_large_worlds_are_safe_and_complete() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + COUNT // 25):
        scenario = large(seed)
        try:
            simulate(scenario)
        except SimViolation as error:
            pytest.fail(f"{error}\n{scenario}")


@pytest.mark.parametrize(
    ("strategy", "copies"),
    # Whole replicas keep no snapshots: all workers at once go back to a checkpoint.
    [(s, c) for s in STRATEGIES for c in (1, 2, 3) if (s, c) != ("ddp", 1)],
)
def test_r_copies_make_r_minus_one_losses_cost_no_committed_step(
    strategy: layout.Strategy, copies: int
) -> None:
    """DESIGN section 5: r copies are on r nodes, and keepers outlive their workers."""
    for seed in range(FIRST_SEED, FIRST_SEED + 100):
        report = simulate(bearable(seed, strategy, copies))
        assert sum(report.fired.values()) == max(1, copies - 1), f"seed {seed}: no fault fired"
        assert report.steps_lost == 0, f"seed {seed}, {strategy}: {report}"


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
    assert failures(trained_again(seed) for seed in range(60))


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
    assert failures(scenarios)  # nobody tells: what is not held is awaited for ever


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
    assert failures(scenarios)
    monkeypatch.setattr(generations, "bench", not_told)  # what they keep then is of no history
    assert not failures(scenarios)
    without_identity(monkeypatch)
    assert failures(scenarios)


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
    assert failures(scenarios), "without the fence nothing goes wrong: nothing is shown"


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
        turn.set(proven=frozenset(list(turn.state.ranks)[1:]))
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
    assert failures(scenarios), "the losses are too far apart: nothing is shown"


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


# ------------------------------------------------------------------------------ last resort


def orphaned(seed: int) -> SimScenario:
    """The controller is killed with all workers, before there is any checkpoint; in every other
    scenario once more. Keepers, nodes and the store are well."""
    first = SimFault("crash_controller", 3 + seed % 4, "running", seed % 13 / 6, 0, 1.0)
    again = replace(first, at_step=9, after_s=seed % 7 / 4)
    return SimScenario(
        seed=seed,
        policy=sim_policy(1, 4, strategy=STRATEGIES[seed % 3]),
        nodes=2,
        workers_per_node=2,
        steps=14,
        checkpoint_every=0,
        faults=(first, again)[: 1 + seed % 2],
        spread_s=(0.0, 0.3, 1.0)[seed // 3 % 3],
    )


def test_what_keepers_save_is_gone_on_from_and_no_recorded_step_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [orphaned(seed) for seed in range(60)]
    monkeypatch.setattr(sim_emergency, "PATIENCE_S", 60.0)
    lengths: list[tuple[int, int]] = []
    end = sim_emergency.Emergency.end

    def ends(one: sim_emergency.Emergency) -> None:
        before, number = len(one.world.recorded), one.world.controller
        end(one)
        if one.world.controller > number:
            lengths.append((before, len(one.world.recorded)))

    monkeypatch.setattr(sim_emergency.Emergency, "end", ends)
    rescues = [simulate(scenario).rescues for scenario in scenarios]
    assert rescues == [len(scenario.faults) for scenario in scenarios]
    assert all(after >= before for before, after in lengths)
    assert any(after > before for before, after in lengths), "none was ahead of the record"


def test_a_rule_for_what_is_gone_on_from_that_is_wrong_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenarios = [orphaned(seed) for seed in range(30)]
    right = sim_emergency.candidates
    monkeypatch.setattr(sim_emergency, "candidates", lambda *a: reversed([*right(*a)]))
    assert failures(scenarios), "an older state than need be"
    monkeypatch.setattr(sim_emergency, "candidates", lambda *a: [(cut, ()) for cut, _ in right(*a)])
    assert failures(scenarios), "a hole in the record"
    monkeypatch.setattr(sim_emergency, "candidates", right)
    monkeypatch.setattr(sim_emergency, "is_one_state", lambda shards: False)
    assert failures(scenarios), "nothing is gone on from"


# ------------------------------------------------------------------------------- determinism

HASHES = """
from elastic_ft.sim import simulate
from tests.sim.scenarios import make_scenario
for seed in range({first}, {first} + 20):
    print(seed, simulate(make_scenario(seed)).trace_hash)
"""


def hashes(hash_seed: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", HASHES.format(first=FIRST_SEED)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_seed_is_one_history_whatever_the_hash_seed() -> None:
    one = hashes("1")
    assert len(set(one.split())) == 40  # seeds and hashes: all differ
    assert hashes("2") == one


# ------------------------------------------------------- the checks see a core that is broken


def commits_unheld(
    now: state.State, event: events.Event, policy: Policy
) -> tuple[state.State, tuple[cmd.Command, ...]]:
    """Takes every applied step for held."""
    now, commands = membership.step(now, event, policy)
    if isinstance(event, events.StepApplied):
        held = events.StepHeld(event.at_s, event.worker, event.generation, event.step)
        now, more = membership.step(now, held, policy)
        commands += more
    return now, commands


def forgets_rollbacks(
    now: state.State, event: events.Event, policy: Policy
) -> tuple[state.State, tuple[cmd.Command, ...]]:
    now, commands = membership.step(now, event, policy)
    return now, tuple(c for c in commands if not isinstance(c, cmd.RollBack))


def test_the_checks_see_commits_that_do_not_wait() -> None:
    assert failures((make_scenario(s, "fsdp") for s in range(40)), decide=commits_unheld)


def test_the_checks_see_silent_rollbacks() -> None:
    assert failures((make_scenario(s, "fsdp") for s in range(40)), decide=forgets_rollbacks)


def strikes_the_unreadable(
    now: state.State, event: events.Event, policy: Policy
) -> tuple[state.State, tuple[cmd.Command, ...]]:
    """Takes what can't be read for damaged."""
    if isinstance(event, events.SourceRefused):
        event = replace(event, kind=events.DAMAGED)
    return membership.step(now, event, policy)


def test_the_checks_see_good_checkpoints_struck_since_they_could_not_be_read() -> None:
    assert failures((make_scenario(s) for s in range(200)), decide=strikes_the_unreadable)


def ends_for_a_joiner(turn: state.Turn, event: events.WorkerRaised) -> None:
    commits.finish(turn, "failed", event.error)


def any_generation(turn: state.Turn, worker: str, generation: int) -> bool:
    return turn.state.assignment is not None and worker in turn.state.ready


def incomplete(holdings: Mapping[str, Any], checkpoints: Any, refused: Any) -> Any:
    """The newest step that anybody holds, whole or not."""
    held = [h for some in holdings.values() for h in some]
    newest = max(held, key=lambda h: (h.step, h.space), default=None)
    if newest is None:
        return source.choose(holdings, checkpoints, refused)
    holders: dict[str, Any] = {}
    for worker, some in sorted(holdings.items()):
        for h in some:
            if (h.step, h.space) == (newest.step, newest.space):
                holders.setdefault(h.shard, ((worker, h.tier),))
    return Source(newest.step, newest.tier, newest.space, holders), "newest"


recent_writers = restoring.recent_writers


def all_uploads_count(turn: state.Turn, new: Assignment) -> dict[int, records.Writers]:
    """Even those of steps that were voided and computed again."""
    writers = recent_writers(turn, new)
    return {generation: replace(old, until=None) for generation, old in writers.items()}


def applied_by_anyone(turn: state.Turn, step: int, pending: records.PendingStep) -> None:
    everyone = turn.everyone() if pending.applied else 0
    pending = replace(pending, applied=everyone, held=pending.held)
    turn.set(pending={**turn.state.pending, step: pending})


def one_copy_less(members: Any, plan: layout.Layout, copies: int) -> Any:
    return buddies.choose_buddies(members, plan, min(copies, 2))


never_published = {**membership.LASTING_TIMERS, commits.PUBLISH: lambda turn, attempt: None}


@pytest.mark.parametrize(
    ("strategy", "module", "name", "broken"),
    [
        ("fsdp", commits, "is_current", any_generation),
        ("fsdp", restoring, "choose", incomplete),
        ("fsdp", generations, "have_paused", lambda turn: True),
        ("ddp", commits, "_set_pending", applied_by_anyone),
        ("fsdp", generations, "recent_writers", all_uploads_count),
        ("fsdp", restoring, "_is_publishing", lambda turn, step: False),
        ("fsdp", generations, "choose_buddies", lambda members, *_: ((),) * len(members)),
        ("fsdp", generations, "choose_buddies", one_copy_less),
        ("fsdp", generations, "is_worth_waiting", restoring._is_publishing),
        ("fsdp", breaks, "_refuse_worker", ends_for_a_joiner),
        ("fsdp", membership, "LASTING_TIMERS", never_published),
        ("fsdp", keepers, "drop_left", lambda turn, pairs: turn.set(left=records.LeftBehind())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_checks_see_a_broken_core(
    monkeypatch: pytest.MonkeyPatch, strategy: layout.Strategy, module: Any, name: str, broken: Any
) -> None:
    monkeypatch.setattr(module, name, broken)
    for seed in range(500):
        if failures([make_scenario(seed, strategy)]):
            return
    pytest.fail(f"{name} is broken, and no check saw it")
