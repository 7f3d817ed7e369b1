"""Worlds that grow again, slow workers that are left out, and what the planner says of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ft.core import world
from elastic_ft.core.commands import (
    Command,
    FormGeneration,
    PauseWorkers,
    ReleaseWorker,
    StartTimer,
)
from elastic_ft.core.events import (
    NodeLost,
    ResizeRequested,
    StepApplied,
    WorkerLost,
    WorkerReady,
)
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.layout_plan import LayoutPlan
from elastic_ft.core.layouts.planner import Limits, Planning, best
from elastic_ft.core.layouts.time_costs import Interconnect, step_time
from elastic_ft.core.layouts.work import Choice, Devices, ModelShape, Work
from elastic_ft.core.stragglers import find_straggler
from elastic_ft.core.world import WINDOW_S
from tests.core.script import Script, member
from tests.core.worlds import FOUR, lose, of, pause_all, script_of

# ------------------------------------------------------------------------------ regrowth


def flapping(script: Script, losses: int, paused_s: float) -> None:
    """As if so many losses had been seen of late, each a pause."""
    script.tell(WorkerLost, "d", "killed")
    pause_all(script, 0)
    script.resume()
    (recovery,) = script.state.recoveries
    recovery = replace(recovery, paused_s=paused_s, noticed_at_s=script.now_s)
    script.state = replace(script.state, recoveries=(recovery,) * losses)


def test_in_calm_a_joiner_is_let_in_at_once() -> None:
    script = script_of(1, 4).run(**FOUR)
    flapping(script, 1, 2.0)
    assert of(PauseWorkers, script.ready("e", "n5"))
    assert script.journalled("join_deferred") == []


def test_where_losses_come_faster_than_a_pause_is_repaid_joiners_wait_a_little() -> None:
    script = script_of(1, 4).run(**FOUR)
    flapping(script, 60, 10.0)
    assert script.ready("e", "n5") == [StartTimer("regrow", 2, 120)]
    (why,) = script.journalled("join_deferred")
    assert "from 3 to 4 workers pauses for about 10.0 s" in why
    assert "30 s to repay; it should within 10 s: 60 losses in the last 600 s" in why
    script.now_s += 119
    assert of(PauseWorkers, script.fire("regrow"))


def test_a_failure_in_between_takes_those_that_wait_along() -> None:
    script = script_of(1, 4).run(**FOUR)
    flapping(script, 60, 10.0)
    script.ready("e", "n5")
    lose(script, "a", 0)
    assert script.ranks == ("b", "c", "e")
    assert script.state.deferred_at_s is None


def test_old_losses_are_forgotten() -> None:
    script = script_of(1, 4).run(**FOUR)
    flapping(script, 60, 10.0)
    script.now_s += WINDOW_S
    assert of(PauseWorkers, script.ready("e", "n5"))


# ---------------------------------------------------------------------------- stragglers


def test_only_who_is_consistently_slow_is_a_straggler() -> None:
    usual = (1.0,) * 12
    assert find_straggler({"a": usual, "b": usual, "c": (2.0,) * 12}, 1.5, 10) is not None
    assert find_straggler({"a": usual, "b": usual, "c": (1.4,) * 12}, 1.5, 10) is None
    spiky = (1.0, 1.0, *(9.0, 1.0) * 5)
    assert find_straggler({"a": usual, "b": usual, "c": spiky}, 1.5, 10) is None
    assert find_straggler({"a": usual[:11], "b": usual, "c": (2.0,) * 12}, 1.5, 10) is None
    assert find_straggler({"c": (2.0,) * 12}, 1.5, 10) is None
    found = find_straggler({"a": usual, "c": (3.0,) * 12}, 1.5, 10)
    assert found is not None
    assert (found.worker, found.pace_s, found.typical_s) == ("c", 3.0, 1.0)


@given(st.lists(st.floats(0.9, 1.1), min_size=12, max_size=12))
def test_noise_evicts_nobody(noise: list[float]) -> None:
    paces = {name: tuple(noise[i:] + noise[:i]) for i, name in enumerate("abcd")}
    assert find_straggler(paces, 1.5, 10) is None


def step_with(script: Script, number: int, **slow: float) -> list[Command]:
    commands: list[Command] = []
    for worker in script.ranks:
        generation = script.assignment.generation
        metrics = {"loss": 1.0}
        pace_s = slow.get(worker, 0.01)
        commands += script.tell(StepApplied, worker, generation, number, metrics, pace_s=pace_s)
    return commands


def slow_down(script: Script, steps: range, **slow: float) -> list[Command]:
    commands: list[Command] = []
    for number in steps:
        if script.state.phase == "running":
            commands += step_with(script, number, **slow)
    return commands


def evicting(**more: Any) -> Script:
    policy = {"evict_stragglers": True, "straggler_window_steps": 4} | more
    return script_of(2, 4, **policy).run(a="n1", b="n2", c="n3")


def test_a_straggler_is_left_out_and_released() -> None:
    script = evicting()
    slow_down(script, range(1, 8), b=0.05)
    assert script.state.phase == "pausing"
    (why,) = script.journalled("straggler_evicted")
    assert why == "b takes 50.00 ms for what takes the others 10.00 ms, in 4 of 4 steps"
    pause_all(script, 6)
    assert script.ranks == ("a", "c")
    assert of(ReleaseWorker, script.resume()) == [ReleaseWorker("b", why)]


def test_a_straggler_is_replaced_by_who_is_there() -> None:
    script = evicting(spares=1)
    script.state = replace(script.state, target=3)
    script.ready("s", "n4")
    slow_down(script, range(1, 8), b=0.05)
    pause_all(script, 6)
    assert script.ranks == ("a", "c", "s")


def test_where_there_is_nobody_else_it_is_kept_and_said() -> None:
    script = script_of(2, 2, evict_stragglers=True, straggler_window_steps=4)
    script.run(a="n1", b="n2")
    assert of(FormGeneration, slow_down(script, range(1, 8), b=0.05)) == []
    assert script.state.phase == "running"
    (why,) = script.journalled("straggler_kept")
    assert why.endswith("leaving it out would fall below min_workers")
    assert script.state.leaving == {}


def test_off_by_default() -> None:
    script = script_of(2, 4).run(a="n1", b="n2", c="n3")
    slow_down(script, range(1, 60), b=5.0)
    assert script.state.phase == "running"


# --------------------------------------------------------------------------- the planner

SHAPE = ModelShape(
    layers=8,
    dim=2048,
    heads=16,
    kv_heads=16,
    ffn_dim=8192,
    vocabulary=32_000,
    sequence_length=1024,
    block_parameters=67_000_000,
    embedding_parameters=65_000_000,
    output_parameters=65_000_000,
)


def planned(memory_bytes: float, min_workers: int = 1, max_workers: int = 8) -> Script:
    planning = Planning(
        Work(SHAPE, 48),
        Devices((1,), memory_bytes),
        Limits(micro_batches=(1,), recompute=(False,)),
        memory_bytes,
    )
    return script_of(min_workers, max_workers, planning=planning, from_scratch=True)


def eight(script: Script) -> Script:
    return script.run(**{f"w{i}": f"n{i // 4}" for i in range(8)})


def test_the_planner_shards_what_does_not_fit_whole() -> None:
    assert eight(planned(80e9)).assignment.layout == Layout(dp_replicate=8)
    tight = eight(planned(9e9)).assignment
    assert len(tight.layout.shards()) > 1
    assert "fits: " in tight.reason


def test_after_a_loss_the_rest_is_laid_out_anew() -> None:
    script = eight(planned(9e9))
    script.train(1)
    script.tell(NodeLost, "n1", "power")
    pause_all(script, 1)
    for worker in ("w0", "w1", "w2", "w3"):
        if script.state.phase == "pausing":
            script.paused(worker)
    assert {m.node for m in script.assignment.members} == {"n0"}
    assert script.assignment.layout.world_size == len(script.ranks) <= 4


def test_the_same_devices_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes seconds for thousands of them, and training is paused for it."""
    asked: list[object] = []

    def counted(*given: object) -> LayoutPlan:
        asked.append(given)
        return best(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(world, "best", counted)
    world._best.cache_clear()
    script = eight(planned(9e9))
    script.train(1)
    script.tell(NodeLost, "n1", "power")
    pause_all(script, 1)
    script.ready("new", "n2")
    assert len(asked) == len({*asked}) > 1


def test_a_world_that_can_not_hold_the_model_waits_for_more() -> None:
    script = planned(9e9)
    script.ready("a", "n1")
    script.fire("gather")
    assert script.state.phase == "suspended"
    (why,) = script.journalled("suspended")
    assert why.startswith("nothing fits on 1 devices: the least need is")
    while script.state.phase == "suspended":
        script.ready(f"x{len(script.state.ready)}", "n1")
        assert len(script.state.ready) < 5
    assert script.state.phase == "forming"


def test_a_size_that_can_not_hold_the_model_is_refused() -> None:
    script = eight(planned(9e9))
    script.tell(ResizeRequested, 1, "r1")
    assert script.journalled("resize_refused")[0].startswith("nothing fits on 1 devices")
    assert script.state.target is None


def test_a_running_jobs_steps_say_what_its_devices_reach() -> None:
    """The model explains what was measured, and the next layout is planned by that."""
    script = eight(planned(80e9))
    planning = script.policy.planning
    assert planning is not None
    choice = Choice(script.assignment.layout, 1)
    slow = replace(planning.devices, nodes=(4, 4), flops_per_s=5e12)
    took_s = step_time(planning.work, choice, Interconnect.of(slow, slow.nodes)).total
    for number in range(1, 12):
        for worker in script.ranks:
            script.tell(StepApplied, worker, 1, number, {"loss": 1.0}, took_s=took_s)
    lose(script, "w7", 11)
    assert script.state.measured.flops_per_s == pytest.approx(5e12, rel=1e-3)
    (found,) = script.journalled("calibrated")
    assert found.startswith(f"ddp8 takes {took_s:.4g} s a step")
    assert found.endswith("devices reach 5 TFLOP/s")


def test_too_few_steps_say_nothing() -> None:
    script = eight(planned(80e9))
    for worker in script.ranks:
        script.tell(StepApplied, worker, 1, 1, {"loss": 1.0}, took_s=1.0)
    lose(script, "w7", 1)
    assert script.journalled("calibrated") == []


def test_workers_say_how_much_memory_they_have() -> None:
    planning = planned(80e9).policy.planning
    assert planning is not None
    for memory_bytes, whole in ((80 * 10**9, True), (9 * 10**9, False)):
        script = script_of(1, 8, planning=replace(planning, memory_bytes=None))
        for number in range(8):
            there = replace(member(f"w{number}", "n0"), memory_bytes=memory_bytes)
            script.tell(WorkerReady, there)
        assert (len(script.assignment.layout.shards()) == 1) == whole


def test_measured_waits_say_what_its_links_reach() -> None:
    """Of a step's time, what is not waited for links is computing: both are explained, and by both
    the next layout is planned."""
    script = eight(planned(80e9))
    planning = script.policy.planning
    assert planning is not None
    choice = Choice(script.assignment.layout, 1)
    slow = replace(planning.devices, nodes=(4, 4), flops_per_s=5e12)
    slow = replace(slow, intra_bytes_per_s=3e9, inter_bytes_per_s=0.4e9)
    time = step_time(planning.work, choice, Interconnect.of(slow, slow.nodes))
    assert 0 < time.on_links < time.total
    for number in range(1, 12):
        spent = {"links_s": time.on_links} if number in (3, 10) else {}
        for worker in script.ranks:
            told = {"took_s": time.total, "spent": spent}
            script.tell(StepApplied, worker, 1, number, {"loss": 1.0}, **told)
    lose(script, "w7", 11)
    assert script.state.measured.flops_per_s == pytest.approx(5e12, rel=1e-3)
    assert script.state.measured.links == pytest.approx(0.01, rel=1e-2)
    (found,) = script.journalled("calibrated")
    assert "s are waited for links, which reach 0.01 times what was assumed" in found
    assert script.state.measured.least_waits == ()


def test_waits_for_slower_ranks_are_not_the_links() -> None:
    """A rank that is twice as slow was taken for links of a fraction of their bandwidth."""
    script = eight(planned(80e9))
    planning = script.policy.planning
    assert planning is not None
    there = replace(planning.devices, nodes=(4, 4), flops_per_s=5e12)
    choice = Choice(script.assignment.layout, 1)
    time = step_time(planning.work, choice, Interconnect.of(there, there.nodes))
    for number in range(1, 12):
        for worker in script.ranks:
            slowest = worker == "w5"
            waits_s = time.on_links + (0.0 if slowest else time.without_links)
            spent = {"links_s": waits_s} if number in (3, 10) else {}
            told = {"took_s": time.total + time.without_links, "spent": spent}
            script.tell(StepApplied, worker, 1, number, {"loss": 1.0}, **told)
    lose(script, "w7", 11)
    assert script.state.measured.links == pytest.approx(1.0, rel=1e-2)
    assert script.state.measured.flops_per_s == pytest.approx(2.5e12, rel=1e-2)


def test_a_first_world_has_those_who_are_near_as_neighbours() -> None:
    """Racks of two nodes, each in a pod: replicas of hsdp are racks, whoever was ready first."""
    where = {"a": "p2/r3", "b": "p1/r1", "c": "p2/r3", "d": "p1/r1", "e": "p1/r2", "f": "p1/r2"}
    script = script_of(6, 6, strategy="hsdp", shard_size=2)
    for worker, domain in where.items():
        script.tell(WorkerReady, replace(member(worker, f"n-{worker}"), domain=domain))
    order = [where[m.worker] for m in script.assignment.members]
    assert order == ["p1/r1", "p1/r1", "p1/r2", "p1/r2", "p2/r3", "p2/r3"]
    assert str(script.assignment.layout) == "hsdp3x2"
