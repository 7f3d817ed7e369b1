"""A controller goes, its workers train on, the next one adopts them: at every line of its inbox,
twice in a row, together with all other faults. Nobody loses a step, and there is one writer.

ELASTIC_FT_SIM_SEED and ELASTIC_FT_SIM_COUNT choose other schedules, as for ``test_sim``.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from elastic_ft.core import adoption
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as events
from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.membership import step as decide
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.sim import (
    Report,
    SimFault,
    SimKill,
    SimScenario,
    SimViolation,
    sim_policy,
    simulate,
)
from elastic_ft.sim.nodes import ObjectStore
from tests.sim.scenarios import ADOPTIONS, adopted, make_scenario

FIRST_SEED = int(os.environ.get("ELASTIC_FT_SIM_SEED", "0"))
COUNT = int(os.environ.get("ELASTIC_FT_SIM_COUNT", "150"))
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp", "hsdp")
AWAY_S = (0.4, 6.0)  # a warm standby, and a cold start
LATE_S = 25.0  # by which two ends of a controller delay a job, at most: no deadline passes for them


def well(seed: int) -> SimScenario:
    """Nobody fails."""
    workers = 2 + seed % 3
    return SimScenario(
        seed=seed,
        policy=sim_policy(workers, workers, strategy=STRATEGIES[seed % 3], shard_size=2),
        nodes=workers,
        workers_per_node=1,
        steps=8,
        keepers=seed // 3 % 2 == 0,
        snapshot_every=1 + seed % 2,
        checkpoint_every=(0, 3, 2)[seed // 2 % 3],
        latency_s=(0.005, 0.05, 0.3)[seed // 5 % 3],
        duplicates=(0.0, 0.2)[seed // 7 % 2],
        patience_s=(0.0, 2.5)[seed // 7 % 2],
        spread_s=(0.0, 0.3, 1.0)[seed // 3 % 3],
        adopts=True,
    )


def kill(line: int, number: int) -> SimKill:
    """Each is another one: dead or stopped, soon or late followed, its last line half done."""
    how = ("killed", "stopped")[number % 2]
    return SimKill(line, how, AWAY_S[number // 2 % 2], (1.0, 0.0, 0.5)[number % 3])


def at_line(scenario: SimScenario, line: int) -> SimScenario:
    """A third: and once more, when the next one was told a few lines."""
    again = (kill(line + 1 + line % 7, line + 1),) if line % 3 == 0 else ()
    return replace(scenario, kills=(kill(line, line), *again))


def show_nothing_changed(before: Report, after: Report, where: str) -> None:
    """Told by the next one, the core decides what it would have; only what was being formed is
    formed again."""
    assert sum(after.adoptions.values()) in (1, 2), where
    again = after.left_in.count("forming")
    assert after.generations <= before.generations + again, where
    assert after.virtual_s < before.virtual_s + LATE_S, where
    assert (after.rollbacks, after.steps_lost) == (0, 0), where
    assert [step for step, _ in after.recorded] == [step for step, _ in before.recorded], where
    if not again:
        assert after.recorded == before.recorded, where
        assert after.recoveries == before.recoveries == 0, where
        assert after.state_digest == before.state_digest, where


def kill_at_every_line(seed: int, stride: int = 1) -> Counter[str]:
    scenario, phases = well(seed), Counter[str]()
    undisturbed = simulate(scenario)
    assert undisturbed.lines > 30
    for line in range(1 + seed % stride, undisturbed.lines, stride):
        where = f"seed {seed}, line {line}"
        try:
            report = simulate(at_line(scenario, line))
        except SimViolation as error:
            pytest.fail(f"{where}: {error}")
        show_nothing_changed(undisturbed, report, where)
        phases.update(report.left_in)
    return phases


def test_a_controller_killed_at_any_line_changes_nothing() -> None:
    phases = Counter[str]()
    for seed in range(6):
        phases += kill_at_every_line(seed, stride=5)
    assert {"starting", "forming", "running"} <= phases.keys()


@pytest.mark.soak
def test_a_controller_killed_at_every_line_of_fifty_schedules_changes_nothing() -> None:
    phases = Counter[str]()
    for seed in range(50):
        phases += kill_at_every_line(seed)
    print(phases)
    assert {"starting", "forming", "running"} <= phases.keys()


# --------------------------------------------------------------- with all other faults


def run_adopted(seeds: range) -> tuple[Counter[str], Counter[str]]:
    """Returns the faults that fired, and the ends of controllers."""
    fired, adoptions = Counter[str](), Counter[str]()
    for seed in seeds:
        try:
            report = simulate(adopted(seed))
        except SimViolation as error:
            pytest.fail(f"{error}\n{adopted(seed)}")
        fired += report.fired
        adoptions += report.adoptions
    return fired, adoptions


def test_every_schedule_is_safe_and_completes_whoever_is_in_charge() -> None:
    fired, _ = run_adopted(range(FIRST_SEED, FIRST_SEED + COUNT))
    if COUNT >= 150:
        assert ADOPTIONS.keys() <= fired.keys()


def test_what_a_released_worker_left_outlives_those_who_stay() -> None:
    """They crash before one of them has a copy of its own, and the keeper tells late."""
    simulate(adopted(6788, "ddp"))


@pytest.mark.soak
def test_two_thousand_schedules_are_safe_and_complete_whoever_is_in_charge() -> None:
    fired, adoptions = run_adopted(range(2000))
    print(fired, adoptions)
    assert ADOPTIONS.keys() <= fired.keys() and min(adoptions.values()) > 500


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 50, 10))
def test_at_every_line_of_schedules_with_faults(first: int) -> None:
    for seed in range(first, first + 10):
        scenario = replace(make_scenario(seed), adopts=True)
        for line in range(1, simulate(scenario).lines, 3):
            for how in ("killed", "lost"):
                kills = (replace(kill(line, line), how=how),)
                try:
                    simulate(replace(scenario, kills=kills))
                except SimViolation as error:
                    pytest.fail(f"line {line}, {how}: {error}")


# ---------------------------------------------------- the same events, at every line of them


def told(scenario: SimScenario) -> list[events.Event]:
    """All that the core was told, undisturbed."""
    heard: list[events.Event] = []

    def decides(
        state: State, event: events.Event, policy: Policy
    ) -> tuple[State, tuple[cmd.Command, ...]]:
        heard.append(event)
        return decide(state, event, policy)

    simulate(scenario, decide=decides)
    return heard


def adopt(state: State, at_s: float, policy: Policy) -> State:
    """The controller changes, and everyone calls the next one."""
    heard: list[events.Event] = [events.ControllerChanged(at_s, 2)]
    heard += [events.WorkerReturned(at_s, worker, state.generation) for worker in state.ready]
    heard += [events.KeeperReturned(at_s, keeper) for keeper in state.keepers.values()]
    heard += [events.TimerFired(at_s, "return 2", 0)]
    for event in heard:
        state, _ = decide(state, event, policy)
    return state


def comparable(state: State) -> State:
    """Without what tells one that was adopted."""
    uploads = replace(state.uploads, unsettled_step=0)
    return replace(state, adoption=None, uploads=uploads)


def show_the_same_is_decided(seed: int, stride: int) -> int:
    """Each later event has the same commands, whatever line the controller changed after."""
    scenario = make_scenario(seed)
    policy, heard = scenario.policy.in_multiples(), told(scenario)
    starts = [n for n, event in enumerate(heard) if isinstance(event, events.JobStarted)]
    heard = heard[: starts[1]] if len(starts) > 1 else heard
    states, commands, shown = [State()], [], 0
    for event in heard:
        state, decided = decide(states[-1], event, policy)
        states.append(state)
        commands.append(decided)
    for line in range(1 + seed % stride, len(heard), stride):
        now = states[line]
        timers = {e.timer for e in heard[line:] if isinstance(e, events.TimerFired)}
        if now.phase == "forming" or timers & {"pause", "boundary", "keeper"}:
            continue  # it is given up; whoever is to answer has longer
        state = adopt(now, heard[line - 1].at_s, policy)
        for event, before in zip(heard[line:], commands[line:], strict=True):
            state, decided = decide(state, event, policy)
            assert decided == before, f"seed {seed}, line {line}: {event}"
        assert comparable(state) == comparable(states[-1]), f"seed {seed}, line {line}"
        shown += 1
    return shown


def test_the_core_decides_as_if_nothing_had_been() -> None:
    assert sum(show_the_same_is_decided(seed, stride=7) for seed in range(40)) > 200


# ------------------------------------------------------------ what is wrong is seen


def failing(scenarios: list[SimScenario]) -> int:
    count = 0
    for scenario in scenarios:
        try:
            simulate(scenario)
        except (SimViolation, LookupError):
            count += 1
    return count


def stopped_midway() -> list[SimScenario]:
    """Stopped at the line that decides, with all of it still to do."""
    return [
        replace(well(seed), kills=(SimKill(line, "stopped", 0.5, 0.0),))
        for seed in range(3)
        for line in range(20, 60)
    ]


def test_a_controller_that_wakes_up_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scenarios = stopped_midway()
    reports = [simulate(scenario) for scenario in scenarios]
    assert sum(report.refused for report in reports) > 5
    monkeypatch.setattr(ObjectStore, "may_write", lambda store, owner: True)
    assert failing(scenarios), "two write, and no check sees it"


def test_what_can_not_be_taken_back_waits_for_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controller's machine is lost as a generation forms, and for a while nobody follows."""
    lost = SimFault("lose_controller", 3, "forming", 0.0, 0, 6.0)
    scenarios = [while_pausing(seed) for seed in range(12)]
    scenarios = [replace(one, nodes=9, faults=(one.faults[0], lost)) for one in scenarios]
    assert not failing(scenarios)
    monkeypatch.setattr(cmd, "LASTING", frozenset())
    assert failing(scenarios), "a lost tail does no harm: nothing is shown"


