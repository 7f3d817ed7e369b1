"""What keepers save when their controller is killed, and what the next controller makes of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_ft.controller import rescue
from elastic_ft.core.assignment import Holding, Tier
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.sharding import Box
from elastic_ft.errors import StoreFailed
from elastic_ft.keeper import emergency
from elastic_ft.keeper.buffer import DIGEST_BYTES, label, schema_bytes, schema_of_parts, seal
from elastic_ft.storage import checkpoints
from elastic_ft.storage.shards import Want, verify
from elastic_ft.storage.store import Store, open_store
from tests.storage.published import commit

RUN, JOB, ROWS = "0123456789ab", "job", 6


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def shard(
    step: int,
    number: int,
    of: int = 2,
    damaged: bool = False,
    told: range = range(0),
    generation: int = 1,
    run: str = RUN,
) -> emergency.SavedShard:
    """A part of a weight's rows, and a counter that every shard has. ``told``: of which steps."""
    each = ROWS // of
    box = Box((number * each, 0), (each, 4))
    parts = [("a.step", "float32", (), Box((), ()), 4), ("weight", "float32", (ROWS, 4), box, 4)]
    schema = schema_of_parts(parts)
    buffer = np.zeros(schema_bytes(schema) + DIGEST_BYTES, np.uint8)
    for slot in schema:
        values = np.full(slot.nbytes // 4, step + (number if slot.shape else 0), np.float32)
        buffer[slot.offset : slot.offset + slot.nbytes] = values.view(np.uint8)
    space = f"pp1.s{of}.tp1"
    holding = Holding(step, space, f"pp0.s{number}.tp0", Tier.KEEPER, generation)
    seal(buffer, label(run, holding, schema))
    buffer[0] ^= damaged
    record = {n: RecordStep(n, generation, of, f"fsdp{of}", {"loss": 1 / n}) for n in told}
    return emergency.SavedShard(holding, schema, buffer, record)


AT_ONCE = rescue.RescueDeadlines(begin_s=0.0, quiet_s=0.0, whole_s=0.0)
PATIENT = rescue.RescueDeadlines(begin_s=30.0, quiet_s=30.0, whole_s=30.0)


def save(store: Store, **held: list[emergency.SavedShard]) -> None:
    for node, shards in held.items():
        emergency.begin(store, RUN, keeper(node), node)
        assert emergency.save(store, RUN, keeper(node), shards, stale_s=30.0) == ()


def keeper(node: str) -> str:
    return emergency.keeper_name(node, "1")


def gathered(store: Store) -> list[rescue.Shard]:
    return rescue.gather(store, RUN, {}, AT_ONCE).shards


def found(store: Store, recorded: int = 100) -> rescue.Saved | None:
    return rescue.compose(gathered(store), JOB, RUN, recorded)


def test_the_newest_complete_step_becomes_a_checkpoint(store: Store) -> None:
    save(store, n0=[shard(6, 0), shard(7, 0)], n1=[shard(6, 1), shard(7, 1)])
    saved = found(store)
    assert saved is not None and saved.manifest.step == 7
    done = commit(store, saved.manifest, 2)
    reader = checkpoints.open_checkpoint(done.ref)
    assert verify(store, reader.manifest) == []
    rows = np.zeros((ROWS, 4), np.float32)
    reader.read([Want("weight", Box.whole((ROWS, 4)), memoryview(rows).cast("B"))])
    assert rows[:, 0].tolist() == [7, 7, 7, 8, 8, 8]
    rescue.forget_saved(store, RUN)
    assert found(store) is None and store.list("emergency") == []


def test_no_step_is_taken_that_would_leave_a_hole_in_the_record(store: Store) -> None:
    save(store, n0=[shard(6, 0), shard(7, 0)], n1=[shard(6, 1), shard(7, 1)])
    saved = found(store, recorded=6)
    assert saved is not None and saved.manifest.step == 6
    assert found(store, recorded=5) is None


def test_what_the_controller_had_not_recorded_comes_with_the_shards(store: Store) -> None:
    """It was killed while it lagged; each worker knows some of the steps since."""
    held = [shard(7, 0, told=range(3, 9))], [shard(7, 1, told=range(5, 9))]
    save(store, n0=held[0], n1=held[1])
    saved = found(store, recorded=2)
    assert saved is not None and saved.manifest.step == 7
    assert saved.manifest.layout == "fsdp2", "as `checkpoint ls` says it of any other"
    assert [line.step for line in saved.record] == [3, 4, 5, 6, 7]
    assert saved.record[0] == RecordStep(3, 1, 2, "fsdp2", {"loss": 1 / 3})
    assert found(store, recorded=1) is None


def test_each_shard_is_written_once_and_by_who_has_it_whole(store: Store) -> None:
    save(
        store,
        n0=[shard(7, 0, damaged=True), shard(7, 1)],
        n1=[shard(7, 1), shard(7, 0)],
        n2=[shard(7, 0), shard(7, 1)],
    )
    assert len(gathered(store)) == 2
    saved = found(store)
    assert saved is not None and verify(store, saved.manifest) == []


def test_an_incomplete_step_is_passed_over(store: Store) -> None:
    save(store, n0=[shard(7, 0), shard(6, 0)], n1=[shard(6, 1)])
    saved = found(store)
    assert saved is not None and saved.manifest.step == 6


def test_shards_of_two_layouts_are_not_mixed(store: Store) -> None:
    save(store, n0=[shard(7, 0)], n1=[shard(7, 1, of=3), shard(7, 2, of=3)])
    assert found(store) is None


def test_shards_of_two_histories_are_not_mixed(store: Store) -> None:
    """n0 was cut off from a living controller at step 7 of generation 1; 7 was trained again."""
    save(store, n0=[shard(7, 0), shard(6, 0)], n1=[shard(7, 1, generation=2), shard(6, 1)])
    saved = found(store)
    assert saved is not None and saved.manifest.step == 6


def test_both_histories_of_a_step_are_written_and_the_later_one_is_taken(store: Store) -> None:
    save(store, n0=[shard(7, 0), shard(7, 1)])
    save(store, n1=[shard(7, 0, generation=2)], n2=[shard(7, 1, generation=2)])
    written = gathered(store)
    assert sorted(one.generation for one in written) == [1, 1, 2, 2]
    saved = found(store)
    assert saved is not None and verify(store, saved.manifest) == []
    entries = {entry.file for entry in saved.manifest.entries}
    assert entries == {e.file for one in written if one.generation == 2 for e in one.entries}


def test_a_state_that_the_record_contradicts_is_passed_over(store: Store) -> None:
    """Steps 5 to 8 of generation 1 were rolled back; 5 and 6 are recorded as 2 computed them."""
    again = range(5, 9)
    save(store, n0=[shard(8, 0, told=again), shard(6, 0, generation=2)])
    save(store, n1=[shard(8, 1, told=again), shard(6, 1, generation=2)])
    written = gathered(store)
    saved = rescue.compose(written, JOB, RUN, 6, None, {4: 1, 5: 2, 6: 2})
    assert saved is not None and saved.manifest.step == 6
    saved = rescue.compose(written, JOB, RUN, 4, None, {4: 1})  # it went back, and died right then
    assert saved is not None and saved.manifest.step == 8


def test_nothing_saved_is_no_checkpoint(store: Store) -> None:
    assert found(store) is None
    save(store, n0=[])
    assert found(store) is None


# ---------------------------------------------------------------------------- who is waited for


def later(after_s: float, act: Callable[..., Any], *args: Any) -> threading.Timer:
    timer = threading.Timer(after_s, act, args)
    timer.start()
    return timer


def awaited(
    store: Store, *nodes: str, patience: rescue.RescueDeadlines = PATIENT, since_s: float = 0.0
) -> tuple[rescue.Gathered, float]:
    began_s = time.monotonic()
    expected = dict.fromkeys(nodes, since_s)
    return rescue.gather(store, RUN, expected, patience), time.monotonic() - began_s


def test_keepers_that_the_journal_names_are_waited_for(store: Store) -> None:
    save(store, n0=[shard(7, 0)])
    late = later(0.5, lambda: save(store, n1=[shard(7, 1)]))
    there, _ = awaited(store, "n0", "n1")
    late.join()
    assert len(there.shards) == 2 and there.missing == []


def test_who_has_begun_is_waited_for_whoever_named_it(store: Store) -> None:
    emergency.begin(store, RUN, keeper("n1"), "n1")
    late = later(0.5, lambda: save(store, n1=[shard(7, 0), shard(7, 1)]))
    there, _ = awaited(store)
    late.join()
    assert len(there.shards) == 2


def test_the_best_step_that_all_have_is_not_waited_beyond(store: Store) -> None:
    """n1's node dies while it saves: it never says that it has ended."""
    save(store, n0=[shard(7, 0), shard(7, 1), shard(6, 0)])
    emergency.begin(store, RUN, keeper("n1"), "n1")
    has = json.dumps([[7, 1, "pp1.s2.tp1", "pp0.s1.tp0"]]).encode()
    store.put(emergency.key_of(RUN, keeper("n1") + emergency.HAS), has)
    there, waited_s = awaited(store, "n0", "n1")
    assert waited_s < 10 and len(there.shards) == 3


def test_who_says_nothing_new_is_waited_for_so_long_and_is_named(store: Store) -> None:
    save(store, n0=[shard(7, 0)])
    emergency.begin(store, RUN, keeper("n1"), "n1")
    patience = rescue.RescueDeadlines(begin_s=0.5, quiet_s=0.3)
    there, waited_s = awaited(store, "n0", "n1", "n2", patience=patience)
    assert 0.5 <= waited_s < 10 and there.missing == ["n2"]


def test_an_earlier_life_of_a_keeper_is_not_the_one_that_is_awaited(store: Store) -> None:
    """It was cut off from its controller, which lived on; another keeper took its place."""
    save(store, n0=[shard(5, 0)])
    again = emergency.keeper_name("n0", "2")
    since_s = time.time() + 0.001

    def save_again() -> None:
        emergency.begin(store, RUN, again, "n0")
        emergency.save(store, RUN, again, [shard(7, 0), shard(7, 1)])

    late = later(0.5, save_again)
    there, _ = awaited(store, "n0", since_s=since_s)
    late.join()
    assert {one.step for one in there.shards} == {5, 7}


def test_the_journal_names_the_keepers_that_lived() -> None:
    served = {"event": "metrics_served", "run": RUN}
    lines: list[dict[str, Any]] = [
        {"event": "metrics_served", "run": "before"},
        {"event": "keeper_ready", "node": "n9", "at_s": 1.0},
        served,
        *({"event": "keeper_ready", "node": f"n{i}", "at_s": 2.0 + i} for i in range(4)),
        {"event": "keeper_lost", "node": "n1", "at_s": 7.0},
        {"event": "node_lost", "node": "n2", "at_s": 8.0},
        {"event": "keeper_ready", "node": "n1", "at_s": 9.0},
    ]
    assert rescue.keepers_of(lines, RUN) == {"n0": 2.0, "n1": 9.0, "n3": 5.0}
    assert rescue.keepers_of(lines, "unheard of") == {}
    awaited_before = [*lines, {"event": rescue.INCOMPLETE, "run": RUN}]
    assert rescue.keepers_of(awaited_before, RUN) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[1]", b"null", b"\xff\x00", b"[" * 10_000, b'{"step": -1}', b"NaN"],
    ids=["empty", "object", "list", "null", "binary", "deep", "negative", "nan"],
)
@pytest.mark.parametrize("kind", [emergency.BEGUN, emergency.HAS, emergency.DONE, emergency.ENDED])
def test_what_no_keeper_writes_is_refused_in_one_line(
    store: Store, kind: str, content: bytes
) -> None:
    save(store, n0=[shard(7, 0), shard(7, 1)])
    store.put(emergency.key_of(RUN, f"torn.1{kind}"), content)
    there = rescue.gather(store, RUN, {}, AT_ONCE)
    (line,) = there.refused
    assert f"emergency/{RUN}/torn.1{kind} is not what a keeper writes" in line
    assert "\n" not in line and len(line) < 500
    saved = rescue.compose(there.shards, JOB, RUN, 100)
    assert saved is not None and saved.manifest.step == 7


# ------------------------------------------------------------- keepers that die, stores that fail


class Killed(BaseException):
    """The process ends here."""


class Failing:
    """A backend whose n-th operations fail, counted from 0.

    ``error``: KILLED ends the process, after the operation for every second one of ``at``.
    """

    def __init__(self, inner: Any, at: tuple[int, ...], error: BaseException) -> None:
        self._inner, self._at, self._error = inner, at, error
        self._lock = threading.Lock()
        self.count = 0
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            with self._lock:
                number, self.count = self.count, self.count + 1
                fails = self.dead or number in self._at
                self.dead = self.dead or (fails and isinstance(self._error, Killed))
            if fails:
                raise self._error
            return method(*args)

        return call


def failing(store: Store, error: BaseException, *at: int) -> Store:
    return Store(store.url, Failing(store.backend, at, error), attempts=1)


def keep_all(told: range = range(0)) -> list[emergency.SavedShard]:
    """Two shards of two steps: as a node has them with its buddy's copies."""
    return [shard(step, number, told=told) for step in (6, 7) for number in (0, 1)]


def stores(tmp_path: Path, counts: int) -> Iterator[tuple[int, Store]]:
    for number in range(counts):
        yield number, open_store(str(tmp_path / str(number)))


def operations(store: Store, act: Callable[[Store], object]) -> int:
    """How many operations ``act`` takes."""
    counting = failing(store, Killed())
    act(counting)
    return int(counting.backend.count)  # type: ignore[attr-defined]


def save_alone(store: Store, stale_s: float = 0.01) -> None:
    emergency.begin(store, RUN, keeper("n0"), "n0")
    emergency.save(store, RUN, keeper("n0"), keep_all(), stale_s)


def test_a_keeper_killed_at_any_operation_leaves_the_rest_to_another(
    store: Store, tmp_path: Path
) -> None:
    count = operations(store, save_alone)
    assert count > 10
    for at, each in stores(tmp_path / "each", count):
        with pytest.raises(Killed):
            save_alone(failing(each, Killed(), at))
        emergency.begin(each, RUN, keeper("n1"), "n1")
        assert emergency.save(each, RUN, keeper("n1"), keep_all(), stale_s=0.01) == ()
        there = rescue.gather(each, RUN, {"n1": 0.0}, AT_ONCE)
        saved = rescue.compose(there.shards, JOB, RUN, 100)
        assert saved is not None and saved.manifest.step == 7, f"killed at operation {at}"
        assert verify(each, saved.manifest) == []


def test_one_operation_that_fails_costs_nothing_and_two_no_other_shard(
    store: Store, tmp_path: Path
) -> None:
    count = operations(store, save_alone)
    pairs = [(a, b) for a, b in combinations(range(1, count), 2) if b - a <= 5]
    for number, each in stores(tmp_path / "each", len(pairs)):
        broken = failing(each, OSError(5, "input/output error"), *pairs[number])
        emergency.begin(broken, RUN, keeper("n0"), "n0")
        failed = emergency.save(broken, RUN, keeper("n0"), keep_all(), stale_s=0.01)
        assert failed, "what failed is told"
        there = gathered(each)
        assert len({(one.step, one.entries[-1].box) for one in there}) >= 3, pairs[number]
        saved = rescue.compose(there, JOB, RUN, 100)
        assert saved is not None and saved.manifest.step >= 6, pairs[number]
        assert saved.manifest.step == 7 or len(there) == 3, pairs[number]


def test_a_store_that_is_away_for_good_ends_a_keeper_all_the_same(store: Store) -> None:
    away = failing(store, OSError(5, "input/output error"), *range(10_000))
    with pytest.raises(StoreFailed):
        emergency.begin(away, RUN, keeper("n0"), "n0")
    failed = emergency.save(away, RUN, keeper("n0"), keep_all(), stale_s=0.01)
    assert len(failed) >= 4 and all("input/output error" in line for line in failed)


def test_a_store_that_was_away_has_it_all_once_it_is_back(store: Store) -> None:
    away = failing(store, OSError(5, "input/output error"), *range(60))
    with pytest.raises(StoreFailed):
        emergency.begin(away, RUN, keeper("n0"), "n0")
    failed = emergency.save(
        away, RUN, keeper("n0"), keep_all(), 0.01, within_s=30.0, pause_s=0.01, unsaid="n0"
    )
    assert failed == ()
    there = rescue.gather(store, RUN, {"n0": 0.0}, AT_ONCE)
    assert there.missing == [] and there.refused == [] and len(there.shards) == 4


def test_names_are_short_enough_for_any_store() -> None:
    """Who has which of many experts is part of a shard space, not of a name."""
    spaces = [
        Layout(dp_shard=64, ep=64, owners=tuple(x * step % 64 for x in range(512))).shard_space
        for step in (5, 7)
    ]
    assert min(map(len, spaces)) > 255
    names = {emergency.shard_name(10**6, 10**3, space, "pp0.s63.tp0") for space in spaces}
    assert len(names) == 2 and max(map(len, names)) < 80
