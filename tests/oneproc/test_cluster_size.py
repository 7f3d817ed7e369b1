"""The autoscaler is told what is wanted: at once, now and then, until it could be reached."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.asks import SharingTerms, Wish
from elastic_ft.core.sharing.ledger import Bundles
from elastic_ft.service import cluster_size
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_size import AskNote, ClusterSize
from elastic_ft.service.cluster_watch import Sight, slots_by_node
from elastic_ft.service.job_orders import JobOrder, Notice
from elastic_ft.service.office import Office
from elastic_ft.service.service import Service
from elastic_ft.storage.store import open_store

WAIT_S = 60.0
ASKED = ((1, 4),)
Told = list[dict[str, float]]


def nobody(job: Any, run_url: str) -> None:
    raise AssertionError("no job has room here")


class Autoscaler:
    """Attributes:
    told: all that it was asked for, in order.
    """

    def __init__(self) -> None:
        self.told: list[Told] = []
        self.heard = threading.Event()

    def ask(self, bundles: Told) -> None:
        self.told.append(bundles)
        self.heard.set()


def test_what_could_not_be_asked_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_size, "AGAIN_S", 3600.0)
    told: list[Told] = []
    tries: list[int] = []
    heard = threading.Event()

    def ask(bundles: Told) -> None:
        tries.append(len(bundles))
        if len(tries) == 1:
            raise ConnectionError("the head is away")
        told.append(bundles)
        heard.set()

    wanted: Bundles = ((1, 2), (4, 1))
    size = ClusterSize(lambda: wanted, lambda: "GPU", ask)
    size.start()
    assert heard.wait(WAIT_S)
    size.let_go()
    assert tries == [3, 3, 0]  # nothing is asked twice so soon
    assert told == [[{"GPU": 1.0}, {"GPU": 1.0}, {"GPU": 4.0}], []]


def test_what_ray_may_have_forgotten_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its head keeps the request in memory, and may have been started again."""
    monkeypatch.setattr(cluster_size, "EVERY_S", 0.01)
    monkeypatch.setattr(cluster_size, "AGAIN_S", 0.02)
    told: list[Told] = []
    heard, wanted = threading.Event(), list[Bundles]([ASKED])

    def ask(bundles: Told) -> None:
        told.append(bundles)
        if len(told) == 3:
            wanted[0] = ()
        if not bundles:
            heard.set()

    size = ClusterSize(lambda: wanted[0], lambda: "CPU", ask)
    size.start()
    assert heard.wait(WAIT_S)
    size.close()
    assert told[:4] == [[{"CPU": 1.0}] * 4] * 3 + [[]]


def test_who_has_let_go_asks_for_nothing_more() -> None:
    """The thread had just looked at what is wanted."""
    told: list[Told] = []
    looks, goes_on = threading.Event(), threading.Event()

    def wanted() -> Bundles:
        looks.set()
        assert goes_on.wait(WAIT_S)
        return ASKED

    size = ClusterSize(wanted, lambda: "CPU", told.append)
    size.start()
    assert looks.wait(WAIT_S)
    ended = threading.Thread(target=size.let_go, daemon=True)
    ended.start()
    ended.join(0.5)
    goes_on.set()
    ended.join(WAIT_S)
    for thread in threading.enumerate():
        if thread.name == "cluster-size":
            thread.join(WAIT_S)
    assert told[-1] == []


def test_a_head_that_is_away_keeps_nobody_from_letting_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_size, "LET_GO_S", 0.1)
    away, back = threading.Event(), threading.Event()

    def ask(bundles: Told) -> None:
        away.set()
        assert back.wait(WAIT_S)

    size = ClusterSize(lambda: ASKED, lambda: "CPU", ask)
    size.start()
    assert away.wait(WAIT_S)
    ended = threading.Thread(target=size.let_go, daemon=True)
    ended.start()
    ended.join(5.0)
    hangs = ended.is_alive()
    back.set()
    assert not hangs


# ------------------------------------------------------------------- of a service that starts


def left_asking(folder: Path) -> None:
    """What a service has left that asked for nodes."""
    office = Office(Chronicle(open_store(str(folder))), SharingTerms(autoscaler=True), int, print)
    office.open()
    order = JobOrder("j-1", "j", "ann", 1.0, "r1", {"steps": 1})
    notice = Notice(asks.JobSubmitted(time.time(), "j-1", Wish(4, 4)), "ann", order=order)
    office.ask(lambda standing: notice).result(WAIT_S)
    office.close()
    assert office.standing.sharing.asked == ASKED


