"""What one worker's event costs does not grow with the world: ratios of CPU time, no seconds.

Each passage of a job's life is lived by a small and by a large world. An event that looks at
everybody, or copies what there is of everybody, takes about ``TIMES`` as long in the large one.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache, partial

import pytest

from elastic_ft.core import generations, membership
from elastic_ft.core.assignment import Holding, Tier
from elastic_ft.core.commands import Command, FormGeneration
from elastic_ft.core.events import (
    CollectiveFailed,
    Event,
    Paused,
    Resumed,
    ShardsFailed,
    ShardsWritten,
    StepApplied,
    StepHeld,
    WorkerLost,
    WorkerReady,
)
from elastic_ft.core.layouts.layout import Strategy
from elastic_ft.core.policy import Policy
from elastic_ft.core.state import CLOSED_KEPT, RECOVERIES_KEPT, State, Turn
from elastic_ft.core.world import has_joiners, joiners
from elastic_ft.sim import simulate
from tests.core.script import Script, member
from tests.sim.scenarios import make_scenario

SMALL, TIMES = 128, 16
RATIO_MAX = 3.0  # of the time per event; what is quadratic comes near TIMES
REPEATS = 2
BENCHED = 64


def world(count: int, strategy: Strategy, room: int = 0) -> Script:
    """So many workers that have trained a step; ``room`` for more."""
    return copy.copy(_world(count, strategy, room))  # states are not changed, ever


@lru_cache(maxsize=4)
def _world(count: int, strategy: Strategy, room: int) -> Script:
    script = Script(Policy(1, count + room, strategy=strategy))
    for index in range(count):
        script.ready(f"w{index}", f"n{index // 8}")
    if room:
        script.fire("gather")
    script.resume()
    script.train(1)
    return script


def holding(script: Script, rank: int, tier: Tier) -> Holding:
    layout = script.assignment.layout
    return Holding(1, layout.shard_space, layout.shard_of(rank), tier)


def come_up(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = Script(Policy(1, count + 1, strategy=strategy))
    return script, [WorkerReady(1.0, member(f"w{i}", f"n{i // 8}")) for i in range(count)]


def resume(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = Script(Policy(1, count, strategy=strategy))
    for index in range(count):
        script.ready(f"w{index}", f"n{index // 8}")
    return script, [Resumed(1.0, worker, 1, 0) for worker in script.ranks]


def apply(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = world(count, strategy)
    return script, [StepApplied(1.0, w, 1, 2, {"loss": 1.0}) for w in script.ranks]


def hold(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = world(count, strategy)
    return script, [StepHeld(1.0, worker, 1, 2) for worker in script.ranks]


def pause(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    """After as many losses as there are members, some workers benched."""
    script = world(count, strategy)
    for index in range(count):
        script.tell(WorkerLost, f"old{index}", "killed")
    benched = {f"b{i}": member(f"b{i}", f"n{i}") for i in range(BENCHED)}
    ready = script.state.ready
    for name, one in benched.items():
        ready = ready.put(name, one)
    script.state = replace(script.state, ready=ready, benched=dict.fromkeys(benched, 1))
    script.tell(CollectiveFailed, "w0", 1, 1, "broken")
    held = [
        (worker, (holding(script, rank, Tier.LIVE),)) for rank, worker in enumerate(script.ranks)
    ]
    held += [(worker, ()) for worker in benched]
    return script, [Paused(1.0, worker, 2, some) for worker, some in held]


def lose_many(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = world(count, strategy)
    script.tell(WorkerLost, f"w{count - 1}", "killed")
    return script, [WorkerLost(1.0, f"w{i}", "killed") for i in range(count // 4)]


def write(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    """A checkpoint."""
    script = world(count, strategy)
    entries = [{"shard": str(rank)} for rank in range(count)]
    tensors = {"weight": ("float32", (1,))}
    return script, [
        ShardsWritten(1.0, worker, 1, 1, (entries[rank],), tensors)
        for rank, worker in enumerate(script.ranks)
    ]


def join(count: int, strategy: Strategy) -> tuple[Script, list[Event]]:
    script = world(count, strategy, room=count)
    return script, [WorkerReady(1.0, member(f"j{i}", f"m{i // 8}")) for i in range(count // 4)]


Passage = Callable[[int, Strategy], tuple[Script, list[Event]]]


def seconds_per_event(passage: Passage, count: int, strategy: Strategy, repeats: int) -> float:
    """The least of ``repeats``: a busy machine takes longer, never shorter."""
    script, events = passage(count, strategy)
    del events[-1]  # it may decide for everybody, and be as long
    found = []
    for _ in range(repeats):
        state = script.state
        gc.collect()
        began_s = time.process_time()
        for event in events:
            state, _ = membership.step(state, event, script.policy)
        found.append((time.process_time() - began_s) / len(events))
    return min(found)


def growth(passage: Passage, strategy: Strategy, repeats: int = REPEATS) -> float:
    """Of the time per event, from the small world to the large one."""
    small = seconds_per_event(passage, SMALL, strategy, 3 * repeats)
    return seconds_per_event(passage, SMALL * TIMES, strategy, repeats) / small


@pytest.mark.parametrize(
    "passage",
    [come_up, resume, apply, hold, pause, lose_many, write, join],
    ids=lambda p: p.__name__,
)
def test_an_event_costs_the_same_in_a_world_sixteen_times_as_large(passage: Passage) -> None:
    assert growth(passage, "fsdp") < RATIO_MAX


def test_a_scan_of_everybody_for_each_answer_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def scans(turn: Turn) -> bool:
        return all(worker in turn.state.paused for worker in reversed(turn.holders()))

    monkeypatch.setattr(generations, "have_paused", scans)
    assert growth(pause, "fsdp", repeats=1) > RATIO_MAX


def containers_at_once(decide: Callable[[], object], count: int) -> float:
    """Per worker of ``count``: how many Python's garbage collector has seen made and not yet gone.

    Each so many of them have it go through those that there are, and now and then through all that
    a controller has: in a large world that takes as long as the decision.
    """
    collections, threshold, limits = 0, 500, gc.get_threshold()

    def seen(phase: str, info: dict[str, int]) -> None:
        nonlocal collections
        collections += phase == "start"

    gc.collect()
    gc.set_threshold(threshold, 10**6, 10**6)
    gc.callbacks.append(seen)
    try:
        decide()
    finally:
        gc.callbacks.remove(seen)
        gc.set_threshold(*limits)
    return collections * threshold / count


def test_little_is_made_of_each_worker_when_a_world_is_chosen() -> None:
    """What there is of each in the end, and not much besides."""
    count = SMALL * TIMES
    script = world(count, "fsdp")
    script.tell(WorkerLost, f"w{count // 2}", "killed")
    peers = {buddy: rank for rank, who in enumerate(script.assignment.buddies) for buddy in who}
    alive = [(r, worker) for r, worker in enumerate(script.ranks) if worker in script.state.ready]
    answers = [
        Paused(1.0, w, 2, (script.live(w, 1), script.holding(1, peers[r], Tier.PEER)))
        for r, w in alive
    ]
    for answer in answers[:-1]:
        script.state, _ = membership.step(script.state, answer, script.policy)
    decide = partial(membership.step, script.state, answers[-1], script.policy)
    assert any(isinstance(command, FormGeneration) for command in decide()[1])
    made = containers_at_once(decide, count)
    assert made < 6


# ------------------------------------------------ what is counted is what is there


def told(seeds: Iterable[int]) -> int:
    """Simulates; compares what is counted with what is listed, after every event."""
    compared = 0

    def decide(state: State, event: Event, policy: Policy) -> tuple[State, tuple[Command, ...]]:
        nonlocal compared
        after, commands = membership.step(state, event, policy)
        turn = Turn(after, policy, event.at_s)
        assert turn.count_usable() == len(turn.usable())
        assert turn.count_not_leaving() == len(turn.not_leaving())
        if after.phase == "running":
            assert has_joiners(turn) == bool(joiners(turn))
            compared += has_joiners(turn)
        if after.phase == "pausing":
            awaited = {w for w in turn.holders() if w not in after.paused}
            assert awaited <= set(after.asked[after.answered :])
        return after, commands

    for seed in seeds:
        simulate(make_scenario(seed), decide=decide)
    return compared


def test_what_is_counted_is_what_would_be_listed() -> None:
    assert told(range(40)) > 10


# ------------------------------------------------------------------- nothing is kept for ever


def test_the_gone_are_remembered_and_not_for_ever() -> None:
    script = world(2, "ddp")
    for index in range(20_000):
        script.tell(WorkerLost, f"old{index}", "killed")
    assert 4096 <= len(script.state.gone) <= 2 * 4096
    assert not script.ready("old19999", "n9"), "an id is never used again (I1)"
    assert "old19999" not in script.state.ready


def test_recoveries_and_ended_uploads_are_remembered_and_not_for_ever() -> None:
    script = world(2, "fsdp")
    script.policy = replace(script.policy, max_generations_without_progress=10**6)
    many = 2 * RECOVERIES_KEPT
    for number in range(2, many + 2):
        script.tell(CollectiveFailed, "w0", script.assignment.generation, 1, "broken")
        for worker in script.ranks:
            script.paused(worker, script.live(worker, script.state.committed))
        script.resume()
        script.train(number)
    assert len(script.state.recoveries) == RECOVERIES_KEPT
    assert script.state.failures == many, "all of them count"
    for number in range(many + 2, 2 * many):
        script.train(number)
        generation = script.assignment.generation
        script.tell(ShardsFailed, "w0", generation, number, "disk full")
        assert not script.state.uploads.attempts
    assert len(script.state.uploads.closed_attempts) <= CLOSED_KEPT
    late = (ShardsWritten, "w1", generation, many + 2, ())
    assert not script.tell(*late) and not script.state.uploads.attempts, (
        "it began long ago, and is void"
    )
