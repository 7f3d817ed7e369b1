"""The service's journal is not read from its first line: snapshots of how things stood."""

from __future__ import annotations

import json
import shutil
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharing import asks
from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms
from elastic_ft.errors import StorageError, StoreFailed, Superseded
from elastic_ft.service import office
from elastic_ft.service.chronicle import Chronicle
from elastic_ft.service.job_orders import JobOrder, Notice
from elastic_ft.service.office import Office
from elastic_ft.service.standing_snapshots import ShareSnapshot, StandingSnapshots
from elastic_ft.storage.store import open_store

WAIT_S = 60.0
TAIL = 20


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office, "TAIL_LINES", TAIL)


def opened(folder: Path, terms: SharingTerms | None = None) -> tuple[Office, int]:
    store = open_store(str(folder))
    found = Office(Chronicle(store), terms or SharingTerms(), int, print)
    return found, found.open()


def submitted(number: int, wish: asks.Wish) -> Notice:
    id = f"j-{number}"
    order = JobOrder(id, "j", "ann", float(number), f"r{number}", {"steps": number})
    return Notice(asks.JobSubmitted(float(number), id, wish), "ann", order=order)


def lived(folder: Path, jobs: int = 40) -> Office:
    """A service that has ended, and all of whose snapshots are written."""
    found, _ = opened(folder)
    found.tell(asks.CapacityChanged(0.0, (("n0", 2), ("n1", 2)))).result(WAIT_S)
    for number in range(1, jobs + 1):
        notice = submitted(number, asks.Wish(1, 1 + number % 3, priority=number % 2))
        found.ask(lambda standing, notice=notice: notice).result(WAIT_S)  # type: ignore[misc]
        settled()
        if number % 4 == 0:
            job = next(j for j in found.standing.sharing.jobs.values() if j.has_room)
            found.tell(asks.JobBegan(number + 0.1, job.job, job.start)).result(WAIT_S)
            found.tell(asks.JobEnded(number + 0.2, job.job, "completed"), step=3).result(WAIT_S)
    found.tell(asks.PriorityChanged(jobs + 1.0, f"j-{jobs}", 7)).result(WAIT_S)
    found.close()
    settled()
    return found


def settled() -> None:
    """No snapshot is being written."""
    for thread in threading.enumerate():
        if thread.name == "snapshot":
            thread.join(WAIT_S)


def test_the_next_service_reads_a_snapshot_and_what_came_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = lived(tmp_path)
    told: list[object] = []
    original = office.told_of
    monkeypatch.setattr(office, "told_of", lambda line: told.append(line) or original(line))
    again, lines = opened(tmp_path)
    again.close()
    assert again.standing == before.standing
    assert list(again.standing.orders) == list(before.standing.orders)
    assert lines == sum(
        "nonce" not in line
        for file in (tmp_path / "journal").iterdir()
        for line in map(json.loads, file.read_text().splitlines())
    )
    assert 0 < len(told) < 2 * TAIL < lines

    told.clear()
    shutil.rmtree(tmp_path / "snapshots")
    whole, counted = opened(tmp_path)
    whole.close()
    assert whole.standing == before.standing and counted == lines
    assert len(told) == lines


