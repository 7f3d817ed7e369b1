"""Each rule by which a cluster is shared (docs/service.md), on as few nodes as show it."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import ANY

import pytest

from elastic_ft.core.scheduling import decide
from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.admission import Walk
from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms, Wish
from elastic_ft.core.sharing.ledger import SharedJob, Sharing, why_waits


class Shared:
    """A cluster of ``nodes`` nodes of one slot, and jobs that do as they are told at once."""

    def __init__(self, nodes: int, terms: SharingTerms | None = None, slots: int = 1) -> None:
        self.terms, self.state, self.at_s = terms or SharingTerms(), Sharing(), 0.0
        self.told: list[Any] = []
        self.tell(asks.CapacityChanged(0.0, tuple((f"n{i}", slots) for i in range(nodes))))

    def tell(self, event: asks.SharingEvent) -> list[Any]:
        self.state, commands = decide(self.state, event, self.terms)
        found = [c for c in commands if not isinstance(c, asks.WakeAt)]
        self.told += found
        return found

    def submit(self, job: str, least: int, most: int, *, trains: bool = True, **wish: Any) -> Any:
        found = self.tell(asks.JobSubmitted(self.at_s, job, Wish(least, most, **wish)))
        if trains:
            self.begin(job)
        return found

    def begin(self, job: str) -> None:
        if self.job(job).phase == "starting":
            self.tell(asks.JobBegan(self.at_s, job, self.job(job).start))

    def release(self, job: str) -> list[Any]:
        """What it was told to leave."""
        held = self.job(job)
        return self.tell(asks.WorkersReleased(self.at_s, job, held.start, held.leaving))

    def end(self, job: str) -> list[Any]:
        return self.tell(asks.JobEnded(self.at_s, job, "completed"))

    def wait(self, seconds: float) -> list[Any]:
        self.at_s += seconds
        return self.tell(asks.Ticked(self.at_s))

    def job(self, job: str) -> SharedJob:
        return self.state.jobs[job]

    def why(self, job: str) -> str:
        return why_waits(self.state, self.job(job))

    def targets(self) -> dict[str, int]:
        return {name: job.target for name, job in self.state.jobs.items()}


def test_who_is_next_priority_then_age() -> None:
    shared = Shared(1, SharingTerms(ageing_s=100.0))
    shared.submit("first", 1, 1)
    shared.submit("low", 1, 1, priority=-1)
    shared.at_s = 150.0  # by now it counts as one that was submitted with priority 0
    shared.submit("late", 1, 1)
    shared.submit("urgent", 1, 1, priority=-5)
    assert [type(c).__name__ for c in shared.end("first")] == ["StartJob"]
    assert shared.job("low").phase == "starting" and shared.job("late").phase == "queued"


def test_all_or_nothing_in_multiples() -> None:
    shared = Shared(3)
    assert shared.submit("wide", 4, 4) == []
    assert shared.why("wide") == "waits for 4 workers: the nodes that there are hold 3"
    shared.submit("pairs", 1, 8, multiple_of=2)
    assert shared.targets() == {"wide": 0, "pairs": 2}


def test_room_by_shrinking_comes_first_and_keeps_multiples() -> None:
    shared = Shared(8)
    shared.submit("tp2", 2, 8, multiple_of=2)
    shared.wait(100.0)
    assert shared.targets() == {"tp2": 8}
    (shrunk,) = shared.submit("urgent", 3, 3, priority=5)
    assert isinstance(shrunk, asks.ResizeJob) and shrunk.workers == 4
    assert "urgent (priority 5): it waits for 3" in shrunk.reason
    (started,) = [c for c in shared.release("tp2") if isinstance(c, asks.StartJob)]
    assert started.job == "urgent" and sum(n for _, n in started.places) == 3


def test_room_by_suspending_only_if_it_then_runs() -> None:
    shared = Shared(4)
    shared.submit("rigid", 4, 4)
    assert shared.submit("wide", 5, 5, priority=5) == []  # it would not run even so
    (suspended,) = shared.submit("urgent", 2, 2, priority=5)
    assert isinstance(suspended, asks.SuspendJob) and suspended.job == "rigid"
    shared.tell(asks.JobSuspended(shared.at_s, "rigid", 1))
    assert shared.targets() == {"rigid": 0, "wide": 0, "urgent": 2}
    shared.begin("urgent")
    assert any(isinstance(c, asks.StartJob) and c.job == "rigid" for c in shared.end("urgent"))


def test_who_would_give_way_at_once_does_not_start_and_is_told_why_it_waits() -> None:
    """While it waits nobody else has room for its slot, and once it has that another one would."""
    own, weights = {"vision": None, "speech": 5, "text": 3}, {"text": 3.0}
    queues = {name: QueueTerms(quota, None, weights.get(name, 1.0)) for name, quota in own.items()}
    shared = Shared(10, SharingTerms(queues, surplus=asks.BY_MINIMUM))
    shared.submit("first", 1, 4, queue="text")
    shared.submit("wide", 3, 4, queue="text")
    shared.submit("text", 4, 10, queue="text", priority=5)
    shared.submit("vision", 1, 8, queue="vision")
    shared.submit("two", 2, 3, queue="vision", priority=5)
    shared.submit("one", 1, 5, queue="vision")
    shared.submit("another", 1, 2, queue="vision")
    shared.submit("speech", 3, 7, queue="speech", priority=5)
    assert shared.submit("pairs", 1, 5, queue="speech", multiple_of=2) == []
    why = "waits for 1 workers: it would have to give way at once, to a job that comes before it"
    assert [shared.why(job) for job in ("one", "another")] == [why, why]
    before = shared.state
    assert shared.wait(0.0) == [] and shared.state == before


def test_equals_never_suspend_one_another() -> None:
    shared = Shared(2)
    shared.submit("one", 2, 2)
    assert shared.submit("two", 2, 2) == []
    assert "jobs that it may not suspend need 2 of 2 slots" in shared.why("two")


def test_who_gives_way_is_not_asked_for_each_that_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each that waits was held against each that runs: thousands took seconds for one event."""
    shared = Shared(40, SharingTerms(cooldown_s=30.0))
    for number in range(20):
        shared.submit(f"high-{number}", 1, 1, priority=10)
        shared.submit(f"low-{number}", 1, 1)
    for number in range(100):
        shared.submit(f"wide-{number}", 21 + number % 20, 40, priority=5)
    asked = Counter[str]()
    gives_way = Walk._gives_way

    def counted(walk: Walk, other: SharedJob, job: SharedJob) -> bool:
        asked[job.job] += 1
        return gives_way(walk, other, job)

    monkeypatch.setattr(Walk, "_gives_way", counted)
    found = shared.submit("urgent", 2, 2, priority=20)
    assert [type(c) for c in found] == [asks.SuspendJob] * 2
    assert asked and asked.keys() == {"urgent"}


