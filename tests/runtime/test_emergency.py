"""What keepers save when their controller is killed, and what the next controller makes of it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from elastic_ft.core.events import Holding, RecordStep, Tier
from elastic_ft.core.sharding import Box
from elastic_ft.runtime import emergency
from elastic_ft.runtime.buffer import DIGEST_BYTES, label, lay_out, schema_bytes, seal
from elastic_ft.storage import checkpoints
from elastic_ft.storage.shards import Want
from elastic_ft.storage.store import Store, open_store

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
) -> emergency.Held:
    """A part of a weight's rows, and a counter that every shard has. ``told``: of which steps."""
    each = ROWS // of
    box = Box((number * each, 0), (each, 4))
    parts = [("a.step", "float32", (), Box((), ()), 4), ("weight", "float32", (ROWS, 4), box, 4)]
    schema = lay_out(parts)
    buffer = np.zeros(schema_bytes(schema) + DIGEST_BYTES, np.uint8)
    for slot in schema:
        values = np.full(slot.nbytes // 4, step + (number if slot.shape else 0), np.float32)
        buffer[slot.offset : slot.offset + slot.nbytes] = values.view(np.uint8)
    space = f"pp1.s{of}.tp1"
    holding = Holding(step, space, f"pp0.s{number}.tp0", Tier.KEEPER, generation)
    seal(buffer, label(RUN, holding, schema))
    buffer[0] ^= damaged
    record = {n: RecordStep(n, generation, of, f"fsdp{of}", {"loss": 1 / n}) for n in told}
    return emergency.Held(holding, schema, buffer, record)


def save(store: Store, **held: list[emergency.Held]) -> None:
    for node, shards in held.items():
        emergency.begin(store, RUN, node)
        emergency.save(store, RUN, node, shards)


def found(store: Store, recorded: int = 100) -> emergency.Saved | None:
    return emergency.compose(emergency.gather(store, RUN, 0.0), JOB, RUN, recorded)


def test_the_newest_complete_step_becomes_a_checkpoint(store: Store) -> None:
    save(store, n0=[shard(6, 0), shard(7, 0)], n1=[shard(6, 1), shard(7, 1)])
    saved = found(store)
    assert saved is not None and saved.manifest.step == 7
    done = checkpoints.commit(store, saved.manifest, 2)
    reader = checkpoints.open_checkpoint(done.ref)
    assert checkpoints.verify(store, reader.manifest) == []
    rows = np.zeros((ROWS, 4), np.float32)
    reader.read([Want("weight", Box.whole((ROWS, 4)), memoryview(rows).cast("B"))])
    assert rows[:, 0].tolist() == [7, 7, 7, 8, 8, 8]
    emergency.forget(store, RUN)
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
    assert len(emergency.gather(store, RUN, 0.0)) == 2
    saved = found(store)
    assert saved is not None and checkpoints.verify(store, saved.manifest) == []


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
    written = emergency.gather(store, RUN, 0.0)
    assert sorted(one["generation"] for one in written) == [1, 1, 2, 2]
    saved = found(store)
    assert saved is not None and checkpoints.verify(store, saved.manifest) == []
    entries = {entry.file for entry in saved.manifest.entries}
    assert entries == {
        e["file"] for one in written if one["generation"] == 2 for e in one["entries"]
    }


def test_a_state_that_the_record_contradicts_is_passed_over(store: Store) -> None:
    """Steps 5 to 8 of generation 1 were rolled back; 5 and 6 are recorded as 2 computed them."""
    again = range(5, 9)
    save(store, n0=[shard(8, 0, told=again), shard(6, 0, generation=2)])
    save(store, n1=[shard(8, 1, told=again), shard(6, 1, generation=2)])
    written = emergency.gather(store, RUN, 0.0)
    saved = emergency.compose(written, JOB, RUN, 6, None, {4: 1, 5: 2, 6: 2})
    assert saved is not None and saved.manifest.step == 6
    saved = emergency.compose(
        written, JOB, RUN, 4, None, {4: 1}
    )  # it went back, and died right then
    assert saved is not None and saved.manifest.step == 8


def test_who_has_begun_is_waited_for(store: Store) -> None:
    save(store, n0=[shard(7, 0)])
    emergency.begin(store, RUN, "n1")
    late = threading.Timer(0.5, emergency.save, (store, RUN, "n1", [shard(7, 1)]))
    late.start()
    saved = found(store)
    late.join()
    assert saved is not None and saved.manifest.step == 7


def test_nothing_saved_is_no_checkpoint(store: Store) -> None:
    assert found(store) is None
    save(store, n0=[])
    assert found(store) is None
