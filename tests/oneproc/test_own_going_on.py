"""A loop over the loader that goes on from step to step without the script's thread."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_ft.training.context import Context
from elastic_ft.worker.by_user import ByUser
from elastic_ft.worker.steering import Dealt, Ended
from elastic_ft.worker.step import Step
from tests.oneproc.test_own_context import context


def steps_by_themselves(
    ctx: Context, broken: int = 0, interrupted: int = 0, away: range = range(0)
) -> list[Any]:
    """Has the worker go on as the training thread does, where nobody need see the step: returns
    what is given to the script's thread. After step ``broken`` another generation deals the next;
    Ctrl-C comes in step ``interrupted``; others make the steps ``away``."""
    own, deal, given, generations = ctx._steering("a test"), ctx.worker.next_item, [], [1]

    def items() -> Any:
        while True:
            item = deal()
            if isinstance(item, Dealt) and item.running.number in away:
                generations.append(3)
                continue
            if isinstance(item, Dealt):
                yield replace(item, generation=generations[-1])
                assert own.body is not None
                own.body()
                number = ctx._awaited().running.number
                if number == broken:
                    generations.append(2)
                if number == interrupted:
                    ctx._interrupts._came = True
                item = Step(number, 0.0, 0.1, 0.0, 0, 0.0, 1, 1, 0)
                own.body = None
            yield item

    def unseen() -> Any:
        for item in items():
            if isinstance(item, Ended) or own.goes_on is None or not own.goes_on(item):
                given.append(item)
                yield item

    ctx.worker.next_item = unseen().__next__  # type: ignore[method-assign]
    return given


def numbers_of(given: list[Any], kind: type) -> list[int]:
    found = (item for item in given if isinstance(item, kind))
    return [item.number if isinstance(item, Step) else item.running.number for item in found]


@pytest.mark.parametrize("epochs", [True, False])
def test_each_wakes_the_scripts_thread_where_it_has_something_to_see(epochs: bool) -> None:
    """Each step changed threads four times, between which no line of the script's lies."""
    ctx, loader = context(last=24)
    given, seen = steps_by_themselves(ctx, broken=19), list[tuple[int, int]]()
    worlds = list[int]()
    ctx.on_generation(lambda ctx: worlds.append(ctx.generation))
    for _ in ctx.epochs(2, steps=12) if epochs else range(1):

        @ctx.each(loader, whole=True, enumerated=True)
        def train_step(place: int, batch: Any) -> None:
            seen.append((place, batch.number))

    places = [*range(12), *range(12)] if epochs else [*range(24)]
    assert seen == list(zip(places, range(1, 25), strict=True))
    ends = [12, 24] if epochs else []
    assert numbers_of(given, Step) == sorted({1, 2, 4, 8, 16, *ends})  # variables are looked at
    assert 20 in numbers_of(given, Dealt) and worlds == [1, 2]
    assert ctx.latest is not None and ctx.latest.number == 24


def test_an_interrupt_leaves_a_loop_that_goes_on_by_itself() -> None:
    ctx, loader = context(last=24)
    steps_by_themselves(ctx, interrupted=11)
    with pytest.raises(KeyboardInterrupt):
        ctx.each(loader, whole=True)(lambda batch: None)
    assert ctx.latest is not None and ctx.latest.number == 11


def test_a_training_that_is_ended_meanwhile_is_left() -> None:
    ctx, loader = context(last=6)
    given = steps_by_themselves(ctx)
    ctx.each(loader, whole=True)(lambda batch: None)
    assert isinstance(given[-1], Ended) and numbers_of(given, Step) == [1, 2, 4]
    assert ctx.latest is not None and ctx.latest.number == 6


def test_who_was_away_as_an_epoch_ended_goes_on_in_that_of_the_others() -> None:
    ctx, loader = context(last=24)
    steps_by_themselves(ctx, away=range(6, 15))
    seen = list[tuple[int, int, int]]()
    for epoch in ctx.epochs(2, steps=12):

        @ctx.each(loader, whole=True, enumerated=True)
        def train_step(place: int, batch: Any, epoch: int = epoch) -> None:
            seen.append((epoch, place, batch.number))

    assert seen[:6] == [*((0, n - 1, n) for n in range(1, 6)), (1, 2, 15)]
    assert seen[6:] == [(1, n - 13, n) for n in range(16, 25)]


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_is_registered_is_read_again_where_the_script_has_run(goes_on: bool) -> None:
    """It was in each step, for which small tensors on a GPU were waited for once more."""
    steering: Any = SimpleNamespace(goes_on=lambda item: goes_on, ending=False, engine=None)
    steering.take_errand = lambda: None
    points = SimpleNamespace(outside=nullcontext)
    loop: Any = SimpleNamespace(pausing=False, stopping=False, tools=SimpleNamespace(points=points))
    step, given = Step(1, 0.0, 0.1, 0.0, 0, 0.0, 1, 1, 0), list[Any]()

    def maker() -> Any:
        given.append((yield from ByUser(steering)._given(loop, step)))

    assert list(maker()) == ([] if goes_on else [step])
    assert given == [not goes_on]