def test_a_journal_is_told_again_by_the_rules_of_its_time(tmp_path: Path) -> None:
    """Of a release that knew no other: jobs are as it had told them to be."""
    before, _ = opened(tmp_path, SharingTerms(cooldown_s=0.5))
    for number, least in enumerate((1, 3), 1):
        notice = submitted(number, asks.Wish(least, 30))
        before.ask(lambda standing, notice=notice: notice).result(WAIT_S)  # type: ignore[misc]
    before.tell(asks.CapacityChanged(9.0, (("n0", 32),))).result(WAIT_S)
    before.close()
    folder = tmp_path / "journal"
    for path in folder.iterdir():
        path.write_text(path.read_text().replace(', "surplus": "evenly"', ""))
    assert "surplus" not in "".join(path.read_text() for path in folder.iterdir())
    again, _ = opened(tmp_path, SharingTerms(cooldown_s=0.5, surplus=asks.BY_MINIMUM))
    again.close()
    assert [job.target for job in again.standing.sharing.jobs.values()] == [16, 16]
    fresh, _ = opened(tmp_path / "fresh", again.terms)
    for notice in (submitted(1, asks.Wish(1, 30)), submitted(2, asks.Wish(3, 30))):
        fresh.ask(lambda standing, notice=notice: notice).result(WAIT_S)  # type: ignore[misc]
    fresh.tell(asks.CapacityChanged(9.0, (("n0", 32),))).result(WAIT_S)
    fresh.close()
    assert [job.target for job in fresh.standing.sharing.jobs.values()] == [8, 24]


def test_newer_rules_decide_nothing_again_after_a_stop_in_good_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an upgraded service: jobs run by what the old rules had decided, and the journal's last
    lines were decided again by its own."""
    before, _ = opened(tmp_path, SharingTerms(cooldown_s=0.5))
    before.tell(asks.CapacityChanged(0.0, (("n0", 4),))).result(WAIT_S)
    for number in (1, 2):
        before.ask(lambda _, n=number: submitted(n, asks.Wish(1, 2))).result(WAIT_S)  # type: ignore[misc]
    before.close(in_good_order=True)
    assert [job.target for job in before.standing.sharing.jobs.values()] == [2, 2]
    with monkeypatch.context() as newer:
        newer.setattr(office, "decide", lambda sharing, event, terms: (sharing, ()))
        after, lines = opened(tmp_path, before.terms)
        after.close(in_good_order=True)
    assert after.standing == before.standing and lines == 4


def test_what_the_service_before_wrote_last_is_not_lost_at_a_stop(tmp_path: Path) -> None:
    """It was read, and whether it counts could not be told when the service was stopped: a snapshot
    had its number, and nothing of it. A job that was answered for was gone."""
    asked = threading.Event()

    def check() -> None:
        if threading.current_thread().name == "office":
            asked.set()
            raise StoreFailed("it is away, and comes back for the stop")

    first, _ = opened(tmp_path)
    second = Office(Chronicle(open_store(str(tmp_path))), SharingTerms(), check, print)
    second.open()
    first.ask(lambda _: submitted(1, asks.Wish(1, 1))).result(WAIT_S)
    answer = second.ask(lambda _: submitted(2, asks.Wish(1, 1)))
    assert asked.wait(WAIT_S)
    second.close(in_good_order=True)
    with pytest.raises(Superseded):
        answer.result(WAIT_S)
    first.close()
    third, _ = opened(tmp_path)
    third.close()
    assert list(third.standing.orders) == ["j-1"] and third.standing == first.standing


def test_what_can_not_be_understood_is_heard_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug of one version: tried again, it would decide twice on what came before it."""
    first, _ = opened(tmp_path)
    second, _ = opened(tmp_path)
    for number in (1, 2):
        first.ask(lambda _, n=number: submitted(n, asks.Wish(1, 1))).result(WAIT_S)  # type: ignore[misc]
    original = office.told_of

    def told_of(line: dict[str, Any]) -> Notice:
        if line["job"] == "j-2":
            raise KeyError("a bug")
        return original(line)

    with monkeypatch.context() as broken:
        broken.setattr(office, "told_of", told_of)
        with pytest.raises(KeyError, match="a bug"):
            second.ask(lambda _: submitted(3, asks.Wish(1, 1))).result(WAIT_S)
        assert not second.standing.orders
    second.ask(lambda _: submitted(3, asks.Wish(1, 1))).result(WAIT_S)
    assert list(second.standing.orders) == ["j-1", "j-2", "j-3"]
    for each in (first, second):
        each.close()


