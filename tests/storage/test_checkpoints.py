"""Checkpoints: what is read is what was written, or it is refused (I5)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ft.core.assignment import CheckpointRef
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec
from elastic_ft.core.placement import Cut
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StateDamaged, StoreFailed
from elastic_ft.storage import shards
from elastic_ft.storage.cancellable import find_object
from elastic_ft.storage.checkpoints import committed, load_manifest, open_checkpoint
from elastic_ft.storage.kinds import Backend
from elastic_ft.storage.shards import RateLimit, Reader, Want, attempt_prefix, verify, write_shards
from elastic_ft.storage.store import Store, open_store
from tests.storage.published import commit
from tests.storage.states import (
    Counting,
    cut,
    flip,
    raw,
    read_all,
    read_cut,
    rows,
    save,
    some_state,
    steps,
    write,
)

# ---------------------------------------------------------------------- write, then read


@pytest.mark.parametrize(("world", "axis"), [(1, 0), (3, 0), (2, 1), (5, 1)])
def test_any_cut_reads_back_bit_identical(url: str, world: int, axis: int) -> None:
    store, state = open_store(url), some_state(7)
    done = commit(store, write(store, state, 20, world=4), keep_last=2)
    assert done.warnings == ()
    assert done.nbytes == sum(array.nbytes for array in state.values())
    reader = open_checkpoint(done.ref)
    for rank, arrays in enumerate(read_cut(reader, world, axis)):
        for name, found in arrays.items():
            expected = cut(state[name], rows(state[name], world, rank, axis))
            assert found.tobytes() == expected.tobytes(), (name, rank)


def test_experts_are_read_wherever_they_were_and_are(tmp_path: Path) -> None:
    """Parts are named by experts: who has which is no matter of a checkpoint's."""
    store, shape = open_store(str(tmp_path)), (8, 4, 3)
    weight = np.random.default_rng(5).random(shape, np.float32)
    four = Layout(dp_shard=4, ep=4, owners=(3, 0, 0, 2, 1, 2, 1, 3))
    others = (
        Layout(dp_shard=4, ep=4),
        Layout(dp_shard=3, ep=3, owners=(0, 2, 1, 0, 1, 1, 2, 0)),
        Layout(dp_shard=6, ep=3, owners=(0, 2, 1, 0, 1, 1, 2, 0)),
        Layout(dp_shard=2),
    )

    def boxes(layout: Layout, rank: int) -> tuple[Box, ...]:
        how = Cut(None, 1, 0) if layout.shares_experts else Cut(None, 0)
        return how.boxes(shape, layout, layout.place_of(rank))

    prefix, entries = attempt_prefix("run1", 1, 5), list[dict[str, Any]]()
    for rank in range(4):
        some = [("model.w", box, "float32", raw(cut(weight, box))) for box in boxes(four, rank)]
        entries += write_shards(store, prefix, rank, iter(some))
    manifest = dataclasses.replace(
        write(store, {}, 5, world=1),
        tensors={"model.w": TensorSpec("float32", shape)},
        entries=tuple(map(ShardEntry.from_dict, entries)),
    )
    reader = open_checkpoint(commit(store, manifest, keep_last=1).ref)
    for layout in others:
        for rank in range(layout.world_size):
            for box in boxes(layout, rank):
                found = np.zeros(box.sizes, np.float32)
                reader.read([Want("model.w", box, raw(found))])
                assert found.tobytes() == cut(weight, box).tobytes(), (layout, rank)


def test_one_box_of_the_middle(tmp_path: Path) -> None:
    store, state = open_store(str(tmp_path)), some_state(3)
    done = commit(store, write(store, state, 1, axis=1), keep_last=1)
    box = Box((1, 1, 0, 2), (2, 2, 2, 3))
    out = np.zeros(box.sizes, np.uint16)
    reader = open_checkpoint(done.ref)
    reader.read([Want("model.conv", box, raw(out))])
    assert out.tobytes() == cut(state["model.conv"], box).tobytes()
    with pytest.raises(ValueError, match="found room for"):
        reader.read([Want("model.conv", box, raw(out[:1]))])
    with pytest.raises(StateDamaged, match="no tensor"):
        reader.read([Want("model.other", box, raw(out))])


