"""Checkpoints: what is read is what was written, or it is refused (I5)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from elastic_ft.storage.checkpoints import (
    Committed,
    RateLimit,
    Reader,
    Swept,
    Want,
    attempt_prefix,
    commit,
    committed,
    delete_attempt,
    load_manifest,
    open_checkpoint,
    prefix_of,
    sweep_abandoned,
    verify,
    write_shards,
)
from elastic_ft.storage.kinds import Backend, FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store

Arrays = dict[str, np.ndarray[Any, Any]]

# torch's names; numpy carries the bytes of bfloat16 as uint16
DTYPES = {"float32": "f4", "bfloat16": "u2", "int64": "i8", "bool": "?", "complex128": "c16"}
SHAPES: dict[str, tuple[str, tuple[int, ...]]] = {
    "model.w": ("float32", (10, 6)),
    "model.conv": ("bfloat16", (4, 3, 2, 5)),
    "optim.step": ("int64", ()),
    "model.mask": ("bool", (7,)),
    "model.none": ("float32", (0, 4)),
    "model.wave": ("complex128", (3, 5)),
}


def some_state(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    state: Arrays = {}
    for name, (dtype, shape) in SHAPES.items():
        kind = np.dtype(DTYPES[dtype])
        raw = rng.integers(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), np.uint8)
        state[name] = np.ascontiguousarray(raw).view(kind).reshape(shape)
    return state


def rows(array: np.ndarray[Any, Any], world: int, rank: int, axis: int = 0) -> Box:
    """The rank's slice of one axis, as FSDP cuts it; the first rank has scalars."""
    if not array.shape:
        return Box((), ())
    axis = min(axis, array.ndim - 1)
    size = array.shape[axis]
    each = -(-size // world)
    start, stop = min(rank * each, size), min((rank + 1) * each, size)
    offsets, sizes = [0] * array.ndim, list(array.shape)
    offsets[axis], sizes[axis] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))


def cut(array: np.ndarray[Any, Any], box: Box) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array[box.slices_within(Box.whole(array.shape))])


def raw(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def pieces(
    state: Arrays, world: int, rank: int, axis: int = 0
) -> Iterator[tuple[str, Box, str, memoryview]]:
    for name, array in state.items():
        if array.shape or rank == 0:
            box = rows(array, world, rank, axis)
            yield name, box, SHAPES[name][0], raw(cut(array, box))


def write(
    store: Store, state: Arrays, step: int, world: int = 4, run: str = "run1", axis: int = 0
) -> Manifest:
    """All ranks' shards, and the manifest that would commit them."""
    prefix = attempt_prefix(run, 1, step)
    entries: list[dict[str, Any]] = []
    for rank in range(world):
        entries += write_shards(store, prefix, rank, pieces(state, world, rank, axis))
    return Manifest(
        job="job",
        run=run,
        step=step,
        generation=1,
        nonce=uuid4().hex,
        layout=f"fsdp {world}",
        created_at_s=1.5,
        tensors={name: TensorSpec(dtype, shape) for name, (dtype, shape) in SHAPES.items()},
        entries=tuple(ShardEntry.from_dict(entry) for entry in entries),
        extra={"position": step},
    )


def save(store: Store, step: int, keep_last: int = 10, run: str = "run1") -> Committed:
    return commit(store, write(store, some_state(step), step, run=run), keep_last)


def steps(store: Store) -> list[int]:
    return [ref.step for ref in committed(store)]


def read_cut(reader: Reader, world: int, axis: int) -> list[Arrays]:
    """Every rank's boxes of another cut, read together."""
    found = []
    for rank in range(world):
        arrays: Arrays = {}
        wants = []
        for name, (dtype, shape) in SHAPES.items():
            box = rows(np.empty(shape, DTYPES[dtype]), world, rank, axis)
            arrays[name] = np.zeros(box.sizes, DTYPES[dtype])
            wants.append(Want(name, box, raw(arrays[name])))
        reader.read(wants)
        found.append(arrays)
    return found


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


class Counting:
    """Passes everything on to a backend, and notes each call."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            return getattr(self.backend, name)(*args)

        return call


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


def flip(store: Store, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 0x10
    store.put(key, data)


def read_all(store: Store, ref: CheckpointRef) -> None:
    reader = Reader(store, load_manifest(store, ref), ref.url)
    read_cut(reader, 1, 0)


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
    assert sweep_abandoned(store, ["run9"]).prefixes == ("data/run1/g1-s1",)


def test_the_sweep_takes_what_no_manifest_references(url: str) -> None:
    store = open_store(url)
    good = save(store, 10).ref
    write(store, some_state(2), 11)
    write(store, some_state(3), 12, run="live")
    assert sweep_abandoned(store, ["live"]) == Swept(("data/run1/g1-s11",))
    assert sweep_abandoned(store, ["live"]) == Swept(())
    read_all(store, good)
    delete_attempt(store, attempt_prefix("live", 1, 12))
    assert {key.split("/")[2] for key in store.list("data")} == {"g1-s10"}


def test_nothing_is_swept_while_a_manifest_is_not_understood(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ref = save(store, 10).ref
    write(store, some_state(2), 11)
    flip(store, ref.url.removeprefix(f"{store.url}/"), 100)
    before = store.list()
    swept = sweep_abandoned(store)
    assert swept.prefixes == ()
    assert "not swept" in swept.warnings[0]
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
