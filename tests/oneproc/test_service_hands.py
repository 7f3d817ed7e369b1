"""One job's hand, without a cluster: what it makes of a run folder that can't be read."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.commits import UNSAVED
from elastic_ft.core.sharing.asks import (
    CapacityChanged,
    JobSubmitted,
    SharingTerms,
    StopAsked,
    Wish,
)
from elastic_ft.observe import resize_request, stop_request
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.service import hands
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.hands import JobHand
from elastic_ft.service.job_orders import JobOrder, Notice
from elastic_ft.service.office import Office
from elastic_ft.storage.store import Store, open_store

WAIT_S = 30.0
START_TIMEOUT_S = 60.0
COMPLETED = json.dumps({"status": "completed"})
JOB: dict[str, Any] = {
    "name": "j",
    "steps": 10,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:"},
    "elastic": {"start_timeout_s": START_TIMEOUT_S},
}


class Bench:
    """A job that has room, on a cluster where nothing of it lives."""

    def __init__(self, folder: Path) -> None:
        self.run, self.submitted = folder / "jobs/j", list[str]()
        self.office = Office(Chronicle(open_store(str(folder))), SharingTerms(), int, print)
        self.office.open()
        self.office.tell(CapacityChanged(0.0, (("n0", 1),))).result(WAIT_S)
        self.order, event = (
            JobOrder("j", "j", "", 0.0, "r", JOB),
            JobSubmitted(0.0, "j", Wish(1, 1)),
        )
        self.office.ask(lambda standing: Notice(event, order=self.order)).result(WAIT_S)

    def hand(self) -> JobHand:
        return JobHand(self.order, str(self.run), self.office, self.submit)

    def submit(self, job: Any, url: str) -> None:
        self.submitted.append(url)

    @property
    def phase(self) -> str:
        job = self.office.standing.job("j")
        return job.phase if job else self.office.standing.ended["j"].status


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(hands, "actor_named", lambda name: None)
    for name in ("end_actor", "clear_away"):
        monkeypatch.setattr(hands, name, lambda *_: None)
    monkeypatch.setattr(hands, "groups_of", lambda prefix: {})
    bench = Bench(tmp_path)
    yield bench
    bench.office.close()


def later() -> Sight:
    return Sight(asked_s=time.monotonic() + 2 * hands.GONE_S)


def test_a_result_that_can_not_be_read_is_not_none(bench: Bench) -> None:
    """The job completed while its store was away: it was journalled as failed."""
    hand = bench.hand()
    hand.step(Sight())
    assert bench.submitted == [str(bench.run)]
    result = bench.run / "result.json"
    result.mkdir()  # a read fails, and not because there is none
    hand.step(later())
    assert "result.json can't be read" in hand.trouble
    assert bench.phase == "starting"
    result.rmdir()
    result.write_text(COMPLETED)
    for _ in range(2):
        hand.step(later())
    assert (hand.trouble, bench.phase) == ("", "completed")


def test_a_job_that_ended_unseen_is_not_started_again(bench: Bench) -> None:
    """It ended while there was no service, and the next one's first look at its result failed."""
    bench.hand().step(Sight())
    assert len(bench.submitted) == 1
    result = bench.run / "result.json"
    result.mkdir()
    hand = bench.hand()
    hand.step(Sight())
    assert "result.json can't be read" in hand.trouble
    assert result.is_dir() and len(bench.submitted) == 1
    result.rmdir()
    result.write_text(COMPLETED)
    for _ in range(2):
        hand.step(later())
    assert bench.phase == "completed" and len(bench.submitted) == 1


