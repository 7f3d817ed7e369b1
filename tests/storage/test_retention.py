"""Which checkpoints are found, kept and swept, and stores that fail meanwhile."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateDamaged
from elastic_ft.storage import shards
from elastic_ft.storage.checkpoints import (
    committed,
    delete_attempt,
    load_manifest,
    sweep_abandoned,
)
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.shards import attempt_prefix, prefix_of, write_shards
from elastic_ft.storage.store import Store, StoreError, open_store
from tests.storage.published import commit
from tests.storage.states import Counting, flip, read_all, save, some_state, steps, write

# -------------------------------------------------------------- finding, retention, sweep


class Shuffled(Counting):
    def list(self, prefix: str, timeout_s: float, after: str = "") -> list[str]:
        found = sorted(self.backend.list(prefix, timeout_s), key=lambda key: key[::-1])
        return [*found, "manifests/notes.txt", "manifests/0000000001-0.json.tmp"]


def test_newest_first_whatever_the_listing(tmp_path: Path) -> None:
    plain = open_store(str(tmp_path))
    for step in (9, 100, 20):
        save(plain, step)
    shuffled: Any = Shuffled(plain.backend)
    assert steps(Store(plain.url, shuffled)) == [100, 20, 9]


def test_retention_keeps_the_newest(url: str) -> None:
    store = open_store(url)
    for step in (1, 2, 3, 4):
        assert save(store, step, keep_last=2).warnings == ()
    assert steps(store) == [4, 3]
    kept = {prefix_of(load_manifest(store, ref)) for ref in committed(store)}
    assert {"/".join(key.split("/")[:3]) for key in store.list("data")} == kept
    save(store, 5, keep_last=1)
    assert steps(store) == [5]
    read_all(store, committed(store)[0])


def test_retention_keeps_what_is_young_and_what_is_being_read(url: str) -> None:
    """Both keep: number and age. A checkpoint that workers restore from stays as well."""
    store = open_store(url)
    refs = {}
    for step, hours, in_use in ((1, 0, ()), (2, 1, ()), (3, 5, ()), (4, 6, ()), (5, 11, (3,))):
        manifest = write(store, some_state(step), step)
        manifest = dataclasses.replace(manifest, created_at_s=hours * 3600.0)
        urls = [refs[each].url for each in in_use]
        done = commit(store, manifest, 1, keep_for_s=4.5 * 3600, in_use=urls)
        assert done.warnings == ()
        refs[step] = done.ref
        expected = {1: [1], 2: [2, 1], 3: [3, 2], 4: [4, 3], 5: [5, 3]}[step]
        assert steps(store) == expected
    for ref in committed(store):
        read_all(store, ref)
    save(store, 6, keep_last=1)
    assert steps(store) == [6]


def test_a_step_is_published_again_after_a_fallback(url: str) -> None:
    store = open_store(url)
    old = [save(store, step).ref for step in (10, 20, 30)]
    flip(store, store.list(f"data/run1/g1-s{30}")[0], 0)
    with pytest.raises(StateDamaged):
        read_all(store, old[2])
    again = save(store, 20, keep_last=2, run="run2").ref
    assert again.url != old[1].url
    # The earlier 20 stays until a later step is published: its key must not be free to win again.
    # 30 is ahead, and not this writer's to judge.
    assert committed(store) == (old[2], again, old[1], old[0])
    newest = save(store, 30, keep_last=2, run="run2").ref
    assert committed(store) == (newest, old[2], again)
    read_all(store, newest)


def attempts(store: Store) -> list[str]:
    return sorted({key.rpartition("/")[0] for key in store.list("data")})


class NoDeletes(Counting):
    def delete(self, key: str, timeout_s: float) -> None:
        raise PermissionError("deletes are not allowed")


def test_failing_to_prune_is_a_warning(tmp_path: Path) -> None:
    plain = open_store(str(tmp_path))
    save(plain, 1)
    strict: Any = NoDeletes(plain.backend)
    done = save(Store(plain.url, strict), 2, keep_last=1)
    assert len(done.warnings) == 1
    assert "deletes are not allowed" in done.warnings[0]
    assert steps(plain) == [2, 1]


def test_a_damaged_manifest_is_pruned_with_a_warning(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ref = save(store, 1).ref
    flip(store, ref.url.removeprefix(f"{store.url}/"), 100)
    done = save(store, 2, keep_last=1)
    assert "damaged" in done.warnings[0]
    assert steps(store) == [2]
    assert attempts(store) == ["data/run1/g1-s1", "data/run1/g1-s2"]
    assert sweep_abandoned(store, ["run9"]) == ()
    assert attempts(store) == ["data/run1/g1-s2"]


def test_the_sweep_takes_what_no_manifest_references(url: str) -> None:
    store = open_store(url)
    good = save(store, 10).ref
    write(store, some_state(2), 11)
    write(store, some_state(3), 12, run="live")
    assert sweep_abandoned(store, ["live"]) == ()
    assert attempts(store) == ["data/live/g1-s12", "data/run1/g1-s10"]
    read_all(store, good)
    delete_attempt(store, attempt_prefix("live", 1, 12))
    assert attempts(store) == ["data/run1/g1-s10"]


def test_nothing_is_swept_while_a_manifest_is_not_understood(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ref = save(store, 10).ref
    write(store, some_state(2), 11)
    flip(store, ref.url.removeprefix(f"{store.url}/"), 100)
    before = store.list()
    (warning,) = sweep_abandoned(store)
    assert "not swept" in warning
    assert store.list() == before


@pytest.mark.parametrize("prefix", ["", "data", "data/run", "data/run/", "manifests"])
def test_only_an_attempt_can_be_abandoned(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="not the prefix"):
        delete_attempt(open_store(str(tmp_path)), prefix)


# ------------------------------------------------------------------------ failing stores


class FullDisk(Counting):
    """The third ``put`` fails."""

    def put(self, key: str, parts: Sequence[bytes], timeout_s: float) -> None:
        self.calls.append(("put", (key,)))
        if len(self.calls) == 3:
            raise OSError(28, "No space left on device")
        self.backend.put(key, parts, timeout_s)


def test_a_failed_shard_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "OBJECT_BYTES", 16)
    full: Any = FullDisk(open_store(str(tmp_path)).backend)
    store = Store(str(tmp_path), full)
    many = [(f"t{n}", Box((0,), (4,)), "float32", memoryview(bytes(16))) for n in range(1000)]
    with pytest.raises(StoreError, match="No space left") as caught:
        write_shards(store, "data/r/g1-s1", 0, iter(many))
    assert caught.value.kind is FailureKind.FAILED
    assert len(full.calls) < 50  # bounded look-ahead: it did not go on