@pytest.mark.parametrize("where", ["check", "append", "put"])
def test_a_stop_does_not_wait_for_ever_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    """The actor was not killed before the store had answered."""
    hung, goes_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hung.set()
        assert goes_on.wait(WAIT_S)
        raise Superseded("this test has ended")

    monkeypatch.setattr(office, "CLOSES_WITHIN_S", 0.3)
    found = Office(Chronicle(open_store(str(tmp_path))), SharingTerms(), int, print)
    found.open()
    found.ask(lambda _: submitted(1, asks.Wish(1, 1))).result(WAIT_S)
    if where == "check":
        found._check = hang
    elif where == "append":
        monkeypatch.setattr(Chronicle, "append", hang)
        found.ask(lambda _: submitted(2, asks.Wish(1, 1)))
        assert hung.wait(WAIT_S)
    else:
        monkeypatch.setattr(StandingSnapshots, "_write", hang)
    stop = threading.Thread(target=found.close, args=[True], daemon=True)
    stop.start()
    try:
        stop.join(WAIT_S / 10)
        assert hung.is_set() and not stop.is_alive()
    finally:
        goes_on.set()
    assert "no snapshot at the end" in caplog.text
    assert not (tmp_path / "snapshots").exists()


def test_what_is_before_a_snapshot_may_be_moved_away(tmp_path: Path) -> None:
    before = lived(tmp_path)
    newest = max(int(path.stem) for path in (tmp_path / "snapshots").iterdir())
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    for number in range(1, newest):
        (tmp_path / f"journal/{number:08d}.jsonl").unlink()
    again, _ = opened(tmp_path)
    again.close()
    assert again.standing == before.standing

    (tmp_path / f"journal/{newest:08d}.jsonl").unlink()
    with pytest.raises(StorageError, match="is not there, and later ones are"):
        opened(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "form", "part", "order", "denied"])
