"""The growing files of a remote run folder are uploaded in segments, and read as one."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest

from elastic_ft.cli.app import run_command
from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.observe import replay, run_folder, run_reader
from elastic_ft.observe.lines import SEGMENTS, Line, parse_lines
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.observe.run_reader import Tail, read_lines
from elastic_ft.observe.segments import NUMBERS, listed, read_whole
from elastic_ft.storage.store import Store, open_store
from tests.observe.test_replay import KEPT
from tests.observe.watched import Crash, Watched

SMALL = 400  # bytes of a segment: some five lines


@pytest.fixture(autouse=True)
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mirror looks when a test says so, readers as often as they like."""
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 3600.0)
    monkeypatch.setattr(run_reader, "REMOTE_EVERY_S", 0.0)


@pytest.fixture
def url() -> str:
    return f"memory://t/{uuid4().hex}"


OPENED: list[RunFolder] = []


@pytest.fixture(autouse=True)
def left_behind() -> Iterator[None]:
    yield
    while OPENED:
        folder = OPENED.pop()
        folder._stop_mirror.set()
        shutil.rmtree(folder.path, ignore_errors=True)


def opened(url: str, dies_after: int | None = None) -> tuple[RunFolder, Watched]:
    folder = RunFolder(url, segment_bytes=SMALL)
    OPENED.append(folder)
    folder.take_over(uuid4().hex, "job")
    watched = Watched(folder._store.backend, dies_after)
    folder._store.backend = watched
    return folder, watched


def record(folder: RunFolder, first: int, last: int, who: str = "x") -> None:
    for step in range(first, last + 1):
        folder.journal(1.0, "noted", 1, who, {"step": step})
        folder.record_inbox({"type": "Noted", "at_s": 1.0, "seq": step, "of": who * 20})
        folder.record_step({"step": step, "generation": 1, "who": who * 20}, [step])


def stored(url: str, name: str = "steps.jsonl") -> list[Line]:
    return parse_lines(read_whole(open_store(url), name), name, name)


def numbers(url: str, name: str = "steps.jsonl") -> list[int]:
    return [line[NUMBERS[name]] for line in stored(url, name)]


def test_a_small_folder_has_no_segments(url: str) -> None:
    folder, _ = opened(url)
    record(folder, 1, 3)
    folder._mirror()
    assert not folder.mirror_error
    assert not [key for key in open_store(url).list() if key.startswith(SEGMENTS)]
    assert open_store(url).get("steps.jsonl") == (folder.path / "steps.jsonl").read_bytes()


def test_a_closed_segment_is_uploaded_once_and_never_the_whole_file(url: str) -> None:
    folder, watched = opened(url)
    store = open_store(url)
    for step in range(1, 201):
        record(folder, step, step)
        before = watched.put_bytes
        folder._mirror()
        assert not folder.mirror_error
        assert watched.put_bytes - before < 4 * 3 * SMALL, "of each file a segment and a tail"
    for name in NUMBERS:
        local = (folder.path / name).read_bytes()
        keys = listed(store, name)
        assert len(keys) > len(local) // SMALL
        assert {watched.puts[key] for key in keys} == {1}
        assert read_whole(store, name) == local
        assert len(store.get(name)) <= SMALL
        for key in keys:
            segment = store.get(key)
            assert len(segment) <= SMALL and segment.endswith(b"\n")
    before = watched.put_bytes
    folder._mirror()
    assert watched.put_bytes == before, "nothing was new"


def test_a_restart_goes_on_and_uploads_nothing_closed_again(url: str) -> None:
    first, _ = opened(url)
    record(first, 1, 60)
    first._mirror()
    closed = {name: listed(open_store(url), name) for name in NUMBERS}
    second, watched = opened(url)
    second.repair()
    assert second.last_step() == 60
    second.truncate(60)
    record(second, 61, 90)
    second._mirror()
    assert not second.mirror_error
    for name in NUMBERS:
        assert len(listed(open_store(url), name)) > len(closed[name])
        assert not [key for key in closed[name] if watched.puts[key]]
        assert read_whole(open_store(url), name) == (second.path / name).read_bytes()