def test_nothing_is_asked_for_before_it_is_known_what_a_slot_is(tmp_path: Path) -> None:
    left_asking(tmp_path)
    autoscaler = Autoscaler()

    def look() -> Sight:
        return Sight(time.monotonic(), {"n0": 1}, kind="GPU")

    terms = SharingTerms(autoscaler=True)
    service = Service(str(tmp_path), terms, nobody, print, look, autoscaler.ask)
    service.start()
    try:
        assert autoscaler.heard.wait(WAIT_S)
    finally:
        service.close()
    assert autoscaler.told[0] == [{"GPU": 1.0}] * 4


def test_a_slot_stays_a_gpu_once_there_was_one() -> None:
    with_gpus = {"NodeID": "g", "Resources": {"CPU": 8.0, "GPU": 2.0}}
    without = {"NodeID": "c", "Resources": {"CPU": 8.0}}
    assert slots_by_node([without], "CPU") == ("CPU", {"c": 8})
    assert slots_by_node([with_gpus, without], "CPU") == ("GPU", {"g": 2})
    assert slots_by_node([without], "GPU") == ("GPU", {})


def noted(folder: Path) -> bool | None:
    return AskNote(open_store(str(folder))).asks()


def begun(folder: Path, terms: SharingTerms) -> tuple[Service, Autoscaler]:
    autoscaler = Autoscaler()

    def look() -> Sight:
        return Sight(time.monotonic(), {"n0": 1}, kind="CPU")

    service = Service(str(folder), terms, nobody, print, look, autoscaler.ask)
    service.start()
    return service, autoscaler


def until(condition: Callable[[], object]) -> None:
    until_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while not condition():
        assert time.monotonic() < until_s
        pause.wait(0.01)


def test_what_an_earlier_one_asked_for_is_taken_back_once_where_there_is_no_autoscaler(
    tmp_path: Path,
) -> None:
    """Each start took back what Ray was asked for, by whomever: a script of the user's, say."""
    left_asking(tmp_path)
    service, autoscaler = begun(tmp_path, SharingTerms(autoscaler=True))
    until(lambda: autoscaler.told == [[{"CPU": 1.0}] * 4])
    service.close()  # as if it was killed: nothing is taken back
    service, autoscaler = begun(tmp_path, SharingTerms())
    until(lambda: autoscaler.told == [[]] and noted(tmp_path) is False)
    service.close()
    service, autoscaler = begun(tmp_path, SharingTerms())
    assert not service._size._thread.is_alive()
    service.close()
    assert autoscaler.told == []


def test_what_one_of_a_version_without_notes_had_asked_for_is_taken_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal says that it was: after the upgrade the nodes stayed for ever."""
    left_asking(tmp_path)
    assert noted(tmp_path) is None
    with monkeypatch.context() as killed:  # once the journal has the terms without an autoscaler
        killed.setattr(ClusterSize, "start", int)
        service, autoscaler = begun(tmp_path, SharingTerms())
        service.close()
    for told in ([[]], []):
        service, autoscaler = begun(tmp_path, SharingTerms())
        if told:
            until(lambda autoscaler=autoscaler: autoscaler.told and noted(tmp_path) is False)
        service.close()
        assert autoscaler.told == told


@pytest.mark.parametrize("killed", ["before it asks", "before it takes back", "before it notes so"])
def test_it_is_taken_back_by_whoever_comes_after_one_that_was_killed(
    tmp_path: Path, killed: str
) -> None:
    """Nor does it matter that the office had decided by then that nothing is wanted."""
    note, told = AskNote(open_store(str(tmp_path))), list[Told]()

    def ask(bundles: Told) -> None:
        if killed == ("before it asks" if bundles else "before it takes back"):
            raise ConnectionError("killed")
        told.append(bundles)

    def keep(asks: bool) -> None:
        if not asks and killed == "before it notes so":
            raise ConnectionError("killed")
        note.keep(asks)

    size = ClusterSize(lambda: (), lambda: "CPU", ask, keep)
    size._tell(ASKED)
    if killed != "before it asks":
        size._tell(())
    service, autoscaler = begun(tmp_path, SharingTerms())
    until(lambda: autoscaler.told == [[]] and note.asks() is False)
    service.close()


def test_a_service_that_is_stopped_leaves_nothing_to_take_back(tmp_path: Path) -> None:
    left_asking(tmp_path)
    service, autoscaler = begun(tmp_path, SharingTerms(autoscaler=True))
    until(lambda: autoscaler.told)
    service.let_go()
    service.close()
    assert autoscaler.told[-1] == [] and noted(tmp_path) is False