def test_a_snapshot_that_can_not_be_read_is_told_again(tmp_path: Path, damage: str) -> None:
    before = lived(tmp_path)
    for path in (tmp_path / "snapshots").iterdir():
        found = json.loads(path.read_text())
        if damage == "form":
            found["form"] += 1
        elif damage == "part":
            found["sharing"]["state"]["has"]["unheard_of"] = 1
        text = json.dumps(found)
        path.write_text(text[: len(text) // 2] if damage == "cut" else text)
    if damage == "order":
        next((tmp_path / "orders").iterdir()).unlink()
    if damage == "denied":  # neither missing nor away: it can't be read, however often
        path = next((tmp_path / "orders").iterdir())
        path.unlink()
        path.mkdir()
    again, _ = opened(tmp_path)
    again.close()
    assert again.standing == before.standing


def test_a_snapshot_of_another_journal_is_not_used(tmp_path: Path) -> None:
    lived(tmp_path / "one")
    other = lived(tmp_path / "two", jobs=44)
    for name in ("snapshots", "orders"):
        shutil.rmtree(tmp_path / "two" / name)
        shutil.copytree(tmp_path / "one" / name, tmp_path / "two" / name)
    again, _ = opened(tmp_path / "two")
    again.close()
    assert again.standing == other.standing


def test_changed_terms_decide_at_once(tmp_path: Path) -> None:
    """Also where the service ended once they were written, and before it had decided."""
    wide = SharingTerms({"default": QueueTerms(ceiling=4)})
    first, _ = opened(tmp_path, SharingTerms({"default": QueueTerms(ceiling=1)}))
    first.tell(asks.CapacityChanged(0.0, (("n0", 4),))).result(WAIT_S)
    for number in (1, 2):
        first.ask(lambda _, n=number: submitted(n, asks.Wish(1, 1))).result(WAIT_S)  # type: ignore[misc]
    assert [job.target for job in first.standing.sharing.jobs.values()] == [1, 0]
    first.close()
    for _ in range(2):
        second, _ = opened(tmp_path, wide)
        second.ask(lambda _: "").result(WAIT_S)  # what it was told before is done
        second.close()
        assert [job.target for job in second.standing.sharing.jobs.values()] == [1, 1]
        newest = max((tmp_path / "journal").iterdir())
        assert "Ticked" in newest.read_text()
        newest.unlink()


def test_snapshots_of_an_undone_branch_give_way(tmp_path: Path) -> None:
    """The journal was put back to what it was: they are of objects that it has no more, and have
    higher numbers than those that are written next."""
    lived(tmp_path)
    undone = {path.name for path in (tmp_path / "snapshots").iterdir()}
    for path in (tmp_path / "journal").iterdir():
        if int(path.stem) > 2:
            path.unlink()
    again, _ = opened(tmp_path)
    for number in range(101, 101 + TAIL):
        again.ask(lambda _, n=number: submitted(n, asks.Wish(9, 9))).result(WAIT_S)  # type: ignore[misc]
        settled()
    again.close()
    settled()
    (left,) = (tmp_path / "snapshots").iterdir()
    assert left.name not in undone


def test_whoever_asks_as_the_office_closes_is_answered(tmp_path: Path) -> None:
    """Who had asked in time was left waiting, beside whoever came too late."""
    found = Office(Chronicle(open_store(str(tmp_path))), SharingTerms(), int, print)
    in_time = [found.ask(lambda standing: "told") for _ in range(2)]
    found.close()
    late = found.ask(lambda standing: "told")
    found.open()
    assert [answer.result(WAIT_S) for answer in in_time] == ["told"] * 2
    with pytest.raises(Superseded, match="the service ends"):
        late.result(WAIT_S)
    found._thread.join(WAIT_S)
    with pytest.raises(Superseded, match="the service ends"):
        found.ask(lambda standing: "told").result(WAIT_S)


def test_snapshots_are_as_rare_as_jobs_are_many_also_those_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has all jobs ever, and was as frequent as where there were none."""
    written: list[tuple[int, int]] = []

    def note(self: StandingSnapshots, kept: ShareSnapshot) -> bool:
        written.append((kept.lines, len(kept.standing.orders)))
        return True

    monkeypatch.setattr(StandingSnapshots, "begin_to_write", note)
    lived(tmp_path, jobs=160)
    for (before, _), (lines, jobs) in pairwise(written):
        assert lines - before == max(TAIL, jobs // 4)
    assert written[-1][1] > 4 * TAIL


@pytest.mark.parametrize("meanwhile", ["", "a tick is on its way", "it starts again"])
def test_a_clock_that_is_set_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Who was to be started in ten seconds was started a day later."""
    at_work, goes_on = threading.Event(), threading.Event()

    def question(_: object) -> str:
        at_work.set()
        assert goes_on.wait(WAIT_S)
        return ""

    found, _ = opened(tmp_path)
    found.tell(asks.CapacityChanged(0.0, (("n0", 1),))).result(WAIT_S)
    found.ask(lambda _: submitted(1, asks.Wish(1, 1))).result(WAIT_S)
    now_s = 90_000.0
    monkeypatch.setattr(office.time, "time", lambda: now_s)
    found.tell(asks.StartFailed(now_s, "j-1", 1, "no room")).result(WAIT_S)
    found.tick()
    found.ask(lambda _: "").result(WAIT_S)
    assert found.standing.sharing.jobs["j-1"].phase == "queued"
    if meanwhile == "a tick is on its way":
        answer = found.ask(question)
        assert at_work.wait(WAIT_S)
        found._tell_time()
    elif meanwhile:
        found.close()
        found, _ = opened(tmp_path)
    now_s = 3_600.0
    found.tick()
    goes_on.set()
    if meanwhile == "a tick is on its way":
        answer.result(WAIT_S)
        found.ask(lambda _: "").result(WAIT_S)
        assert found.standing.sharing.jobs["j-1"].phase == "queued"
        found.tick()
    found.ask(lambda _: "").result(WAIT_S)
    assert found.standing.sharing.jobs["j-1"].phase == "starting"
    found.close()
