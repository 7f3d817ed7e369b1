"""The prefetcher: what is read ahead, in which order, and how its errors come out."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from elastic_ft.data.dataset import DataBundle
from elastic_ft.data.prefetch import Loaded, Prefetcher
from elastic_ft.engines.base import MicroBatch
from elastic_ft.errors import DataError, GroupBroken
from elastic_ft.worker.agreement import places
from elastic_ft.worker.same_data import check_data_of_run, data_in_words
from tests.waiting import until

DEADLINE_S = 120


# ----------------------------------------------------------------------------------- prefetcher


class Slow:
    """A dataset whose reading the test steps: logs indices, can fail, can be held."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.broken: set[int] = set()
        self.held: set[int] = set()
        self.gate = threading.Event()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if index in self.held:
            assert self.gate.wait(DEADLINE_S)
        if index in self.broken:
            raise RuntimeError(f"sample {index} is damaged")
        return index

    def collate(self, samples: list[int]) -> list[int]:
        return samples


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def prefetcher(slow: Slow) -> Iterator[Prefetcher]:
    with Prefetcher(slow) as made:
        yield made
        slow.gate.set()


def _data(micro_batches: list[Loaded]) -> list[Any]:
    return [micro_batch.data for micro_batch in micro_batches]


def test_what_was_read_comes_with_its_ids(slow: Slow, prefetcher: Prefetcher) -> None:
    """The ledger is of what was read, in whichever epoch, not of what was planned."""
    prefetcher.request(1, [(103, 4), (203,)])
    first, second = prefetcher.get(1, DEADLINE_S)
    assert (first.ids, first.data) == ((103, 4), [3, 4])
    assert (second.ids, second.data) == ((203,), [3])
    assert slow.read == [3, 4, 3]


def test_the_ledger_has_what_was_read_in_its_place() -> None:
    """A loader that brings another step's samples shows; one that plans right and reads wrong did
    not, as the ledger was made of the plan."""
    read = [
        MicroBatch(1, None, ids=(40, 41)),
        MicroBatch(2, None, ids=(7, 8)),
        MicroBatch(3, None, 0.0, (40, 41)),  # padding
    ]
    assert places(read, 8, 2) == [0, 0, 41, 42, 8, 9, 0, 0]


def test_micro_batches_come_in_the_order_of_the_request(prefetcher: Prefetcher) -> None:
    prefetcher.request(1, [(3, 4), (1, 2)])
    prefetcher.request(2, [(9,)])
    assert _data(prefetcher.get(1, DEADLINE_S)) == [[3, 4], [1, 2]]
    prefetcher.request(3, [])
    assert _data(prefetcher.get(2, DEADLINE_S)) == [[9]]
    assert _data(prefetcher.get(3, DEADLINE_S)) == []


def test_another_deal_of_a_step_loads_only_what_is_new(slow: Slow, prefetcher: Prefetcher) -> None:
    prefetcher.request(5, [(0, 1), (2, 3)])
    prefetcher.get(5, DEADLINE_S)
    prefetcher.cancel()  # the step broke: a new generation deals it again
    prefetcher.request(5, [(2, 3), (4, 5)])
    assert _data(prefetcher.get(5, DEADLINE_S)) == [[2, 3], [4, 5]]
    assert slow.read == [0, 1, 2, 3, 4, 5]


def test_requests_are_bounded(prefetcher: Prefetcher) -> None:
    prefetcher.request(1, [(0,)])
    prefetcher.request(2, [(1,)])
    prefetcher.request(2, [(2,)])
    with pytest.raises(ValueError, match=r"step 3 requested while \[1, 2\] are wanted"):
        prefetcher.request(3, [(3,)])
    prefetcher.cancel()
    prefetcher.request(3, [(3,)])
    assert _data(prefetcher.get(3, DEADLINE_S)) == [[3]]


def test_what_is_behind_is_forgotten(slow: Slow, prefetcher: Prefetcher) -> None:
    for step in (1, 2):
        prefetcher.request(step, [(0,)])
        prefetcher.get(step, DEADLINE_S)
    prefetcher.request(1, [(0,)])
    prefetcher.get(1, DEADLINE_S)
    assert slow.read == [0, 0, 0]


def test_a_datasets_error_surfaces_and_can_be_retried(slow: Slow, prefetcher: Prefetcher) -> None:
    slow.broken = {7}
    prefetcher.request(1, [(6,), (7,)])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="sample 7 is damaged"):
            prefetcher.get(1, DEADLINE_S)
    slow.broken = set()
    prefetcher.request(1, [(6,), (7,)])
    assert _data(prefetcher.get(1, DEADLINE_S)) == [[6], [7]]
    assert slow.read == [6, 7, 7]