def test_a_quota_is_its_queues_own_and_borrowed_when_idle() -> None:
    queues = {"own": QueueTerms(quota=2), "guest": QueueTerms(quota=0, ceiling=3)}
    shared = Shared(4, SharingTerms(queues))
    shared.submit("guests", 3, 4, queue="guest")
    assert shared.targets() == {"guests": 3}  # more than its quota, no more than its ceiling
    found = shared.submit("owner", 2, 2, queue="own")
    assert [(type(c).__name__, c.job) for c in found] == [("SuspendJob", "guests")]
    refused = shared.tell(asks.JobSubmitted(0.0, "big", Wish(4, 4, queue="guest")))
    assert refused == [asks.Refuse("big", "it needs 4 slots at least, queue guest may use 3")]


def test_who_is_stopping_waits_for_nothing() -> None:
    shared = Shared(2)
    shared.submit("one", 2, 2)
    shared.submit("two", 2, 2)
    shared.submit("three", 2, 2)
    shared.tell(asks.StopAsked(0.0, "one"))
    assert shared.job("one").phase == "stopping" and shared.why("one") == ""
    assert shared.why("three")


def test_what_is_left_goes_by_weight() -> None:
    queues = {"a": QueueTerms(weight=3.0), "b": QueueTerms(weight=1.0)}
    shared = Shared(12, SharingTerms(queues))
    shared.submit("a1", 1, 12, queue="a")
    shared.submit("b1", 1, 12, queue="b")
    for _ in range(4):
        shared.wait(100.0)
        for job in ("a1", "b1"):
            shared.release(job)
    assert shared.targets() == {"a1": 9, "b1": 3}


