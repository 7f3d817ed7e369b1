"""Where workers may be, and which places a job has left: arithmetic on what the cluster says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_ft.core.sharing.asks import CapacityChanged, JobSubmitted, Places, SharingTerms, Wish
from elastic_ft.core.sharing.ledger import SharedJob
from elastic_ft.hosts.ray.allowed_places import AllowedPlaces
from elastic_ft.observe import resize_request
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.hands import MARK, JobHand, released
from elastic_ft.service.job_orders import JobOrder, Notice
from elastic_ft.service.office import Office
from elastic_ft.storage.store import open_store

WAIT_S = 30.0


@dataclass
class Worker:
    node: str = ""
    destined: str = ""


def test_another_worker_goes_where_a_place_is_free() -> None:
    places = AllowedPlaces({"a": 1, "b": 2})
    assert places.free([]) == "a"
    assert places.free([Worker(node="a")]) == "b"
    assert places.free([Worker("a"), Worker("b"), Worker("", "b")]) is None
    assert AllowedPlaces().free([Worker("z")]) == ""


def test_who_waits_for_a_place_of_another_is_asked_for_elsewhere() -> None:
    there, waits, late = Worker("a"), Worker("", "a"), Worker("", "b")
    assert AllowedPlaces({"a": 1, "b": 1}).beyond([late, waits, there]) == [waits]
    assert AllowedPlaces({"b": 1}).beyond([there, late]) == []  # who is there stays


@pytest.mark.parametrize(
    ("held", "leaving", "target", "seen", "gone"),
    [
        ((("a", 1), ("b", 1)), (("b", 1),), 1, {"a": 1}, (("b", 1),)),
        ((("a", 1), ("b", 1)), (("b", 1),), 1, {"b": 1}, (("a", 1),)),  # another one left
        ((("a", 1), ("b", 1)), (("b", 1),), 1, {"a": 1, "b": 1}, ()),  # not yet
        ((("a", 2), ("b", 2)), (("b", 2),), 2, {"a": 2, "b": 1}, (("b", 1),)),  # half of it
        ((("a", 2), ("b", 1)), (("b", 1),), 2, {"a": 1}, (("a", 1),)),  # one more is lost: it comes
    ],
)
def test_as_many_places_are_free_as_a_job_has_left(
    held: Places, leaving: Places, target: int, seen: dict[str, int], gone: Places
) -> None:
    job = SharedJob("j", Wish(1, 4), 1, "running", held=held, leaving=leaving, target=target)
    assert released(job, Counter(seen)) == gone


def test_a_request_names_places_or_none() -> None:
    said = resize_request.parse(b'{"workers": 2, "request": "r", "places": {"a": 2}}')
    assert (said.workers, said.places) == (2, {"a": 2})
    assert resize_request.parse(b'{"workers": 2}').places == {}
    with pytest.raises(ValueError, match="expected places"):
        resize_request.parse(b'{"workers": 2, "places": {"a": -1}}')


def test_a_job_is_not_started_again_while_its_store_can_not_be_read(tmp_path: Path) -> None:
    """It was taken for one that had never been started, and its controller was ended."""
    submitted: list[str] = []
    superseded: list[object] = []
    office = Office(Chronicle(open_store(str(tmp_path))), SharingTerms(), int, superseded.append)
    office.open()
    office.tell(CapacityChanged(0.0, (("n0", 1),))).result(WAIT_S)
    order = JobOrder("j", "j", "", 0.0, "r", {"steps": 10})
    event = JobSubmitted(0.0, "j", Wish(1, 1))
    office.ask(lambda standing: Notice(event, order=order)).result(WAIT_S)
    assert office.standing.sharing.jobs["j"].phase == "starting"
    run = tmp_path / "jobs/j"
    (run / MARK).mkdir(parents=True)  # a read fails, and not because there is none
    hand = JobHand(order, str(run), office, lambda job, url: submitted.append(url))
    hand.step(Sight())
    assert f"cannot read {run}/{MARK}" in hand.trouble
    assert submitted == []
    office.close()
