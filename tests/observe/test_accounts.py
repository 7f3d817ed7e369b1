"""Every second of every allocated worker is in one class: in runs on processes, and simulated."""

from __future__ import annotations

from collections import Counter

import pytest

from elastic_ft.core.commands import Command
from elastic_ft.core.events import Event
from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.membership import step as core_step
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import State
from elastic_ft.observe import replay
from elastic_ft.observe.accounts import CLASSES, PRODUCTIVE, Accounts, Totals
from elastic_ft.observe.run_folder import read_lines
from elastic_ft.observe.startup import PARTS
from elastic_ft.sim import SimScenario
from elastic_ft.sim.runs import Chaos
from elastic_ft.sim.simulation import Simulation
from tests.multiproc.harness import Run
from tests.observe.disturbed import Lifetimes
from tests.sim.scenarios import make_scenario

TOLERANCE = 0.01
SIMULATED = 30


def test_classes_sum_to_the_lifetimes_of_the_workers(disturbed: tuple[Run, Lifetimes]) -> None:
    run, alive = disturbed
    found = run.result["worker_seconds"]
    assert found["classes"].keys() == set(CLASSES)
    total_s = sum(found["classes"].values())
    assert total_s == pytest.approx(found["allocated_s"], rel=TOLERANCE)
    # The kernel's view: seen by polling, so later for each worker, as the machine lets us look.
    assert total_s == pytest.approx(alive.seconds(), rel=TOLERANCE, abs=2.0), run.story()
    assert found["available_s"] >= found["allocated_s"] * (1 - TOLERANCE)


def test_what_a_kill_and_a_hang_cost_is_in_their_classes(
    disturbed: tuple[Run, Lifetimes],
) -> None:
    run, _ = disturbed
    classes = run.result["worker_seconds"]["classes"]
    hung = next(r for r in run.recoveries if r["cause"] == "worker_hung")
    assert classes["noticing"] > 2 * 0.5 * hung["noticed_s"]  # two survivors waited for it
    lost = ("fencing", "forming", "resharding", "wasted_progress_from_disruption")
    for name in ("program_startup", *lost):
        assert classes[name] > 0, name
    assert 0 < classes[PRODUCTIVE] < run.result["worker_seconds"]["allocated_s"]


def test_the_wall_clock_is_whole(disturbed: tuple[Run, Lifetimes]) -> None:
    result = disturbed[0].result
    badput_s = sum(result["badput"].values())
    whole_s = result["goodput"] * result["wall_s"] + badput_s
    assert whole_s == pytest.approx(result["wall_s"], rel=TOLERANCE)


def test_the_parts_of_the_start_are_whole(disturbed: tuple[Run, Lifetimes]) -> None:
    run, _ = disturbed
    startup = dict(run.result["startup"])
    inbox = read_lines(run.path / "inbox.jsonl")
    ready = {line["member"]["worker"]: line for line in inbox if line["type"] == "WorkerReady"}
    last = ready[startup.pop("worker")]
    assert startup.keys() == PARTS.keys()
    first, whole_s = read_lines(run.path / "steps.jsonl")[0], sum(startup.values())
    told_s = first["committed_at_s"] - inbox[0]["at_s"]  # since the job's start was told of
    assert whole_s - startup["asked_s"] - 0.2 < told_s < whole_s + 0.2
    for name in ("connect_s", "data_s", "model_s"):
        assert startup[name] == pytest.approx(last["spent"][name], abs=1e-3)
    assert 0 < startup["connect_s"] < last["told_at_s"] - last["started_at_s"]


def test_goodput_is_computed_again_from_the_run_folder(disturbed: tuple[Run, Lifetimes]) -> None:
    run, _ = disturbed
    again = replay.account(run.path, 1, run.job.elastic.max_workers)
    assert again.as_dict() == run.result["worker_seconds"]
    assert (again.goodput, again.badput) == (run.result["goodput"], run.result["badput"])


def test_a_run_decides_the_same_when_it_is_told_the_same(
    disturbed: tuple[Run, Lifetimes],
) -> None:
    run, _ = disturbed
    verdict = replay.check_replay(run.path)
    assert verdict.difference == ""
    assert verdict.decisions > 10
    assert verdict.told > 3 * 60


# ------------------------------------------------------------------------------- simulated


class Ledger:
    """Accounts beside the simulated core; and, the slow way, how long each worker was ready."""

    def __init__(self, max_workers: int, per_node: int) -> None:
        self.accounts = Accounts(0.0, per_node, max_workers)
        self.ready_s = 0.0
        self.last_s, self.count = 0.0, 0
        self.phases: Counter[str] = Counter()

    def tell(self, now_s: float, event: Event, commands: tuple[Command, ...], now: State) -> None:
        self.ready_s += self.count * (now_s - self.last_s)
        self.last_s, self.count = now_s, len(now.ready)
        self.accounts.on(now_s, event, commands, now)
        self.phases[now.phase] += 1


def simulate(scenario: SimScenario) -> tuple[Totals, Ledger, float]:
    """Returns the accounts, what the ledger saw, and the virtual time of the job's end."""
    ledger = Ledger(scenario.policy.max_workers, scenario.workers_per_node)

    def decide(state: State, event: Event, policy: Policy) -> tuple[State, tuple[Command, ...]]:
        after, commands = core_step(state, event, policy)
        ledger.tell(world.now_s, event, commands, after)
        return after, commands

    world = Simulation(scenario, decide, True)
    chaos = Chaos(world)
    world.on_turn = chaos.look
    world.at(scenario.heal_at_s, chaos.heal)
    world.start_controller()
    while world.finish is None:
        assert world.turn()
    return ledger.accounts.totals(world.now_s), ledger, world.now_s


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_simulated_classes_sum_to_the_time_of_ready_workers(strategy: Strategy) -> None:
    phases: Counter[str] = Counter()
    for seed in range(SIMULATED):
        scenario = make_scenario(seed, strategy)
        totals, ledger, ended_s = simulate(scenario)
        total_s = sum(totals.classes.values())
        assert total_s == pytest.approx(totals.allocated_s, abs=1e-6), scenario
        if not restarts(scenario):
            ready_s = ledger.ready_s + ledger.count * (ended_s - ledger.last_s)
            assert total_s == pytest.approx(ready_s, abs=1e-6), scenario
        whole_s = sum(totals.badput.values()) + totals.goodput * totals.wall_s
        assert whole_s == pytest.approx(totals.wall_s, rel=TOLERANCE)
        phases += ledger.phases
    assert phases.keys() >= {"starting", "running", "pausing", "forming", "ended"}


def restarts(scenario: SimScenario) -> bool:
    """Its workers leave when the controller does, which no event tells."""
    kinds = ("crash_controller", "stop_controller")
    return any(fault.kind in kinds for fault in scenario.faults)