def test_a_line_longer_than_a_segment_is_one(url: str) -> None:
    folder, _ = opened(url)
    for who in ("a", "b" * SMALL, "c", "d" * SMALL, "e" * SMALL):
        folder.record_step({"step": folder.last_step() + 1, "generation": 1, "who": who}, None)
        folder._mirror()
        assert (
            read_whole(open_store(url), "steps.jsonl") == (folder.path / "steps.jsonl").read_bytes()
        )
    assert len(listed(open_store(url), "steps.jsonl")) > 2


# ------------------------------------------------------------------------------- crashes


def is_prefix(part: Sequence[Any], whole: Sequence[Any]) -> bool:
    return list(part) == list(whole)[: len(part)]


def forget(place: str) -> None:
    """A memory filesystem lists slowly what it is full of."""
    fs, path = fsspec.core.url_to_fs(place)
    fs.rm(path, recursive=True)


def crashed(folder: RunFolder) -> bool:
    try:
        folder._mirror()
    except Crash:
        return True
    assert not folder.mirror_error
    return False


@pytest.mark.parametrize("batch", [7, 15])
def test_a_crash_after_any_operation_leaves_a_prefix(url: str, batch: int) -> None:
    """With one segment to close at a time, and with several."""
    dies_after = 0
    while True:
        dies_after += 1
        place = f"{url}/{dies_after}"
        folder, _ = opened(place, dies_after)
        had, died = 0, False
        for last in range(batch, 2 * batch + 1, batch):
            record(folder, last - batch + 1, last)
            died = died or crashed(folder)
            if died:
                break
            had = last
        for name in NUMBERS:
            whole = read_lines(folder.path / name)
            try:
                found = stored(place, name)
            except StoreFailed:
                assert not had
                continue
            assert is_prefix(found, whole) and len(found) >= had
        again, watched = opened(place)  # the next controller goes on from there
        again.repair()
        again.truncate(again.last_step())
        record(again, again.last_step() + 1, 3 * batch)
        again._mirror()
        assert not again.mirror_error
        for name in NUMBERS:
            assert read_whole(open_store(place), name) == (again.path / name).read_bytes()
        assert numbers(place) == list(range(1, 3 * batch + 1))
        closed = [key for key in watched.puts if key.startswith(SEGMENTS)]
        # What was told last is lost with the inbox's end here, and others are told in its place.
        assert max(watched.puts[key] for key in closed if "inbox" not in key) == 1
        forget(place)
        if not died:
            break
    assert dies_after > 8


@pytest.mark.parametrize("kept", [0, 4, 5, 9, 18])
@pytest.mark.parametrize("more", [0, 12])
def test_a_crash_anywhere_in_a_rollback_leaves_the_old_or_the_new_record(
    url: str, kept: int, more: int
) -> None:
    dies_after = 0
    while True:
        dies_after += 1
        place = f"{url}/{dies_after}"
        folder, watched = opened(place)
        record(folder, 1, 18)
        folder._mirror()
        old = {name: read_lines(folder.path / name) for name in NUMBERS}
        folder.truncate(kept)
        record(folder, kept + 1, kept + more, "y")
        new = {name: read_lines(folder.path / name) for name in NUMBERS}
        watched.left = watched.changes + dies_after
        died = crashed(folder)
        for name in NUMBERS:
            found = stored(place, name)
            assert found == old[name] or is_prefix(found, new[name]), (name, dies_after)
            assert len(found) >= min(len(old[name]), kept)
        again, _ = opened(place)
        again.repair()
        again.truncate(min(kept, again.last_step()))
        record(again, again.last_step() + 1, 33, "z")
        again._mirror()
        assert not again.mirror_error
        assert numbers(place) == list(range(1, 34))
        for name in NUMBERS:
            assert read_whole(open_store(place), name) == (again.path / name).read_bytes()
        forget(place)
        if not died:
            break


