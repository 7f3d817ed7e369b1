"""What a controller removes from a remote run folder is removed once its store is there again."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from uuid import uuid4

import pytest

from elastic_ft.errors import Superseded
from elastic_ft.observe import requests, resize_request, run_folder
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.storage.store import open_store
from tests.observe.watched import Watched
from tests.waiting import until


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """Its mirror looks when a test says so; its folder holds a request and an earlier result."""
    monkeypatch.setattr(run_folder, "MIRROR_EVERY_S", 3600.0)
    folder = RunFolder(f"memory://t/{uuid4().hex}")
    folder.take_over(uuid4().hex, "job")
    for name in (resize_request.NAME, "result.json"):
        open_store(folder.url).put(name, b"{}")
    yield folder
    folder._stop_mirror.set()
    shutil.rmtree(folder.path, ignore_errors=True)


class NoDeletes(Watched):
    is_away = True

    def delete(self, key: str, timeout_s: float) -> None:
        if self.is_away:
            raise PermissionError("not now")
        super().delete(key, timeout_s)


def without_deletes(folder: RunFolder) -> NoDeletes:
    folder._store.backend = store = NoDeletes(folder._store.backend)
    return store


def test_what_could_not_be_removed_is_removed_later(folder: RunFolder) -> None:
    """The next start would obey the request, and who looks took the job for one that has ended."""
    store = without_deletes(folder)
    folder.drop_request()
    folder.forget_result()
    until(lambda: "not now" in folder.mirror_error)
    requests.fetch(folder._hearing, folder.path)  # who hears what is asked finds it there again
    folder._mirror()
    assert "not now" in folder.mirror_error
    store.is_away = False
    folder._mirror()
    assert not folder.mirror_error
    left = open_store(folder.url).list()
    assert resize_request.NAME not in left and "result.json" not in left


def test_a_result_written_since_is_not_removed(folder: RunFolder) -> None:
    store = without_deletes(folder)
    folder.forget_result()
    until(lambda: "not now" in folder.mirror_error)
    folder.write_result({"status": "stopped"})
    store.is_away = False
    folder._mirror()
    assert b"stopped" in open_store(folder.url).get("result.json")


def test_who_is_superseded_removes_nothing_of_the_next(folder: RunFolder) -> None:
    store = without_deletes(folder)
    folder.drop_request()
    until(lambda: "not now" in folder.mirror_error)
    store.is_away = False
    other = RunFolder(folder.url)
    other.take_over(uuid4().hex, "job")
    try:
        folder._mirror()
        with pytest.raises(Superseded):
            folder.check_owner()
        assert open_store(folder.url).exists(resize_request.NAME)
    finally:
        other._stop_mirror.set()
        shutil.rmtree(other.path, ignore_errors=True)