class Set(Slow):
    """Its level is set from outside; it counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.count, self.lengths = 0, 0, {"least": 1}

    def __getitem__(self, index: int) -> int:
        self.count += 1
        return super().__getitem__(index) + self.level + self.lengths["least"]


def test_a_setting_that_is_no_number_has_not_changed() -> None:
    data = Slow()
    data.limits = [math.nan, 1.0]  # type: ignore[attr-defined]
    with Prefetcher(data) as prefetcher:
        prefetcher.request(1, [(5,)])
        prefetcher.get(1)
        data.limits = [float("nan"), 1.0]  # type: ignore[attr-defined]
        assert not prefetcher.renew()


class Opening(Slow):
    """Opens a file in its third sample, and notes which was read last from there on."""

    last = -1

    def __getitem__(self, index: int) -> int:
        if len(self.read) > 1:
            self.last = index
        return super().__getitem__(index)


def test_what_reading_changes_later_on_is_learnt() -> None:
    data = Opening()
    with Prefetcher(data) as prefetcher:
        renewed = []
        for step in range(1, 6):
            prefetcher.request(step, [(step,)])
            assert [read.data for read in prefetcher.get(step)] == [[step]]
            renewed.append(prefetcher.renew())
            if renewed[-1]:
                assert [read.data for read in prefetcher.get(step)] == [[step]]
        assert renewed == [False, False, True, False, False]


def test_what_was_read_with_other_settings_is_read_again() -> None:
    """Also what is being read while they are changed; not for what reading itself changes."""
    data = Set()
    data.held.add(7)
    with Prefetcher(data) as prefetcher:
        prefetcher.request(1, [(4,), (5,)])
        assert [read.data for read in prefetcher.get(1)] == [[5], [6]]
        assert not prefetcher.renew()
        prefetcher.request(2, [(6,), (7,)])
        until(lambda: 7 in data.read)
        data.level = 100
        assert prefetcher.renew()
        data.lengths["least"] = 10
        assert prefetcher.renew()
        data.gate.set()
        assert [read.data for read in prefetcher.get(1)] == [[114], [115]]
        assert [read.data for read in prefetcher.get(2)] == [[116], [117]]
        assert not prefetcher.renew()


def test_get_has_a_deadline(slow: Slow, prefetcher: Prefetcher) -> None:
    slow.held = {1}
    prefetcher.request(4, [(1, 2)])
    with pytest.raises(
        TimeoutError, match=r"step 4: 1 micro-batches not loaded, and no other for 0.05 s, "
    ):
        prefetcher.get(4, timeout_s=0.05)


def test_the_deadline_is_of_one_micro_batch_and_not_of_all_that_a_step_has() -> None:
    """A step of many is slow, and no hang: ``hang_timeout_s`` ended such a job."""

    class Steady(Slow):
        def __getitem__(self, index: int) -> int:
            threading.Event().wait(0.1)
            return index

    with Prefetcher(Steady()) as made:
        made.request(1, [(index,) for index in range(20)])
        began = time.monotonic()
        assert len(made.get(1, timeout_s=1.9)) == 20
        assert time.monotonic() - began > 1.9


def test_cancel_wakes_a_waiting_get(slow: Slow, prefetcher: Prefetcher) -> None:
    slow.held = {1}
    prefetcher.request(4, [(1,)])
    watchdog = threading.Timer(0.05, prefetcher.cancel)
    watchdog.start()
    with pytest.raises(GroupBroken, match="step 4: its data was cancelled"):
        prefetcher.get(4, DEADLINE_S)
    watchdog.join()


def test_a_step_that_was_not_requested_is_a_mistake(prefetcher: Prefetcher) -> None:
    with pytest.raises(ValueError, match=r"step 9 was not requested; wanted: \[\]"):
        prefetcher.get(9)


def test_closing_ends_the_thread(slow: Slow) -> None:
    prefetcher = Prefetcher(slow)
    prefetcher.request(1, [(1,)])
    prefetcher.get(1, DEADLINE_S)
    prefetcher.close()
    assert not any(thread.name == "prefetch" for thread in threading.enumerate())


# --------------------------------------------------------------------------- one data for all


def test_data_is_told_apart_by_size_where_it_has_no_fingerprint(slow: Slow) -> None:
    """The whole order depends on it (``test_same_data`` has what comes of it)."""
    assert data_in_words(DataBundle(slow, None, None, None, "")) == "100 samples"
    named = DataBundle(slow, None, None, None, "", "f00d")
    assert data_in_words(named) == "100 samples, fingerprint f00d"


def test_a_joiner_compares_with_the_run(slow: Slow) -> None:
    bundle = DataBundle(slow, None, None, None, "")
    check_data_of_run({}, bundle)
    check_data_of_run({"data.samples": 100}, bundle)
    with pytest.raises(DataError, match=r"data\.samples was 99, is 100: going on would repeat"):
        check_data_of_run({"data.samples": 99}, bundle)