def test_within_a_queue_it_goes_by_minima_or_evenly() -> None:
    """Of 32: two queues of equal weight, in one of them a small job and a large one."""
    for surplus, expected in ((asks.BY_MINIMUM, (4, 12, 16)), (asks.EVENLY, (8, 8, 16))):
        queues = {"a": QueueTerms(), "b": QueueTerms()}
        shared = Shared(32, SharingTerms(queues, surplus=surplus))
        for job, least, queue in (("small", 2, "a"), ("large", 6, "a"), ("other", 1, "b")):
            shared.submit(job, least, 32, queue=queue)
        for _ in range(4):
            shared.wait(100.0)
            for job in ("small", "large", "other"):
                shared.release(job)
        assert tuple(shared.targets().values()) == expected, surplus


def test_backfill_gives_way() -> None:
    shared = Shared(4)
    shared.submit("half", 2, 2)
    shared.submit("whole", 4, 4)
    shared.submit("small", 2, 2)  # while the whole cluster is not to be had
    assert shared.targets() == {"half": 2, "whole": 0, "small": 2}
    (suspended,) = shared.end("half")
    assert isinstance(suspended, asks.SuspendJob) and suspended.job == "small"
    assert "it waited before this one started" in suspended.reason


def test_who_gives_way_before_its_start_is_told_is_as_its_event_has_made_it() -> None:
    """It was as before the event, whose places it went on holding: nobody would release those."""
    queues = {"own": QueueTerms(quota=8), "lent": QueueTerms(quota=16), "guest": QueueTerms()}
    shared = Shared(16, SharingTerms(queues, ageing_s=60.0))
    shared.submit("old", 4, 16, queue="own")
    shared.submit("all", 16, 16, queue="lent", priority=20)
    shared.submit("aged", 7, 7, queue="own", priority=5)
    shared.tell(asks.StopAsked(0.0, "all"))
    shared.wait(660.0)
    shared.submit("late", 4, 4, queue="own", priority=7)
    shared.submit("urgent", 8, 8, queue="guest", priority=15)
    assert shared.job("old").releasing and sum(shared.targets().values()) == 0
    # Who owns what changes once the aged one has started: two that were to start as owners borrow.
    found = shared.tell(asks.JobSuspended(shared.at_s, "old", 1))
    assert {c.job: type(c) for c in found} == dict.fromkeys(("aged", "urgent"), asks.StartJob)
    assert shared.targets() == {"old": 0, "aged": 7, "late": 0, "urgent": 8}
    assert shared.job("old").held == () and not shared.job("old").releasing
    assert shared.why("old") and shared.job("late").start == 0


def test_a_slot_is_free_when_it_was_left() -> None:
    shared = Shared(2)
    shared.submit("one", 1, 2)
    shared.wait(100.0)
    shared.submit("two", 1, 1, trains=False)
    assert shared.targets() == {"one": 1, "two": 0}
    assert "released by others first" in shared.why("two")
    assert [type(c).__name__ for c in shared.release("one")] == ["StartJob"]


def test_nothing_flaps() -> None:
    shared = Shared(4, SharingTerms(cooldown_s=30.0))
    shared.submit("one", 1, 4)
    shared.wait(100.0)
    shared.submit("urgent", 2, 2, priority=1)
    shared.release("one")
    shared.begin("urgent")
    assert shared.end("urgent") == []  # it was resized just now
    assert shared.wait(29.0) == []
    (grown,) = shared.wait(1.0)
    assert isinstance(grown, asks.ResizeJob) and grown.workers == 4
    assert shared.wait(0.0) == []


def test_a_cap_is_obeyed_and_refused_where_it_makes_no_sense() -> None:
    shared = Shared(4)
    shared.submit("one", 2, 4)
    (refused,) = shared.tell(asks.ResizeAsked(0.0, "one", 1))
    assert refused == asks.Refuse("one", "1 is not within 2 and 4")
    (shrunk,) = shared.tell(asks.ResizeAsked(0.0, "one", 3))
    assert shrunk.workers == 3 and shrunk.reason == "3 workers at most was asked for"


