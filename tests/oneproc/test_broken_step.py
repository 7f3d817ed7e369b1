"""What a step that broke had in memory is free before anything else needs the device's."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_ft.worker.by_user import ByUser
from elastic_ft.worker.traces import forget_frames
from elastic_ft.worker.training_thread import TrainingThread
from elastic_ft.worker.worker import Worker

Alive = Callable[[], torch.Tensor | None]


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Not even by chance: what is in cycles stays, as for seconds in a worker."""
    gc.disable()
    yield
    gc.enable()


def breaks(kept: list[Alive]) -> None:
    activations = torch.zeros(4)
    kept.append(weakref.ref(activations))
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def of_native(kept: list[Alive]) -> Iterator[Any]:
    breaks(kept)
    yield


def of_a_users_function(kept: list[Alive]) -> Iterator[Any]:
    """Made in its own thread, which hands over what it raised."""
    own: Any = SimpleNamespace(engine=None)
    handed = ByUser(own)._attempted()
    next(handed)
    try:
        breaks(kept)
    except Exception as error:
        own.raised = error
    yield from handed


@pytest.mark.parametrize("step", [of_native, of_a_users_function])
def test_it_is_free_once_its_generation_is_left(
    nothing_collected: None, step: Callable[[list[Alive]], Iterator[Any]]
) -> None:
    """Out of memory is tried once more with an empty cache: with all of that step still there it
    had less room than at first, and the worker was given up as one with a sick device. After any
    loss the next step's memory came beside that of the one that broke."""
    kept: list[Alive] = []
    alive: list[bool] = []
    told: list[str] = []
    worker: Any = object.__new__(Worker)
    forms = iter([SimpleNamespace(assignment=SimpleNamespace(generation=1)), None])
    worker._line = SimpleNamespace(iterated=False, await_over=lambda: None)
    worker._training, worker._loop = TrainingThread(), None
    worker._trouble = SimpleNamespace(explain=lambda *a, **_: told.append(type(a[1]).__name__))
    worker._prepare = lambda: None
    worker._next_form = lambda: next(forms)
    worker._broken_for_good = lambda: ""
    worker._generation = lambda tools, form: step(kept)
    worker._retreat = lambda tools: alive.append(kept[0]() is not None)
    try:
        worker.run()
    finally:
        worker._training.close()
    assert told == ["OutOfMemoryError"]
    assert alive == [False]


def test_errors_that_are_each_others_cause_have_an_end() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    forget_frames(one)


def test_a_generator_in_its_way_goes_on() -> None:
    """One that keeps what it was thrown, and yields more."""

    def reads() -> Iterator[int]:
        try:
            yield 1
        except ValueError as error:
            kept.append(error)
            yield 2
        yield 3

    kept: list[BaseException] = []
    reading = reads()
    next(reading)
    assert reading.throw(ValueError("torn")) == 2  # type: ignore[attr-defined]
    forget_frames(kept[0])
    assert next(reading) == 3
