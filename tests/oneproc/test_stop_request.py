"""Who stops a job while another start takes it over stops the job, not the start before."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_ft.errors import ConfigError
from elastic_ft.observe import alive, handover, stop_request
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store, open_store
from tests.waiting import until

DEADLINE_S = 60.0
GIVEN = {"status": "stopped", "reason": handover.REASON}


def begin(store: Store, run: str) -> owners.Claim:
    """As a controller that is in charge. Its result.json is not written yet."""
    alive.leave_sign(Path(store.url))
    store.delete("result.json")
    return owners.take_over(store, job="job", run=run, run_folder=store.url)


def end(store: Store, claim: owners.Claim, result: dict[str, str]) -> None:
    if result:
        store.put("result.json", json.dumps(result).encode())
    claim.ended()


@contextmanager
def stopping(url: str) -> Iterator[Future[str]]:
    """``elastic-ft stop``. It has ended afterwards."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(stop_request.stop, url, False, lambda line: None, DEADLINE_S)


def is_asked(store: Store, run: str) -> Callable[[], bool]:
    return lambda: (
        store.exists(stop_request.NAME) and json.loads(store.get(stop_request.NAME)) == {"run": run}
    )


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One more each time that somebody has looked who has the job."""
    found: list[object] = []

    def newest(store: Store) -> tuple[owners.Owner | None, bool]:
        found.append(known := look(store))
        return known

    look = owners.newest
    monkeypatch.setattr(owners, "newest", newest)
    return found


@pytest.mark.parametrize("removed", [False, True], ids=["result", "result removed"])
def test_who_takes_the_job_over_is_asked_in_its_turn(
    tmp_path: Path, looks: list[object], removed: bool
) -> None:
    """``removed``: by the one that takes over, which has not claimed the job when we look."""
    store = open_store(str(tmp_path))
    first = begin(store, "run1")
    with stopping(store.url) as stopped:
        until(is_asked(store, "run1"), within_s=DEADLINE_S)
        end(store, first, {} if removed else GIVEN)
        before = len(looks)
        until(lambda: stopped.done() or len(looks) > before + 1, within_s=DEADLINE_S)
        second = begin(store, "run2")
        until(lambda: stopped.done() or is_asked(store, "run2")(), within_s=DEADLINE_S)
        end(store, second, {"status": "stopped", "reason": stop_request.WITH_CHECKPOINT})
        assert stopped.result(DEADLINE_S) == f"stopped: {stop_request.WITH_CHECKPOINT}"


def test_a_stop_between_two_starts_is_of_the_second(tmp_path: Path, looks: list[object]) -> None:
    store = open_store(str(tmp_path))
    end(store, begin(store, "run1"), GIVEN)
    with stopping(store.url) as stopped:
        until(lambda: stopped.done() or looks, within_s=DEADLINE_S)
        second = begin(store, "run2")
        until(lambda: stopped.done() or is_asked(store, "run2")(), within_s=DEADLINE_S)
        end(store, second, {"status": "stopped", "reason": stop_request.WITH_CHECKPOINT})
        assert stopped.result(DEADLINE_S) == f"stopped: {stop_request.WITH_CHECKPOINT}"


def test_a_start_that_claims_the_job_as_we_look_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """We have read that run1 has ended; before we read how, run2 has removed that."""
    store = open_store(str(tmp_path))
    end(store, begin(store, "run1"), GIVEN)
    begun: list[owners.Claim] = []

    def newest(of: Store) -> tuple[owners.Owner | None, bool]:
        known = look(of)
        if not begun:
            begun.append(begin(store, "run2"))
        return known

    look = owners.newest
    monkeypatch.setattr(owners, "newest", newest)
    with stopping(store.url) as stopped:
        until(lambda: stopped.done() or is_asked(store, "run2")(), within_s=DEADLINE_S)
        end(store, begun[0], {"status": "stopped", "reason": stop_request.WITH_CHECKPOINT})
        assert stopped.result(DEADLINE_S) == f"stopped: {stop_request.WITH_CHECKPOINT}"


def test_who_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_request, "FOLLOWS_S", 0.5)
    store = open_store(str(tmp_path))
    end(store, begin(store, "run1"), GIVEN)
    with pytest.raises(ConfigError, match=f"the job has ended: stopped: {handover.REASON}"):
        stop_request.stop(store.url, False, print, DEADLINE_S)