def test_a_start_that_fails_is_tried_again_and_given_up() -> None:
    shared = Shared(1, SharingTerms(starts_max=2, retry_s=10.0))
    shared.submit("one", 1, 1, trains=False)
    shared.tell(asks.StartFailed(0.0, "one", 1, "no room"))
    assert shared.why("one") == "waits 10 s: a start failed: no room"
    assert [type(c).__name__ for c in shared.wait(10.0)] == ["StartJob"]
    (given_up,) = shared.tell(asks.StartFailed(10.0, "one", 2, "no room"))
    assert given_up.reason == "2 starts failed; the last: no room"
    assert shared.state.ended["one"] == "failed"


def test_a_job_whose_controller_is_lost_starts_again_where_it_has_room() -> None:
    """It failed, whatever it had done: with the cluster's head went all jobs of a day."""
    shared = Shared(2)
    shared.submit("one", 2, 2)
    assert shared.tell(asks.JobControllerLost(5.0, "one", 1, 7, "it is gone")) == [
        asks.Requeue("one", "to be started again: it is gone"),
        asks.StartJob("one", 2, (("n0", 1), ("n1", 1)), ANY),
    ]
    assert shared.job("one").phase == "starting"
    assert shared.tell(asks.JobControllerLost(6.0, "one", 1, 9, "it is gone")) == []  # is no news


def test_a_job_that_loses_its_controllers_without_a_step_in_between_is_given_up() -> None:
    shared = Shared(1, SharingTerms(starts_max=3, retry_s=10.0))
    shared.submit("one", 1, 1)

    def lose(step: int) -> list[Any]:
        start = shared.job("one").start
        return shared.tell(asks.JobControllerLost(shared.at_s, "one", start, step, "it is gone"))

    for step in (3, 4):
        assert [type(c).__name__ for c in lose(step)] == ["Requeue", "StartJob"]
        shared.begin("one")
    assert lose(4) == [asks.Requeue("one", "waits 10 s: it is gone")]
    assert shared.why("one") == "waits 10 s: it is gone"
    assert [type(c).__name__ for c in shared.wait(10.0)] == ["StartJob"]
    shared.begin("one")
    (given_up,) = lose(4)
    why = "3 controllers were lost without a step in between; the last: it is gone"
    assert given_up == asks.GiveUpJob("one", why)
    assert shared.state.ended["one"] == "failed"


def test_a_controller_that_is_lost_while_its_job_gives_way_frees_its_places() -> None:
    shared = Shared(1)
    shared.submit("one", 1, 1)
    shared.submit("urgent", 1, 1, priority=1, trains=False)
    assert shared.job("one").releasing
    (started,) = shared.tell(asks.JobControllerLost(1.0, "one", 1, 7, "it is gone"))
    assert started == asks.StartJob("urgent", 1, (("n0", 1),), ANY)
    assert shared.job("one").phase == "suspended" and shared.job("one").losses == 0


def test_the_autoscaler_is_asked_for_all_minima_while_one_is_missing() -> None:
    """It sizes a cluster for what it is told, whatever runs there: so what runs is told, too."""
    shared = Shared(2, SharingTerms(autoscaler=True))
    assert shared.submit("one", 1, 4) == [asks.StartJob("one", 1, (("n0", 1), ("n1", 1)), ANY)]
    found = shared.submit("wide", 3, 3, slots_per_worker=2)
    assert found == [
        asks.AskAutoscaler(
            ((1, 1), (2, 3)),
            "1 job can't start without: the first of queue default, priority 0, 3 workers",
        )
    ]
    assert shared.wait(1.0) == []  # once
    nodes = (("n0", 1), ("n1", 1), *((f"big{i}", 2) for i in range(3)))
    found = shared.tell(asks.CapacityChanged(2.0, nodes))
    assert [type(c) for c in found] == [asks.StartJob, asks.AskAutoscaler]
    assert found[1] == asks.AskAutoscaler((), "nothing is missing")


