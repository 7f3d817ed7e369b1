"""The real core under a virtual clock: seeded faults (safety), then everything heals (liveness).

ELASTIC_FT_SIM_SEED and ELASTIC_FT_SIM_COUNT choose other schedules; a failure prints the command
that repeats it, and the end of its history.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core import (
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
from elastic_ft.core.assignment import Assignment, Source
from elastic_ft.core.layouts import layout
from elastic_ft.core.policy import Policy
from elastic_ft.sim import SimFault, SimScenario, SimViolation, sim_emergency, sim_policy, simulate
from tests.sim.histories import (
    COUNT,
    FIRST_SEED,
    STRATEGIES,
    history_of,
    is_seen,
    strikes_the_unreadable,
)
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
        patience_s=(0.0, 2.5)[seed // 7 % 2],
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
    assert is_seen(scenarios), "an older state than need be"
    monkeypatch.setattr(sim_emergency, "candidates", lambda *a: [(cut, ()) for cut, _ in right(*a)])
    assert is_seen(scenarios), "a hole in the record"
    monkeypatch.setattr(sim_emergency, "candidates", right)
    monkeypatch.setattr(sim_emergency, "is_one_state", lambda shards: False)
    assert is_seen(scenarios), "nothing is gone on from"


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
    assert is_seen((make_scenario(s, "fsdp") for s in range(40)), decide=commits_unheld)


def test_the_checks_see_silent_rollbacks() -> None:
    assert is_seen((make_scenario(s, "fsdp") for s in range(40)), decide=forgets_rollbacks)


def test_the_checks_see_good_checkpoints_struck_since_they_could_not_be_read() -> None:
    assert is_seen((make_scenario(s) for s in range(200)), decide=strikes_the_unreadable)


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
    scenarios = (make_scenario(seed, strategy) for seed in range(500))
    assert is_seen(scenarios), f"{name} is broken, and no check saw it"