def test_a_rollback_keeps_the_segments_before_it(url: str) -> None:
    folder, watched = opened(url)
    record(folder, 1, 40)
    folder._mirror()
    before = listed(open_store(url), "steps.jsonl")
    folder.truncate(20)
    record(folder, 21, 60, "y")
    folder._mirror()
    kept = [key for key in before if int(key.rpartition("/")[2]) <= 16]
    assert kept and {watched.puts[key] for key in kept} == {1}
    assert numbers(url) == list(range(1, 61))
    folder.truncate(0)
    folder._mirror()
    assert stored(url) == [] and listed(open_store(url), "steps.jsonl") == []


def test_an_upload_that_failed_is_taken_up_again(url: str) -> None:
    folder, watched = opened(url)
    record(folder, 1, 4)
    folder._mirror()
    record(folder, 5, 30)
    watched.fails = "steps.jsonl"  # segments are there, the tail is not
    folder._mirror()
    assert "not now" in folder.mirror_error
    assert numbers(url) == [1, 2, 3, 4]
    record(folder, 31, 31)
    folder._mirror()
    assert not folder.mirror_error and numbers(url) == list(range(1, 32))
    assert {watched.puts[key] for key in listed(open_store(url), "steps.jsonl")} == {1}


def test_who_is_superseded_puts_and_deletes_no_segment(url: str) -> None:
    first, watched = opened(url)
    record(first, 1, 40)
    first._mirror()
    second, _ = opened(url)
    second._mirror()
    there = {key: open_store(url).get(key) for key in open_store(url).list()}
    first.truncate(10)
    record(first, 11, 70, "late")
    changes = watched.changes
    first._mirror()
    assert "superseded" in first.mirror_error and watched.changes == changes
    assert {key: open_store(url).get(key) for key in open_store(url).list()} == there
    with pytest.raises(Superseded):
        first.check_owner()


def test_a_segment_that_comes_late_changes_nothing(url: str) -> None:
    """Of a controller that was stopped between its look and its write."""
    first, _ = opened(url)
    record(first, 1, 4)
    first._mirror()
    second, _ = opened(url)
    record(first, 5, 8, "first")
    record(second, 5, 40, "second")
    steps = first._mirrors["steps.jsonl"]
    late = (first.path / "steps.jsonl").read_bytes()
    steps._check = lambda: None
    steps._close(late)  # before the second closes it
    second._mirror()
    assert read_whole(open_store(url), "steps.jsonl") == (second.path / "steps.jsonl").read_bytes()
    assert not open_store(url).put_if_absent(listed(open_store(url), "steps.jsonl")[0], late)


# ------------------------------------------------------------------------------- readers


def test_a_tail_sees_each_line_once_and_downloads_a_segment_once(url: str) -> None:
    folder, watched = opened(url)
    tails = {name: Tail(url, name) for name in NUMBERS}
    seen: dict[str, list[int]] = {name: [] for name in NUMBERS}

    class Looking(Watched):
        """Readers look after every single change."""

        def _changed(self, key: str) -> None:
            look()

    def look() -> None:
        for name, tail in tails.items():
            seen[name] += [line[NUMBERS[name]] for line in tail.read()]

    look()
    folder._store.backend = Looking(watched._backend)
    counted: dict[str, Watched] = {}
    for name, tail in tails.items():
        store: Store | None = tail._store
        assert store is not None
        counted[name] = Watched(store.backend)
        store.backend = counted[name]
    for last in (3, 9, 11, 60, 61, 90):
        record(folder, len(read_lines(folder.path / "steps.jsonl")) + 1, last)
        folder._mirror()
        assert not folder.mirror_error
    for name in NUMBERS:
        look()
        expected = [line[NUMBERS[name]] for line in read_lines(folder.path / name)]
        assert seen[name] == expected
        keys = listed(open_store(url), name)
        assert len(keys) > 5 and {counted[name].got[key] for key in keys} == {1}
    folder.truncate(30)
    record(folder, 31, 40, "y")
    folder._mirror()
    look()
    again = seen["steps.jsonl"][90:]
    assert again == list(range(1, 41)), "a shorter file is read from its beginning"