def test_a_job_that_can_not_begin_gives_its_room_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run folder can't be made: it had its slots for ever, and could not be stopped."""
    monkeypatch.setattr(hands, "START_WITHIN_S", 5.0)
    bench.run.parent.mkdir()
    bench.run.write_text("a file where a folder is to be")
    hand = bench.hand()
    hand.step(Sight(time.monotonic()))
    assert str(bench.run) in hand.trouble and bench.phase == "starting"
    hand.step(Sight(time.monotonic() + 1.0))
    assert bench.phase == "starting"
    hand.step(Sight(time.monotonic() + 10.0))
    assert bench.phase == "queued"
    assert str(bench.run) in bench.office.standing.sharing.jobs["j"].why
    assert bench.submitted == []


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_a_controller_that_never_begins_is_not_waited_for_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, asked_to_stop: bool
) -> None:
    """Ray knows of it, and no process comes, or one that stands still: the job stayed at starting,
    and could not be stopped."""
    ended = list[str]()
    monkeypatch.setattr(hands, "actor_named", lambda name: object())
    monkeypatch.setattr(hands, "end_actor", ended.append)
    bench.hand().step(Sight())
    hand = bench.hand()  # of the next service, which finds it submitted
    led = frozenset([hand.names.prefix])
    hand.step(Sight(time.monotonic(), led=led))
    if asked_to_stop:
        bench.office.tell(StopAsked(0.0, "j")).result(WAIT_S)
    hand.step(Sight(time.monotonic() + START_TIMEOUT_S / 2, led=led))
    assert bench.phase == ("stopping" if asked_to_stop else "starting")
    hand.step(Sight(time.monotonic() + 2 * START_TIMEOUT_S, led=led))
    assert bench.phase == ("stopped" if asked_to_stop else "queued")
    assert ended[-1] == hand.names.controller and len(bench.submitted) == 1