def test_large_pieces_are_cut_and_small_ones_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "OBJECT_BYTES", 64)
    store = open_store(str(tmp_path))
    big = np.arange(2 * 40, dtype=np.float32).reshape(1, 2, 40)
    box = Box((5, 0, 0), big.shape)
    small = [(f"s{n}", Box((), ()), "float32", raw(np.array([n], np.float32))) for n in range(20)]
    entries = [
        ShardEntry.from_dict(entry)
        for entry in write_shards(store, "data/r/g1-s1", 0, [("big", box, "float32", raw(big))])
        + write_shards(store, "data/r/g1-s1", 1, small)
    ]
    assert all(store.size(key) <= 64 for key in store.list("data"))
    assert len(store.list("data")) == 6 + 2  # two rows of 160 bytes in 3 each; 20 times 4 bytes
    found = np.zeros_like(big)
    for entry in (e for e in entries if e.tensor == "big"):
        data = store.get(f"data/r/g1-s1/{entry.file}", entry.offset, entry.offset + entry.nbytes)
        part = np.frombuffer(data, np.float32).reshape(entry.box.sizes)
        found[entry.box.slices_within(box)] = part
    assert (found == big).all()


def test_writing_keeps_to_its_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the threads: object n starts once the bytes before it have had their time."""
    waits: list[float] = []
    monkeypatch.setattr(shards.time, "sleep", waits.append)
    monkeypatch.setattr(shards.time, "monotonic", lambda: 100.0)
    monkeypatch.setattr(shards, "OBJECT_BYTES", 16)
    many = [(f"t{n}", Box((0,), (4,)), "float32", memoryview(bytes(16))) for n in range(9)]
    store = open_store(str(tmp_path))
    write_shards(store, "data/r/g1-s1", 0, many, pace=RateLimit(bytes_per_s=32))
    assert sorted(waits) == [n * 0.5 for n in range(9)]


def test_a_large_manifest_may_take_its_time(tmp_path: Path) -> None:
    """Its deadline is of silence, as that of shards is."""
    store = open_store(str(tmp_path))
    ref = save(store, 1).ref
    slow: Any = Slowly(store.backend)
    assert load_manifest(Store(store.url, slow, deadline_s=0.4), ref).step == 1
    assert slow.pieces > 3


class Slowly:
    """A backend that streams little at a time, which together takes longer than any deadline."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.pieces = backend, 0

    def __getattr__(self, name: str) -> Any:
        if name == "get":
            raise AssertionError("a whole object has one deadline for all of it")
        return getattr(self._backend, name)

    def stream(self, key: str, start: int, end: int, silent_s: float) -> Iterator[bytes]:
        pause = threading.Event()
        for piece in self._backend.stream(key, start, end, silent_s):
            for begin in range(0, len(piece), 1000):
                pause.wait(0.1)
                self.pieces += 1
                yield bytes(piece[begin : begin + 1000])


