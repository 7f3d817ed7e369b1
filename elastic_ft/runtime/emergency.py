"""Emergency checkpoints: what keepers save when the controller is gone, for the next one.

No one is left to ask for a checkpoint or to publish it. So each keeper writes the shards that it
has, the newest step first, each shard once among all keepers, and says what it wrote; the next
controller puts together the newest step that is complete, and publishes it as any other
checkpoint. The workers may have been ahead of what the controller had recorded: each shard comes
with the record of the steps before it, which is made up for then. Under the checkpoint URL, for
the controller's start ``run``::

    emergency/<run>/<node>.begun              this keeper is at it
    emergency/<run>/<step>-g<generation>-<space>-<shard>
                                              the keeper that writes it (a conditional write)
    data/<run>/g0-s<step>/                    the shards; no generation that trains has number 0
    emergency/<run>/<node>.json               what it wrote; nothing comes after it
"""

from __future__ import annotations

import json
import re
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_ft.core.events import Holding, NodeId, RecordStep
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec, incomplete
from elastic_ft.core.terms import Terms
from elastic_ft.runtime.buffer import Bytes, Schema, cut, is_whole, label
from elastic_ft.storage import checkpoints
from elastic_ft.storage.store import Store

GENERATION = 0
GATHER_S = 3.0  # for the first word of every keeper
WAIT_S = 600.0  # until all have written
POLL_S = 0.1


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """A sealed shard, and what its worker told of the last steps."""

    holding: Holding
    schema: Schema
    buffer: Bytes
    record: Mapping[int, RecordStep]


@dataclass(frozen=True, slots=True)
class Saved:
    """A step that is complete.

    Attributes:
        record: the steps up to it that were not recorded, oldest first.
    """

    manifest: Manifest
    record: tuple[RecordStep, ...]


# ------------------------------------------------------------------------------ by a keeper


def begin(store: Store, run: str, node: NodeId) -> None:
    store.put(_key(run, f"{node}.begun"), b"")


def save(store: Store, run: str, node: NodeId, held: Iterable[Held]) -> None:
    """Writes what nobody else does, and says what it was. Raises StoreFailed."""
    written = []
    for one in sorted(held, key=lambda one: -one.holding.step):
        sealed_as = label(run, one.holding, one.schema)
        if is_whole(one.buffer, sealed_as) and _claim(store, run, node, one.holding):
            written.append(_write(store, run, one))
    store.put(_key(run, f"{node}.json"), json.dumps(written).encode())


def _claim(store: Store, run: str, node: NodeId, holding: Holding) -> bool:
    name = f"{holding.step}-g{holding.generation}-{holding.space}-{holding.shard}"
    return store.put_if_absent(_key(run, _plain(name)), node.encode())


def _write(store: Store, run: str, held: Held) -> dict[str, Any]:
    holding = held.holding
    whose = f"{holding.generation} {holding.space} {holding.shard}"
    number = zlib.crc32(whose.encode())  # in place of a rank
    prefix = checkpoints.attempt_prefix(run, GENERATION, holding.step)
    pieces = (
        (slot.name, slot.box, slot.dtype, memoryview(cut(held.buffer, slot, slot.box)))
        for slot in held.schema
        if slot.nbytes
    )
    return {
        "step": holding.step,
        "generation": holding.generation,
        "space": holding.space,
        "entries": checkpoints.write_shards(store, prefix, number, pieces),
        "tensors": {slot.name: [slot.dtype, slot.shape] for slot in held.schema},
        "record": [asdict(line) for step, line in held.record.items() if step <= holding.step],
    }


# -------------------------------------------------------------------- by the next controller


def gather(store: Store, run: str, gather_s: float = GATHER_S) -> list[dict[str, Any]]:
    """What all keepers of ``run`` wrote. Waits for those that have begun. Raises StoreFailed."""
    began_s = time.monotonic()
    while True:
        keys = {key.rpartition("/")[2] for key in store.list(f"emergency/{run}")}
        begun = {key.removesuffix(".begun") for key in keys if key.endswith(".begun")}
        done = {key.removesuffix(".json") for key in keys if key.endswith(".json")}
        waited_s = time.monotonic() - began_s
        if waited_s > WAIT_S or (waited_s > gather_s and begun <= done):
            break
        time.sleep(POLL_S)
    said = (json.loads(store.get(_key(run, f"{node}.json"))) for node in sorted(done))
    return [shard for shards in said for shard in shards]


def compose(
    shards: Iterable[dict[str, Any]],
    job: str,
    run: str,
    recorded: int,
    terms: Terms | None = None,
    computed_by: Mapping[int, int] | None = None,
) -> Saved | None:
    """The newest state that the shards make up, if one is, with the steps since ``recorded``.

    All of it is what one generation computed. ``terms``: under which ``run`` trained.
    ``computed_by``: the generations of the recorded steps; a state that came from others is left
    out.
    """
    cuts: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for shard in shards:
        cuts[shard["step"], shard["generation"], shard["space"]].append(shard)
    for (step, generation, space), parts in sorted(cuts.items(), reverse=True):
        record = {line["step"]: line for part in parts for line in part["record"]}
        history = {number: line["generation"] for number, line in record.items()}
        if not _agree(history | {step: generation}, computed_by or {}):
            continue  # it was rolled back, and trained again
        since = range(recorded + 1, step + 1)
        if not record.keys() >= set(since):
            continue  # it would leave a hole in what the run folder has
        entries: dict[Any, ShardEntry] = {}
        tensors: dict[str, TensorSpec] = {}
        for part in parts:
            for name, (dtype, shape) in part["tensors"].items():
                tensors[name] = TensorSpec(dtype, tuple(shape))
            for item in part["entries"]:
                entry = ShardEntry.from_dict(item)
                entries.setdefault((entry.tensor, entry.box), entry)  # of replicas, one
        manifest = Manifest(
            job=job,
            run=run,
            step=step,
            generation=GENERATION,
            nonce=uuid.uuid4().hex,
            layout=space,
            created_at_s=time.time(),
            tensors=tensors,
            entries=tuple(entries.values()),
            extra={"terms": dict(terms or {})},
        )
        if not incomplete(manifest):
            return Saved(manifest, tuple(RecordStep(**record[number]) for number in since))
    return None


def _agree(one: Mapping[int, int], other: Mapping[int, int]) -> bool:
    """Whether the steps that both know were computed by the same generations."""
    return all(one[step] == other[step] for step in one.keys() & other.keys())


def forget(store: Store, run: str) -> None:
    """Deletes all that its keepers said; what they wrote goes with what no manifest references."""
    store.delete(f"emergency/{run}")


def _key(run: str, name: str) -> str:
    return f"emergency/{run}/{name}"


def _plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