def trains(bench: Bench, hand: JobHand, step: int) -> None:
    """Its newest controller's workers, from that step on."""
    seq = len((bench.run / "events.jsonl").read_text().splitlines()) if hand.story.formed else 0
    line = {"event": "generation_formed", "seq": seq, "at_s": 0.0, "step": step}
    with (bench.run / "events.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    hand.step(Sight(time.monotonic(), led=frozenset([hand.names.prefix])))
    assert bench.phase == "running"


def test_a_job_whose_controller_is_gone_is_started_again_and_its_page_says_why(
    bench: Bench,
) -> None:
    """It failed: somebody had killed the controller, or the cluster's head had been lost."""
    hand = bench.hand()
    hand.step(Sight())
    for times in range(1, 4):
        trains(bench, hand, 10 * times)
        hand.step(later())  # seen to be gone, and told: there is room for it
        assert bench.phase == "starting" and len(bench.submitted) == times
        hand.step(later())
        assert len(bench.submitted) == times + 1
    decided = bench.office.standing.decisions["j"]
    gone = "to be started again: its controller is gone, and has left no result"
    assert [(d.what, d.why) for d in decided if d.what == "start again"] == [
        ("start again", gone)
    ] * 3
    assert bench.office.standing.counts["requeue"] == 3


def test_a_job_whose_controllers_go_without_a_step_in_between_fails_with_the_reason(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.office, "terms", SharingTerms(starts_max=3, retry_s=0.0))
    hand = bench.hand()
    hand.step(Sight())
    for _ in range(3):
        trains(bench, hand, 7)
        hand.step(later())
        hand.step(later())
    why = "3 controllers were lost without a step in between; the last: its controller is gone"
    assert bench.office.standing.ended["j"].status == "failed"
    assert bench.office.standing.ended["j"].reason.startswith(why)
    assert len(bench.submitted) == 3


def test_a_job_whose_last_state_is_in_no_checkpoint_is_not_started_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store takes no writes, and may be read: it made its last steps again and again."""
    monkeypatch.setattr(bench.office, "terms", SharingTerms(starts_max=3, retry_s=0.0))
    hand = bench.hand()
    hand.step(Sight())
    reason = f"all 9 steps are committed, {UNSAVED}; there is no checkpoint"
    result = bench.run / "result.json"
    for times in range(1, 4):
        trains(bench, hand, 7)
        result.write_text(json.dumps({"status": "suspended", "reason": reason}))
        hand.step(later())
        hand.step(later())
        assert len(bench.submitted) == min(times + 1, 3)
    ended = bench.office.standing.ended["j"]
    assert ended.status == "failed" and UNSAVED in ended.reason


def come(bench: Bench, wish: Wish) -> None:
    order, event = JobOrder("u", "u", "", 0.0, "q", JOB), JobSubmitted(0.0, "u", wish)
    bench.office.ask(lambda standing: Notice(event, order=order)).result(WAIT_S)


def trained_and_told_to(what: str, bench: Bench) -> JobHand:
    hand = bench.hand()
    hand.step(Sight())
    trains(bench, hand, 7)
    if what == "stop":
        bench.office.tell(StopAsked(0.0, "j")).result(WAIT_S)
    else:
        come(bench, Wish(1, 1, priority=9))
    return hand


@pytest.mark.parametrize("what", ["stop", "suspend"])
def test_a_controller_that_goes_while_its_job_is_to_end_or_give_way_is_done_with(
    bench: Bench, what: str
) -> None:
    """One that was to give way failed."""
    hand = trained_and_told_to(what, bench)
    hand.step(later())
    assert bench.phase == ("stopped" if what == "stop" else "suspended")
    assert len(bench.submitted) == 1


@pytest.mark.parametrize("what", ["stop", "suspend"])
def test_a_job_that_gives_way_is_told_for_whom(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Its journal said that somebody had stopped it."""
    folder = RunFolder(str(bench.run))
    folder.take_over("run1", "j")
    hand = trained_and_told_to(what, bench)
    hand.step(Sight())
    said = "" if what == "stop" else "the service: suspended for u (priority 9), which waits for "
    found = folder.asked(stop_request.NAME)
    assert found is not None and found.startswith(said) and bool(found) is bool(said)
    folder.close()


class Killed(BaseException):
    """The service, at a call that a step makes."""


class FewCalls:
    """A cluster, and a store, at whose call of that number the service is killed: half of the time
    once it is done."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.controllers, self.begun = number, list[str](), 0
        monkeypatch.setattr(hands, "actor_named", self._found)
        monkeypatch.setattr(hands, "end_actor", self.counted(self._end))
        monkeypatch.setattr(hands, "clear_away", self.counted(lambda *_: None))
        monkeypatch.setattr(Store, "put", self.counted(Store.put))
        monkeypatch.setattr(Store, "delete", self.counted(Store.delete))
        monkeypatch.setattr(
            resize_request, "ask_to_resize", self.counted(resize_request.ask_to_resize)
        )

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            self._count()
            found = call(*args)
            self._count()
            return found

        return checked

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed

    def submit(self, job: Any, url: str) -> None:
        assert not self.controllers, "two at a time"
        self.begun += 1
        self.controllers.append(f"controller {self.begun}")

    def _found(self, name: str) -> Any:
        return self.controllers[0] if self.controllers else None

    def _end(self, name: str) -> None:
        self.controllers.clear()


@pytest.mark.parametrize("destroyed", [False, True])
def test_a_service_that_is_killed_at_any_call_starts_the_job_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, destroyed: bool
) -> None:
    """``destroyed``: with it went a controller that it had asked for, which is seen once more."""
    for number in range(1, 100):
        with monkeypatch.context() as patch:
            patch.setattr(hands, "groups_of", lambda prefix: {})
            bench = Bench(tmp_path / str(number))
            calls = FewCalls(number, patch)
            bench.submit = calls.counted(calls.submit)
            was_killed = False
            try:
                bench.hand().step(Sight(time.monotonic()))
            except Killed:
                was_killed = True
            hand = bench.hand()
            for round in range(4):
                led = frozenset([hand.names.prefix] if calls.controllers else [])
                hand.step(Sight(time.monotonic() + 2 * round * hands.GONE_S, led=led))
                if destroyed and was_killed and round == 0 and calls.begun == 1:
                    calls.controllers.clear()
            assert bench.phase == ("starting" if calls.controllers else "queued"), number
            if calls.controllers:
                line = {"event": "generation_formed", "seq": 1, "at_s": 0.0, "step": 0}
                (bench.run / "events.jsonl").write_text(json.dumps(line) + "\n")
                hand.step(Sight(time.monotonic(), led=frozenset([hand.names.prefix])))
                assert bench.phase == "running", number
            else:
                assert destroyed
                assert "its controller is gone" in bench.office.standing.sharing.jobs["j"].why
            bench.office.close()
        if not was_killed:
            break
    assert number > 10


def test_the_office_outlives_what_it_can_not_journal(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread died unseen: nobody was answered any more."""
    with monkeypatch.context() as patch:
        patch.setattr(Chronicle, "append", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            bench.office.tell(StopAsked(0.0, "j")).result(WAIT_S)
        assert bench.phase == "starting"
    bench.office.tell(StopAsked(0.0, "j")).result(WAIT_S)
    assert bench.phase == "stopping"
