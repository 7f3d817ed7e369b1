"""What a step waits for, and what the journal is told of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.engines.native import NativeEngine
from elastic_ft.groups.waits import EVERY_STEPS, WAITS
from elastic_ft.state.snapshot import Snapshots
from elastic_ft.worker.overlap import FIRST, Overlap
from tests.oneproc.alone import job_of

CPU, WAIT_S = torch.device("cpu"), 60.0


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    WAITS.forget()
    dist.destroy_process_group()


@pytest.fixture
def overlap() -> Overlap:
    return Overlap(Snapshots("w0", pinned=False, unkept=print), CPU, Layout(dp_shard=2))


@pytest.mark.usefixtures("world_of_one")
def test_waits_count_by_kind_between_begin_and_take() -> None:
    dist.all_reduce(torch.ones(1))  # nobody asked
    WAITS.begin()
    dist.all_reduce(torch.ones(1))
    with WAITS.named("agreement"):
        dist.broadcast(torch.ones(1), src=0)
    dist.all_to_all_single(torch.ones(1), torch.ones(1))
    exposed, hidden = WAITS.take()
    dist.all_reduce(torch.ones(1))  # nobody asks any more
    assert exposed.keys() == {"all_reduce", "agreement", "all_to_all"}
    assert min(exposed.values()) > 0 and hidden == {}
    WAITS.begin()
    assert WAITS.take() == ({}, {})


@pytest.mark.usefixtures("world_of_one")
def test_waits_of_other_threads_do_not_count() -> None:
    WAITS.begin()
    other = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
    other.start()
    other.join()
    assert WAITS.take() == ({}, {})


@pytest.mark.usefixtures("world_of_one")
def test_ddp_says_what_its_backward_hides() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    runner = WAITS.watch(DistributedDataParallel(model))
    WAITS.begin()
    runner(torch.ones(8, 64)).sum().backward()
    exposed, hidden = WAITS.take()
    assert exposed["all_reduce"] >= 0 and hidden["all_reduce"] >= 0
    assert exposed["all_reduce"] + hidden["all_reduce"] > 0
    runner.reducer = runner.logger = None  # as an engine lets go of it
    WAITS.begin()
    assert WAITS.take() == ({}, {})


@pytest.mark.usefixtures("world_of_one")
def test_who_is_left_behind_is_asked_nothing_more() -> None:
    """Its thread may hold the reducer's lock for good, inside the backward that it never ends."""
    job = job_of(parallel={"strategy": "ddp"})
    engine = NativeEngine(job, lambda: nn.Linear(2, 2), CPU, 1)
    engine.prepare()
    runner = WAITS.watch(DistributedDataParallel(nn.Linear(2, 2)))
    engine._runner, in_use = runner, list[object]()
    engine.detach(in_use)
    assert runner in in_use and runner.logger is not None
    WAITS.begin()
    assert WAITS.take() == ({}, {})


@pytest.mark.usefixtures("world_of_one")
def test_who_was_left_behind_and_wakes_falsifies_nothing(overlap: Overlap) -> None:
    """Whatever the next generation waited for was told as what it was left in; and once it woke,
    as for how long it had been there, and without what DDP waited for."""
    inside, wakes = threading.Event(), threading.Event()

    def trains() -> None:
        WAITS.begin()
        with WAITS.named("agreement"):
            inside.set()
            assert wakes.wait(WAIT_S)
            WAITS._add("all_gather", 1e6)  # as its wait ends
        overlap.close()

    left = threading.Thread(target=trains, daemon=True)
    left.start()
    assert inside.wait(WAIT_S)
    WAITS.forget()
    WAITS.watch(DistributedDataParallel(nn.Linear(2, 2)))
    WAITS.begin()
    wakes.set()
    left.join(WAIT_S)
    dist.broadcast(torch.ones(1), src=0)
    exposed, hidden = WAITS.take()
    assert exposed.keys() == {"broadcast", "all_reduce"} and hidden.keys() == {"all_reduce"}


@pytest.mark.usefixtures("world_of_one")
def test_what_is_waited_for_is_named_by_who_waits() -> None:
    inside, over = threading.Event(), threading.Event()

    def is_left() -> None:
        with WAITS.named("agreement"):
            inside.set()
            assert over.wait(WAIT_S)

    left = threading.Thread(target=is_left, daemon=True)
    left.start()
    assert inside.wait(WAIT_S)
    WAITS.begin()
    dist.broadcast(torch.ones(1), src=0)
    over.set()
    left.join(WAIT_S)
    assert WAITS.take()[0].keys() == {"broadcast"}


def test_one_step_in_so_many_is_measured(overlap: Overlap) -> None:
    measured = []
    for step in range(1, 2 * EVERY_STEPS + 2):
        overlap.begin()
        if overlap.measured():
            measured.append(step)
    assert measured == [FIRST, EVERY_STEPS, 2 * EVERY_STEPS]


def test_on_gpus_nothing_is_measured() -> None:
    snapshots = Snapshots("w0", pinned=False, unkept=print)
    overlap = Overlap(snapshots, torch.device("cuda"), Layout(dp_shard=2))
    for _ in range(FIRST):
        overlap.begin()
    assert overlap.measured() == {}


def test_the_journal_is_told_when_the_share_has_changed(overlap: Overlap) -> None:
    """But ever more seldom: a machine with other things to do has no steady share."""
    hidden, told = {"snapshot": 0.01}, []
    for step in range(1, 8 * EVERY_STEPS + 1):
        overlap.begin()
        waited_s = 0.05 if step <= FIRST else 0.02 * (step % 3)
        if overlap.measured() and overlap.news(0.1, {"all_gather": waited_s}, hidden):
            told.append(step)
    assert told[0] == FIRST and len(told) <= 5
    assert all(later >= 2 * earlier for earlier, later in pairwise(told))


def test_its_words(overlap: Overlap) -> None:
    overlap.begin()
    found = overlap.news(0.1, {"all_gather": 0.02, "agreement": 0.001}, {"snapshot": 0.03})
    assert found == (
        "of a step of 100.0 ms, computing waits 21%: all_gather 20.0 ms, agreement 1.0 ms; "
        "hidden behind it: snapshot 30.0 ms"
    )
    unchanged = overlap.news(0.1, {"all_gather": 0.021}, {})
    assert unchanged == ""