def while_pausing(seed: int) -> SimScenario:
    """A worker goes; and the controller, while the others pause, or form."""
    scenario, how = well(seed), ("kill_controller", "halt_controller")[seed % 2]
    phase = ("pausing", "forming")[seed // 2 % 2]
    return replace(
        scenario,
        policy=replace(scenario.policy, min_workers=1),
        nodes=6,
        latency_s=0.05,
        duplicates=0.0,
        faults=(
            SimFault("crash_worker", 3, "running", 0.1, seed, 6.0),
            SimFault(how, 3, phase, seed % 5 / 40, seed, AWAY_S[seed // 4 % 2]),
        ),
    )


def killed(scenarios: list[SimScenario]) -> int:
    """Workers that the controller took for hung or lost, although they are well."""
    return sum(simulate(scenario).ends["killed"] for scenario in scenarios)


@pytest.mark.parametrize(
    ("module", "name", "broken"),
    [
        (adoption, "_say_again", lambda turn, worker: None),
        (adoption, "respite_s", lambda turn, name: 0.0),
    ],
    ids=("says-nothing-again", "old-deadlines-count"),
)
def test_who_is_well_is_not_killed_for_the_controllers_end(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, broken: Any
) -> None:
    scenarios = [while_pausing(seed) for seed in range(40)]
    assert killed(scenarios) == 0
    monkeypatch.setattr(module, name, broken)
    assert killed(scenarios) > 0


def test_what_is_never_published_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "publish_again", lambda turn: None)
    scenario = well(4)
    undisturbed = simulate(scenario)
    lines = range(undisturbed.lines - 12, undisturbed.lines)
    late = [simulate(replace(scenario, kills=(SimKill(line),))).virtual_s for line in lines]
    assert max(late) > undisturbed.virtual_s + LATE_S