def test_the_autoscaler_is_not_asked_for_what_a_ceiling_forbids_nor_for_endless_queues() -> None:
    terms = SharingTerms({"default": QueueTerms(), "few": QueueTerms(ceiling=1)}, autoscaler=True)
    shared = Shared(1, terms)
    shared.submit("few-1", 1, 1, queue="few")
    assert shared.submit("few-2", 1, 1, queue="few") == []
    for number in range(3):
        shared.submit(f"wide-{number}", 2000, 2000)
    assert shared.state.asked == ((1, 4001),)  # two of the three: no more than BUNDLES_MAX


def test_the_autoscaler_is_asked_for_no_more_of_a_queue_than_its_ceiling_lets_start() -> None:
    terms = SharingTerms({"default": QueueTerms(), "few": QueueTerms(ceiling=9)}, autoscaler=True)
    shared = Shared(4, terms)
    for number in range(20):
        shared.submit(f"pair-{number}", 2, 2, queue="few")
    assert shared.state.asked == ((1, 8),)  # two run, and two more may
    shared.submit("three", 3, 3, queue="few")  # it might, if those two did not come first
    assert shared.state.asked == ((1, 8),)
    assert "jobs that it may not suspend need" in shared.why("three")
    (asked,) = shared.submit("free", 1, 1)
    assert asked.bundles == ((1, 9),) and asked.reason.startswith("3 jobs can't start without")


def test_what_is_asked_of_the_autoscaler_stands_while_a_job_releases_or_backs_off() -> None:
    shared = Shared(2, SharingTerms(autoscaler=True, starts_max=9, retry_s=10.0))
    shared.submit("two", 2, 2)
    assert shared.state.asked == ()
    shared.tell(asks.CapacityChanged(0.0, (("n0", 1),)))
    assert shared.job("two").releasing and shared.state.asked == ((1, 2),)
    shared.tell(asks.JobSuspended(0.0, "two", 1))
    assert shared.state.asked == ((1, 2),)
    (started, nothing) = shared.tell(asks.CapacityChanged(0.0, (("n0", 1), ("n1", 1))))
    assert isinstance(started, asks.StartJob) and nothing.bundles == ()
    shared.tell(asks.StartFailed(0.0, "two", 2, "its node went"))
    assert shared.state.asked == ()  # it has room once it is due
    (asked,) = shared.tell(asks.CapacityChanged(1.0, (("n0", 1),)))
    assert asked.bundles == ((1, 2),)
    (asked,) = shared.submit("wide", 5, 5)
    assert asked.bundles == ((1, 7),)
    assert asked.reason.startswith("2 jobs can't start without")
    assert shared.tell(asks.CapacityChanged(2.0, (("n0", 1), ("n1", 1)))) == []
    assert shared.state.asked == ((1, 7),)  # with room for who has some once it is due


def test_where_there_is_no_autoscaler_none_is_asked() -> None:
    shared = Shared(1)
    assert shared.submit("wide", 3, 3) == []


def test_a_clock_that_is_set_back_keeps_nobody_waiting() -> None:
    """By a day: for a day a job did not grow, and one whose start had failed was not started."""
    shared = Shared(4, SharingTerms(cooldown_s=30.0))
    shared.wait(100_000.0)
    shared.submit("one", 1, 4)
    shared.submit("urgent", 2, 2, priority=1)
    shared.release("one")
    shared.begin("urgent")
    shared.at_s -= 86_400.0
    (grown,) = shared.end("urgent")
    assert isinstance(grown, asks.ResizeJob) and grown.workers == 4

    shared = Shared(1, SharingTerms(retry_s=10.0))
    shared.wait(100_000.0)
    shared.submit("one", 1, 1, trains=False)
    assert shared.tell(asks.StartFailed(shared.at_s, "one", 1, "no room")) != []
    assert shared.wait(9.0) == []
    (start,) = shared.wait(-86_400.0)
    assert isinstance(start, asks.StartJob) and start.reason == "1 worker after 0 s of waiting"
    shared.begin("one")
    shared.submit("urgent", 1, 1, priority=1, trains=False)
    shared.tell(asks.JobSuspended(shared.at_s, "one", start.start))
    assert [type(c).__name__ for c in shared.end("urgent")] == ["StartJob"]