def test_each_byte_is_read_once(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    done = save(store, 1)
    counting: Any = Counting(store.backend)
    watched = Store(store.url, counting)
    reader = Reader(watched, load_manifest(watched, done.ref), done.ref.url)
    counting.calls.clear()
    wants, outs = [], some_state(0)
    for name, array in outs.items():
        box = Box.whole(array.shape)
        wants += [Want(name, box, raw(array)), Want(name, box, raw(array.copy()))]
    assert reader.read(wants) == done.nbytes
    ranges = [args[:3] for name, args in counting.calls if name == "stream"]
    assert sorted(ranges) == sorted(set(ranges))
    assert len(ranges) == 4  # one object of each rank, in one read


# ----------------------------------------------------------------------------- damage


def test_a_flipped_byte_is_refused(url: str) -> None:
    store = open_store(url)
    ref = save(store, 10).ref
    key = store.list("data")[2]
    flip(store, key, 5)
    with pytest.raises(StateDamaged, match="digest") as caught:
        read_all(store, ref)
    assert caught.value.holder == ref.url
    (problem,) = verify(store, load_manifest(store, ref))
    assert "digest" in problem
    flip(store, key, 5)
    read_all(store, ref)
    assert verify(store, load_manifest(store, ref)) == []


def test_every_flipped_byte_of_a_manifest_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ref = save(store, 10).ref
    key = ref.url.removeprefix(f"{store.url}/")
    for at in range(0, store.size(key), 37):
        flip(store, key, at)
        with pytest.raises(StateDamaged) as caught:
            load_manifest(store, ref)
        assert caught.value.holder == ref.url
        flip(store, key, at)
    store.put(key, store.get(key)[:-20])
    with pytest.raises(StateDamaged):
        load_manifest(store, ref)
    store.delete(key)
    with pytest.raises(StateDamaged, match="missing") as caught:
        load_manifest(store, ref)
    assert caught.value.missing == ref.url


@pytest.mark.parametrize("left", [None, 3])
def test_a_shard_lost_or_cut_short_after_the_commit_is_refused(
    tmp_path: Path, left: int | None
) -> None:
    store = open_store(str(tmp_path))
    ref = save(store, 10).ref
    key = store.list("data")[1]
    data = store.get(key)
    store.delete(key)
    if left is not None:
        store.put(key, data[:left])
    what = "missing" if left is None else "ends at byte 3"
    with pytest.raises(StateDamaged, match=what) as caught:
        read_all(store, ref)
    assert caught.value.missing == ("" if left else store.url_of(key))
    assert find_object(store.url_of(key), 5) is bool(left)
    assert verify(store, load_manifest(store, ref))


# ----------------------------------------------------------------------------- committing


def test_a_truncated_shard_is_refused_at_commit(url: str) -> None:
    store = open_store(url)
    manifest = write(store, some_state(1), 10)
    key = store.list("data")[0]
    store.put(key, store.get(key)[:-1])
    with pytest.raises(StoreFailed, match="bytes, expected"):
        commit(store, manifest, 2)
    store.delete(key)
    with pytest.raises(StoreFailed, match="is missing"):
        commit(store, manifest, 2)
    assert committed(store) == ()


def test_an_incomplete_manifest_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    manifest = write(store, some_state(1), 10)
    short = dataclasses.replace(manifest, entries=manifest.entries[1:])
    with pytest.raises(StoreFailed, match="no entry holds"):
        commit(store, short, 2)
    odd = dataclasses.replace(manifest.entries[0], nbytes=manifest.entries[0].nbytes - 1)
    with pytest.raises(StoreFailed, match="bytes"):
        commit(store, dataclasses.replace(manifest, entries=(odd, *manifest.entries[1:])), 2)
    assert committed(store) == ()


class LostAnswers:
    """``create`` does its work, or not, and then the connection breaks, as often as told."""

    def __init__(self, backend: Any, times: int, does_write: bool) -> None:
        self.backend, self.times, self.does_write = backend, times, does_write
        self.fired = 0

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        if self.fired == self.times:
            return bool(self.backend.create(key, data, timeout_s))
        self.fired += 1
        if self.does_write:
            self.backend.create(key, data, timeout_s)
        raise ConnectionResetError("the answer was lost")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


@pytest.mark.parametrize("does_write", [True, False])
def test_a_lost_acknowledgement_is_resolved(url: str, does_write: bool) -> None:
    plain = open_store(url)
    lossy: Any = LostAnswers(plain.backend, 1, does_write)
    store = Store(plain.url, lossy)
    done = save(store, 10)
    assert lossy.fired == 1
    assert steps(plain) == [10]
    read_all(plain, done.ref)


def test_a_store_that_never_answers_fails_in_the_end(tmp_path: Path) -> None:
    plain = open_store(str(tmp_path))
    lossy: Any = LostAnswers(plain.backend, 99, does_write=False)
    with pytest.raises(StoreFailed, match="the answer was lost"):
        save(Store(plain.url, lossy), 10)
    assert lossy.fired == 3
    assert committed(plain) == ()


def test_committing_the_same_manifest_again_changes_nothing(url: str) -> None:
    store = open_store(url)
    manifest = write(store, some_state(1), 10)
    assert commit(store, manifest, 2) == commit(store, manifest, 2)
    assert steps(store) == [10]
    read_all(store, committed(store)[0])


class Overtaken(LostAnswers):
    """Somebody else publishes the same attempt just before us."""

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        other = Manifest.from_json(data)
        rival = dataclasses.replace(other, run="rival", nonce="theirs")
        self.fired += 1
        self.backend.create(key, rival.to_json(), timeout_s)
        return bool(self.backend.create(key, data, timeout_s))


def test_the_loser_of_a_race_is_told(url: str) -> None:
    plain = open_store(url)
    overtaken: Any = Overtaken(plain.backend, 1, does_write=False)
    with pytest.raises(StoreFailed, match=r"published by run rival.*theirs.*lost"):
        save(Store(plain.url, overtaken), 10)
    assert overtaken.fired == 1
    assert load_manifest(plain, committed(plain)[0]).nonce == "theirs"


def test_one_of_four_controllers_publishes_an_attempt(url: str) -> None:
    stores = [open_store(url) for _ in range(4)]
    manifests = [write(stores[n], some_state(n), 10, world=1, run=f"run{n}") for n in range(4)]

    def try_commit(n: int) -> CheckpointRef | None:
        try:
            return commit(stores[n], manifests[n], 10).ref
        except StoreFailed as error:
            assert "lost" in str(error)
            return None

    with ThreadPoolExecutor(4) as pool:
        refs = [ref for ref in pool.map(try_commit, range(4)) if ref]
    assert refs
    assert len({ref.url for ref in refs}) == len(refs)  # never one manifest, two writers
    # Those that listed after another had published took the next attempt, and pruned that one.
    newest = committed(stores[0])[0]
    assert newest in refs
    read_all(stores[0], newest)
