"""A URL has one owner, its newest, whatever the store does and whoever wakes up late."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.errors import StorageError, StoreFailed, Superseded, UsageError
from elastic_ft.storage import checkpoints, inspect, owners, prune
from elastic_ft.storage.kinds import Backend
from elastic_ft.storage.store import Store, open_store
from tests.storage.states import save, some_state, write


def take(store: Store, run: str, job: str = "job", **more: Any) -> owners.Claim:
    return owners.take_over(store, job=job, run=run, run_folder="runs/x", **more)


def test_the_newest_has_it_and_the_older_is_told_in_one_line(url: str) -> None:
    first = take(open_store(url), "run1")
    first.check()
    second = take(open_store(url), "run2")
    second.check()
    with pytest.raises(Superseded, match="superseded by run run2 of job job, started on") as told:
        first.check()
    assert "\n" not in str(told.value)
    assert (first.number, second.number) == (1, 2)


def test_many_at_once_are_numbered_and_the_last_one_has_it(url: str) -> None:
    with ThreadPoolExecutor(6) as pool:
        claims = list(pool.map(lambda i: take(open_store(url), f"run{i}"), range(6)))
    claims.sort(key=lambda claim: claim.number)
    assert [claim.number for claim in claims] == [1, 2, 3, 4, 5, 6]
    claims[-1].check()
    for claim in claims[:-1]:
        with pytest.raises(Superseded):
            claim.check()
    assert claims[-1].unended == tuple(claim.owner.run for claim in claims[:-1])


def test_who_did_not_end_is_known_until_it_is_rescued(url: str) -> None:
    """Killed twice: the third still knows of the first."""
    assert take(open_store(url), "run1").unended == ()
    assert take(open_store(url), "run2").unended == ("run1",)
    third = take(open_store(url), "run3")
    assert third.unended == ("run1", "run2")
    third.ended("run1")
    fourth = take(open_store(url), "run4")
    assert fourth.unended == ("run2", "run3")
    for run in fourth.unended:
        fourth.ended(run)
    fourth.ended()
    assert take(open_store(url), "run5").unended == ()


def test_one_run_may_take_a_url_twice(url: str) -> None:
    """Its run folder and its checkpoint.url are the same one."""
    store = open_store(url)
    take(store, "run1")
    folder = take(store, "run2")
    checkpoint = take(store, "run2")
    assert folder.unended == checkpoint.unended == ("run1",)
    folder.check()
    checkpoint.check()
    third = take(store, "run3")
    assert third.unended == ("run1", "run2")
    for claim in (folder, checkpoint):
        with pytest.raises(Superseded, match="by run run3"):
            claim.check()
    third.check()


def test_another_job_is_refused_and_changes_nothing(url: str) -> None:
    store = open_store(url)
    first = take(store, "run1")
    before = store.list()
    for refused in (lambda: take(store, "run2", "other"), lambda: owners.check_job(store, "other")):
        with pytest.raises(UsageError, match=r"is of job 'job' .*, not of 'other'") as told:
            refused()
        assert "\n" not in str(told.value)
    assert store.list() == before
    first.check()


def test_another_jobs_checkpoints_are_refused_where_nobody_signed(tmp_path: Path) -> None:
    """As a version without owners left them."""
    store = open_store(str(tmp_path))
    save(store, 10)
    with pytest.raises(UsageError, match="is of job 'job', not of 'other'"):
        take(store, "run1", "other")
    assert take(store, "run1").checkpoints()[0].step == 10


class Faulty:
    """A backend whose conditional writes take place and say that they failed, or the reverse."""

    def __init__(self, backend: Backend, lost: int = 0, failed: int = 0) -> None:
        self._backend, self.lost, self.failed = backend, lost, failed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        if self.failed:
            self.failed -= 1
            raise ConnectionError("refused")
        done = self._backend.create(key, data, timeout_s)
        if self.lost:
            self.lost -= 1
            raise ConnectionError("cut off before the answer")
        return done


@pytest.mark.parametrize(("lost", "failed"), [(1, 0), (0, 3), (1, 2)])
def test_a_lost_acknowledgement_is_read_back(url: str, lost: int, failed: int) -> None:
    store = open_store(url)
    take(store, "run1")
    faulty: Any = Faulty(store.backend, lost, failed)
    claim = take(Store(store.url, faulty), "run2")
    assert claim.number == 2
    claim.check()
    assert (faulty.lost, faulty.failed) == (0, 0)


def test_a_store_that_refuses_for_good_is_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    faulty: Any = Faulty(store.backend, failed=1000)
    with pytest.raises(StoreFailed, match=r"could not be taken over.*refused"):
        take(Store(store.url, faulty), "run1")


def test_who_is_superseded_in_the_run_folder_is_refused_here(url: str) -> None:
    """It came here late: it was stopped between its run folder and its checkpoints."""
    store = open_store(url)
    second = take(store, "run2", behind=("run1",))
    before = store.list()
    with pytest.raises(Superseded, match="superseded by run run2"):
        take(store, "run1")
    assert store.list() == before
    second.check()
    assert owners.successor(store, second.number) is None
    third = take(store, "run3")
    with pytest.raises(Superseded, match="by run run3"):
        second.check()
    with pytest.raises(Superseded, match="superseded by run run3"):  # however late
        take(store, "run1")
    third.check()


def test_an_owner_of_an_older_version_names_nobody_behind_it(url: str) -> None:
    store = open_store(url)
    values = json.loads(take(store, "run1").owner.to_json())
    del values["behind"]
    store.put("owners/1", json.dumps(values).encode())
    assert take(store, "run2", behind=("run0",)).owner.behind == ("run0",)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[1]", b"\0\0\0", b'{"job": 3}', b"\xff\xfe", b"[" * 100_000]
)
def test_an_object_that_is_no_owners_is_named(tmp_path: Path, content: bytes) -> None:
    store = open_store(str(tmp_path))
    store.put("owners/1", content)
    with pytest.raises(StorageError, match="owners/1 is not what a controller writes") as told:
        take(store, "run1")
    assert "\n" not in str(told.value)


class Torn:
    """A backend of which the first read finds an object half written."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.torn = backend, 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Any:
        whole = self._backend.get(key, start, end, timeout_s)
        if self.torn:
            self.torn -= 1
            return whole[: len(whole) // 2]
        return whole


def test_an_object_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    """Not every store writes whole objects."""
    store = open_store(str(tmp_path))
    take(store, "run1")
    torn: Any = Torn(store.backend)
    owner, _ = owners.newest(Store(store.url, torn))
    assert owner is not None and (owner.run, torn.torn) == ("run1", 0)


def test_a_job_that_was_renamed_goes_on_where_it_says_so(url: str) -> None:
    store = open_store(url)
    first = take(store, "run1", "old")
    with pytest.raises(UsageError, match=r"is of job 'old' .*\(--accept-changes, if it was"):
        take(store, "run2", "new")
    first.check()
    second = take(store, "run2", "new", renamed=True)
    assert (second.renamed_from, second.unended) == ("old", ("run1",))
    with pytest.raises(Superseded):
        first.check()
    with pytest.raises(UsageError, match="is of job 'new'"):
        take(store, "run3", "old")
    assert take(store, "run3", "new").renamed_from == ""


def test_checkpoints_without_an_owner_may_be_of_a_renamed_job(url: str) -> None:
    store = open_store(url)
    save(store, 1)
    with pytest.raises(UsageError, match="is of job 'job'"):
        take(store, "run1", "new")
    assert take(store, "run1", "new", renamed=True).renamed_from == "job"


# ------------------------------------------------------------------- what the older one does


def signed(store: Store, step: int, claim: owners.Claim) -> Any:
    manifest = write(store, some_state(step), step, run=claim.owner.run)
    return dataclasses.replace(manifest, extra={"owner": claim.number})


def steps(claim: owners.Claim) -> list[int]:
    return [ref.step for ref in claim.checkpoints()]


def test_what_is_published_late_counts_for_nobody(url: str) -> None:
    """The first is stopped between its look and its manifest, and wakes up."""
    store = open_store(url)
    first = take(store, "run1")
    checkpoints.publish(store, signed(store, 10, first), first.check)
    late = signed(store, 20, first)
    second = take(store, "run2")
    assert steps(second) == [10]
    checkpoints.publish(store, late)  # it had looked before
    assert steps(second) == [10]
    checkpoints.publish(store, signed(store, 15, second), second.check)
    third = take(store, "run3")
    assert steps(third) == [15, 10]
    assert steps(take(store, "run4")) == [15, 10]
    with pytest.raises(Superseded):
        checkpoints.publish(store, signed(store, 25, first), first.check)


def test_what_was_published_before_the_new_one_looked_counts(url: str) -> None:
    store = open_store(url)
    first = take(store, "run1")
    manifest = signed(store, 20, first)
    second = take(store, "run2")
    checkpoints.publish(store, manifest)
    assert steps(second) == [20]
    take(store, "run3")  # killed before it looked
    assert steps(take(store, "run4")) == [20]


def test_the_older_one_deletes_nothing_more(url: str) -> None:
    store = open_store(url)
    first = take(store, "run1")
    for step in (10, 20):
        checkpoints.publish(store, signed(store, step, first), first.check)
    newest = signed(store, 30, first)
    checkpoints.publish(store, newest, first.check)
    second = take(store, "run2")
    write(store, some_state(40), 40, run="run2")  # on its way
    before = store.list()
    with pytest.raises(Superseded):
        checkpoints.prune(store, newest, 1, check=first.check)
    with pytest.raises(Superseded):
        checkpoints.sweep_abandoned(store, ["run1"], first.check)
    assert store.list() == before
    assert steps(second) == [30, 20, 10]


@pytest.fixture
def late(url: str) -> tuple[Store, owners.Claim]:
    """Steps 10, 12 and 20 count; step 25 was published late, by the first of three owners."""
    store = open_store(url)
    first = take(store, "run1")
    checkpoints.publish(store, signed(store, 10, first), first.check)
    manifest = signed(store, 25, first)
    second = take(store, "run2")
    assert steps(second) == [10]
    checkpoints.publish(store, manifest)
    for step in (12, 20):
        checkpoints.publish(store, signed(store, step, second), second.check)
    third = take(store, "run3")
    assert steps(third) == [20, 12, 10]
    return store, third


def test_what_does_not_count_is_shown_so_and_is_not_what_prune_keeps(
    late: tuple[Store, owners.Claim],
) -> None:
    store, third = late
    assert [ref.step for ref in inspect.find_checkpoints(store.url)[1]] == [20, 12, 10]
    listing = inspect.list_checkpoints(store)
    assert {c.ref.step: c.problem for c in listing.checkpoints} == {
        25: inspect.LATE,
        20: "",
        12: "",
        10: "",
    }
    planned = prune.plan_pruning(listing, 0.0, keep_last=1)
    assert [c.ref.step for c in planned.kept] == [25, 20]
    prune.carry_out(store, planned)
    assert steps(third) == [20]


def test_what_does_not_count_takes_no_ones_place_in_keep_last(
    late: tuple[Store, owners.Claim],
) -> None:
    store, third = late
    newest = signed(store, 30, third)
    checkpoints.publish(store, newest, third.check)
    assert checkpoints.prune(store, newest, 2, counts=owners.counted_in(store)) == ()
    assert [ref.step for ref in checkpoints.committed(store)] == [30, 20]
