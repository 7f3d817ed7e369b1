"""The controller's inbox: in order, and what can wait wakes nobody."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace

import pytest

from elastic_ft.controller.controller import is_steady
from elastic_ft.controller.inbox import Inbox
from elastic_ft.core.assignment import Assignment, Source, Tier
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.state import State


def test_all_that_came_is_taken_in_order() -> None:
    inbox = Inbox()
    for put, item in ((inbox.put_aside, 1), (inbox.put, 2), (inbox.put_aside, 3), (inbox.put, 4)):
        put(item)
    assert inbox.take(0.0) == [1, 2, 3, 4]
    assert inbox.take(0.0) == []


def test_what_can_wait_wakes_nobody_and_comes_first() -> None:
    inbox, taken = Inbox(), []
    reader = threading.Thread(target=lambda: taken.extend(inbox.take(30.0)))
    reader.start()
    inbox.put_aside("a step")
    reader.join(0.1)
    assert reader.is_alive()
    inbox.put("a loss")
    reader.join(10.0)
    assert taken == ["a step", "a loss"]


def test_it_is_looked_at_in_time_though_nobody_calls() -> None:
    inbox = Inbox()
    inbox.put_aside("a step")
    assert inbox.take(0.01) == ["a step"]


def test_one_is_waited_for() -> None:
    inbox = Inbox()
    inbox.put(1)
    inbox.put(2)
    assert [inbox.get(1.0), inbox.get(1.0)] == [1, 2]
    with pytest.raises(queue.Empty):
        inbox.get(0.01)


def test_the_first_step_after_a_pause_does_not_wait() -> None:
    source = Source(7, Tier.LIVE)
    formed = State(phase="running", assignment=Assignment(2, (), (), Layout(), source, (), ""))
    assert not is_steady(replace(formed, committed=7))
    assert is_steady(replace(formed, committed=8))
    assert not is_steady(replace(formed, committed=8, phase="pausing"))
    assert not is_steady(State())
