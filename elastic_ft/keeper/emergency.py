"""Emergency checkpoints: what keepers save when the controller is gone, for the next one.

No one is left to ask for a checkpoint or to publish it. So each keeper writes the shards that it
has, the newest step first, and says of each what it wrote. A shard is claimed before it is
written, so that as a rule one keeper writes it; who finds it claimed, and not written after a
while, writes it too, under names of its own. The next controller (``controller.rescue``) puts
together the newest step that is complete, and publishes it as any other checkpoint. The workers
may have been ahead of what the controller had recorded: each shard comes with the record of the
steps before it, which is made up for then. Under the checkpoint URL, for the controller's start
``run``::

    emergency/<run>/<keeper>.begun            it is at it
    emergency/<run>/<keeper>.has              the shards that it has
    emergency/<run>/<shard>.claim             who writes it first (a conditional write)
    data/<run>/g0-s<step>/                    the shards; no generation that trains has number 0
    emergency/<run>/<shard>.<keeper>.done     it is written: what and where
    emergency/<run>/<keeper>.ended            nothing comes after it; what failed

A keeper is a life of a process: one that is cut off from a controller that lives saves as well,
and another takes its place. What it saves harms nobody: shards are known by the generation that
computed them.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from elastic_ft.core.assignment import Holding, NodeId
from elastic_ft.core.commands import RecordStep
from elastic_ft.errors import StoreFailed
from elastic_ft.keeper.buffer import ByteArray, Schema, bytes_of_box, is_whole, label
from elastic_ft.storage import shards
from elastic_ft.storage.store import Store

GENERATION = 0
STALE_S = 20.0  # a claim so old is somebody's who died, or can't write
POLL_S = 0.5
SPACE_MAX = 80  # letters of a shard space in a name
PAUSE_S = 2.0  # before what failed is tried again; a new controller waits longer for a word
BEGUN, HAS, CLAIM, DONE, ENDED = ".begun", ".has", ".claim", ".done", ".ended"


@dataclass(frozen=True, eq=False, slots=True)
class SavedShard:
    """A sealed shard, and what its worker told of the last steps."""

    holding: Holding
    schema: Schema
    buffer: ByteArray
    record: Mapping[int, RecordStep]

    @property
    def name(self) -> str:
        return shard_name(*_place(self.holding))


def keeper_name(node: NodeId, life: str) -> str:
    return plain(f"{node}.{life}")


def shard_name(step: int, generation: int, space: str, shard: str) -> str:
    if len(space) > SPACE_MAX:  # who has which experts may take more than a name has room for
        space = hashlib.blake2b(space.encode(), digest_size=16).hexdigest()
    return plain(f"{step}-g{generation}-{space}-{shard}")


def key_of(run: str, name: str) -> str:
    return f"emergency/{run}/{name}"


def plain(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def begin(store: Store, run: str, keeper: str, node: NodeId) -> None:
    """Says that this keeper will save what it has. Raises StoreFailed."""
    begun = {"node": node, "at_s": time.time()}
    store.put(key_of(run, keeper + BEGUN), json.dumps(begun).encode())


def save(
    store: Store,
    run: str,
    keeper: str,
    held: Iterable[SavedShard],
    stale_s: float = STALE_S,
    within_s: float = 0.0,
    pause_s: float = PAUSE_S,
    unsaid: NodeId = "",
) -> tuple[str, ...]:
    """Writes what nobody else does, and says what it was. Returns what failed, in words.

    Each shard is tried by itself: one that can't be written leaves the others none the worse.

    Args:
        within_s: what failed is tried again until so much time is over: a store that is away may
            come back, and there may be no other copy.
        unsaid: the node, where ``begin`` failed: it is repeated first.
    """
    return _Saving(store, run, keeper, stale_s, unsaid).save(held, within_s, pause_s)


class _Saving:
    def __init__(self, store: Store, run: str, keeper: str, stale_s: float, unsaid: NodeId) -> None:
        self._store, self._run, self._keeper, self._stale_s = store, run, keeper, stale_s
        self._unsaid = unsaid
        self._failed: list[str] = []

    def save(self, held: Iterable[SavedShard], within_s: float, pause_s: float) -> tuple[str, ...]:
        labels = ((one, label(self._run, one.holding, one.schema)) for one in held)
        whole = [one for one, said in labels if is_whole(one.buffer, said)]
        whole.sort(key=lambda one: -one.holding.step)
        deadline_s, stale_s = time.monotonic() + within_s, self._stale_s
        while True:
            self._failed = []
            self._say(whole)
            self._write_all({one.name: one for one in reversed(whole)}, stale_s)  # of replicas, one
            if not self._failed:
                self._end()
            if not self._failed:
                return ()
            if time.monotonic() + pause_s >= deadline_s:
                break
            time.sleep(pause_s)
            stale_s = 0.0  # so long ago, it was claimed
        failed = tuple(self._failed)
        self._end()
        return failed

    def _say(self, whole: list[SavedShard]) -> None:
        if self._unsaid:
            self._try("that it saves", lambda: begin(*self._itself, self._unsaid))
        has = [_place(one.holding) for one in whole]
        self._try("what it has", lambda: self._put(self._keeper + HAS, has))

    @property
    def _itself(self) -> tuple[Store, str, str]:
        return self._store, self._run, self._keeper

    def _end(self) -> None:
        """Nothing comes after it."""
        ended = {"failed": list(self._failed)}
        self._try("its end", lambda: self._put(self._keeper + ENDED, ended))

    def _write_all(self, mine: dict[str, SavedShard], stale_s: float) -> None:
        """The newest step first."""
        later: dict[str, float] = {}  # until when its claim holds
        for name in reversed(mine):
            claimed = self._try(name, lambda name=name: self._claim(name))  # type: ignore[misc]
            if not claimed:
                later[name] = time.monotonic() + stale_s
            elif not self._try(name, lambda name=name: self._write(mine[name])):  # type: ignore[misc]
                later[name] = 0.0
        self._write_abandoned(mine, later)

    def _write_abandoned(self, mine: Mapping[str, SavedShard], later: dict[str, float]) -> None:
        """What others claimed, and can't write or did not live to; what failed, once more."""
        while later:
            keys: set[str] = set()
            self._try("what others wrote", lambda: keys.update(self._said()))  # noqa: B023
            for name, until_s in sorted(later.items(), reverse=True):
                if is_done(name, keys):
                    del later[name]
                elif time.monotonic() >= until_s or self._claimant_ended(name, keys):
                    del later[name]
                    self._try(name, lambda name=name: self._write(mine[name]))  # type: ignore[misc]
            if later:
                time.sleep(min(POLL_S, self._stale_s))

    def _said(self) -> set[str]:
        return {key.rpartition("/")[2] for key in self._store.list(f"emergency/{self._run}")}

    def _claim(self, name: str) -> bool:
        return self._store.put_if_absent(key_of(self._run, name + CLAIM), self._keeper.encode())

    def _claimant_ended(self, name: str, keys: set[str]) -> bool:
        if not any(key.endswith(ENDED) for key in keys):
            return False
        who = self._try(name, lambda: self._store.get(key_of(self._run, name + CLAIM)))
        return bool(who) and who.decode(errors="replace") + ENDED in keys

    def _write(self, held: SavedShard) -> bool:
        holding = held.holding
        number = zlib.crc32(f"{held.name} {self._keeper}".encode())  # in place of a rank
        prefix = shards.attempt_prefix(self._run, GENERATION, holding.step)
        pieces = (
            (slot.name, slot.box, slot.dtype, memoryview(bytes_of_box(held.buffer, slot, slot.box)))
            for slot in held.schema
            if slot.nbytes
        )
        record = (line for step, line in held.record.items() if step <= holding.step)
        written = {
            "step": holding.step,
            "generation": holding.generation,
            "space": holding.space,
            "shard": holding.shard,
            "entries": shards.write_shards(self._store, prefix, number, pieces),
            "tensors": {slot.name: [slot.dtype, slot.shape] for slot in held.schema},
            "record": [asdict(line) for line in record],
        }
        self._put(f"{held.name}.{self._keeper}{DONE}", written)
        return True

    def _put(self, name: str, value: Any) -> None:
        self._store.put(key_of(self._run, name), json.dumps(value).encode())

    def _try(self, what: str, act: Callable[[], Any]) -> Any:
        """None if the store fails."""
        try:
            return act()
        except StoreFailed as error:
            self._failed.append(f"{what}: {error}")
            return None


def is_done(shard: str, keys: Iterable[str]) -> bool:
    return any(key.startswith(f"{shard}.") and key.endswith(DONE) for key in keys)


def _place(of: Holding) -> tuple[int, int, str, str]:
    return of.step, of.generation, of.space, of.shard