def test_the_store_is_asked_for_a_list_only_where_there_may_be_another(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader of each file of a run that stood still had its segments listed, again and again:
    by price of an object store the dearest of questions."""
    folder, _ = opened(url)
    listings, list_keys = Counter[str](), Store.list

    def counted(store: Store, prefix: str = "", after: str = "") -> list[str]:
        listings[prefix.rpartition("/")[2]] += 1
        return list_keys(store, prefix, after)

    tail, seen, heads = Tail(url, "steps.jsonl"), list[int](), set[bytes]()
    for last in (3, 4, 5, 60, 61, 120):
        record(folder, len(read_lines(folder.path / "steps.jsonl")) + 1, last)
        folder._mirror()
        heads.add(open_store(url).get("steps.jsonl").splitlines()[0])
        with monkeypatch.context() as patched:
            patched.setattr(Store, "list", counted)
            for _ in range(5):
                seen += [line["step"] for line in tail.read()]
    assert seen == list(range(1, 121))
    assert listings.total() == len(heads) < 6, "once for each line that the tail began with"
    folder.truncate(0)
    folder._mirror()
    with monkeypatch.context() as patched:
        patched.setattr(Store, "list", counted)
        assert Tail(url, "steps.jsonl").read() == tail.read() == []


def test_a_reader_that_a_rollback_overtakes_looks_again(url: str) -> None:
    folder, _ = opened(url)
    record(folder, 1, 60)
    folder._mirror()
    store = open_store(url)

    class Overtaken(Watched):
        def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Any:
            found = super().get(key, start, end, timeout_s)
            if self.got.total() == 1:
                folder.truncate(12)
                record(folder, 13, 15, "y")
                folder._mirror()
            return found

    store.backend = Overtaken(store.backend)  # type: ignore[assignment]
    assert read_whole(store, "steps.jsonl") == (folder.path / "steps.jsonl").read_bytes()


@pytest.fixture
def kept(url: str) -> str:
    """A recorded run in a segmented folder."""
    folder, _ = opened(url)
    for path in (KEPT / "kill_and_stop").iterdir():
        if path.suffix == ".jsonl":
            shutil.copy(path, folder.path)
    folder._mirror()
    assert not folder.mirror_error
    assert len(listed(open_store(url), "events.jsonl")) > 5
    return url


def test_the_story_of_a_segmented_folder(kept: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command(["events", str(KEPT / "kill_and_stop"), "--raw"]) == 0
    whole = capfd.readouterr().out
    assert run_command(["events", kept, "--raw"]) == 0
    assert whole.startswith(capfd.readouterr().out.rstrip()) and whole.count("\n") > 20


def test_a_copy_of_a_segmented_folder_is_told_replayed_and_resumed(
    kept: str, tmp_path: Path
) -> None:
    store = open_store(kept)
    for key in store.list():
        if not key.startswith("owners/"):
            (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / key).write_bytes(store.get(key))
    whole = parse_lines((KEPT / "kill_and_stop" / "events.jsonl").read_bytes(), "kept")
    assert len(parse_lines((tmp_path / "events.jsonl").read_bytes(), "tail")) < len(whole)
    assert Tail(str(tmp_path), "events.jsonl").read() == whole
    verdict = replay.check_replay(
        tmp_path, exact=False
    )  # the kept one has an older version's words
    assert verdict.difference == "" and verdict.decisions > 15
    folder = RunFolder(str(tmp_path))
    folder.take_over("next", "job")
    line = folder.journal(1.0, "noted", 1, "next", {})
    folder.close()
    assert line["seq"] == len(whole)
    assert read_lines(tmp_path / "events.jsonl") == [*whole, json.loads(json.dumps(line))]
    assert not list((tmp_path / SEGMENTS).iterdir())
