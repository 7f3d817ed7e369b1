"""What the next controller makes of an emergency: waits for keepers, and puts a step together.

Nothing is deleted here but what is published, or proven older than what is; whoever is killed on
the way leaves it all to the next one. Formats: ``keeper.emergency``.
"""

from __future__ import annotations

import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_ft.core.assignment import NodeId
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.manifest import Manifest, ShardEntry, TensorSpec, incomplete
from elastic_ft.core.rescuing import StateAt, candidates
from elastic_ft.core.terms import Terms
from elastic_ft.core.typed import decoder
from elastic_ft.errors import MALFORMED, UsageError, one_line
from elastic_ft.keeper.emergency import (
    BEGUN,
    DONE,
    ENDED,
    GENERATION,
    HAS,
    is_done,
    key_of,
    shard_name,
)
from elastic_ft.observe.run_folder import read_lines
from elastic_ft.storage.shards import attempt_prefix
from elastic_ft.storage.store import Store

POLL_S = 0.2
EARLIER = ".json"  # what a keeper of an earlier version had saved
INCOMPLETE = "emergency_incomplete"  # the journal's line: all there was to wait for was awaited
Lines = Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class RescueDeadlines:
    """Attributes:
    begin_s: for the first word of each keeper: where the machine of the controller is lost, they
        know it when their heartbeats have not arrived for the timeout of those.
    quiet_s: without anything new, of those that have begun.
    whole_s: for all of it.
    """

    begin_s: float
    quiet_s: float = 60.0
    whole_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Shard:
    """What a keeper wrote of one."""

    step: int
    generation: int
    space: str
    entries: tuple[ShardEntry, ...]
    tensors: Mapping[str, TensorSpec]
    record: Mapping[int, RecordStep]


@dataclass(frozen=True, slots=True)
class Saved:
    """A step that is complete.

    Attributes:
        record: the steps up to it that were not recorded, oldest first.
    """

    manifest: Manifest
    record: tuple[RecordStep, ...]


@dataclass(slots=True)
class Gathered:
    """What the keepers of a run wrote.

    Attributes:
        refused: objects that can't be understood, and what keepers could not save, a line each.
        missing: nodes whose keepers were expected, and said nothing.
        heard: whether any keeper said anything.
    """

    shards: list[Shard] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    missing: list[NodeId] = field(default_factory=list)
    heard: bool = False


def runs(store: Store) -> tuple[str, ...]:
    """Whose keepers have said something. Raises StoreFailed."""
    return tuple(sorted({key.split("/")[1] for key in store.list("emergency") if "/" in key}))


def keepers_named(journal: Path, run: str) -> dict[NodeId, float]:
    """``keepers_of`` what a run folder's events.jsonl has."""
    return keepers_of(read_lines(journal), run)


def is_known(journal: Path, run: str) -> bool:
    """Whether the journal would name the keepers of ``run``, or they were awaited before."""
    events = ("metrics_served", INCOMPLETE)
    return any(e["event"] in events and e.get("run") == run for e in read_lines(journal))


def keepers_of(events: Lines, run: str) -> dict[NodeId, float]:
    """Which nodes' keepers lived when controller ``run`` ended, as the journal has it.

    Returns node -> when its keeper was ready (unix). {}: none did, or they were awaited before.
    """
    current, alive = "", dict[NodeId, float]()
    for line in events:
        if line["event"] == "metrics_served":  # once a start, before any keeper
            current = str(line.get("run", ""))
        elif line["event"] == INCOMPLETE and line["run"] == run:
            return {}
        elif current == run and line["event"] == "keeper_ready":
            alive[line["node"]] = line["at_s"]
        elif current == run and line["event"] in ("keeper_lost", "node_lost"):
            alive.pop(line["node"], None)
    return alive


# ------------------------------------------------------------------------------- waiting


def gather(
    store: Store,
    run: str,
    expected: Mapping[NodeId, float],
    patience: RescueDeadlines,
    wait: Callable[[float], None] = time.sleep,
    whoever: bool = False,
) -> Gathered:
    """What its keepers wrote, once all have ended or the best step that they have is there.

    Args:
        expected: the nodes whose keepers should come, and since when those are (unix time): what
            was said before that was said by another life, clocks permitting.
        wait: lets so many seconds go by.
        whoever: nobody knows which keepers it had: some are expected.

    Raises StoreFailed; UsageError where an earlier version wrote it: it is not ours to delete.
    """
    if any(key.endswith(EARLIER) for key in store.list(f"emergency/{run}")):
        raise UsageError(
            f"{store.url_of(f'emergency/{run}')} was saved by an earlier version: resume once with "
            f"that one, or delete it"
        )
    waiting = _Waiting(store, run, expected)
    began_s = changed_s = time.monotonic()
    while True:
        changed = waiting.look()
        now_s = time.monotonic()
        changed_s = now_s if changed else changed_s
        expects = waiting.missing() or (whoever and not waiting.heard())
        missing = expects and now_s - began_s < patience.begin_s
        quiet = now_s - changed_s > patience.quiet_s or not waiting.unended()
        if not missing and (quiet or waiting.is_best_there()):
            break
        if now_s - began_s > patience.whole_s:
            break
        wait(POLL_S)
    waiting.look()  # a listing is no moment: it may have had the end and not what came before
    return waiting.result()


class _Waiting:
    def __init__(self, store: Store, run: str, expected: Mapping[NodeId, float]) -> None:
        self._store, self._run, self._expected = store, run, expected
        self._keys: frozenset[str] = frozenset()
        self._data: frozenset[str] = frozenset()
        self._parsed: dict[str, Any] = {}
        self._refused: dict[str, str] = {}

    def look(self) -> bool:
        """Returns whether there is anything new."""
        keys = frozenset(k.rpartition("/")[2] for k in self._store.list(f"emergency/{self._run}"))
        changed, self._keys = keys != self._keys, keys
        for key in sorted(keys):
            if key.endswith((BEGUN, HAS, DONE, ENDED)) and key not in self._parsed:
                self._parsed[key] = self._read(key)
        steps = {shard.step for shard in self._of_kind(DONE)}
        steps |= {step for has in self._of_kind(HAS) for step, _, _, _ in has}
        return changed or self._data_grew(steps)

    def _data_grew(self, steps: Iterable[int]) -> bool:
        """Shards under way, of which nobody says anything yet."""
        found: set[str] = set()
        for step in steps:
            prefix = attempt_prefix(self._run, GENERATION, step)
            found.update(self._store.list(prefix))
        grew, self._data = len(found) > len(self._data), frozenset(found)
        return grew

    def _read(self, key: str) -> Any:
        """None for what can't be understood, which is refused in words."""
        body = self._store.get(key_of(self._run, key))
        try:
            return PARSERS[key[key.rindex(".") :]](json.loads(body))
        except MALFORMED as error:
            url = self._store.url_of(key_of(self._run, key))
            self._refused[key] = f"{url} is not what a keeper writes: {one_line(error)}"
            return None

    def _of_kind(self, suffix: str) -> list[Any]:
        found = (self._parsed[key] for key in sorted(self._keys) if key.endswith(suffix))
        return [value for value in found if value is not None]

    def heard(self) -> bool:
        return bool(self._keys)

    def missing(self) -> list[NodeId]:
        begun: dict[NodeId, float] = {}
        for node, at_s in self._of_kind(BEGUN):
            begun[node] = max(at_s, begun.get(node, 0.0))
        return sorted(n for n, at_s in self._expected.items() if begun.get(n, -1.0) < at_s)

    def unended(self) -> list[str]:
        begun = (key.removesuffix(BEGUN) for key in self._keys if key.endswith(BEGUN))
        return sorted(keeper for keeper in begun if keeper + ENDED not in self._keys)

    def is_best_there(self) -> bool:
        """Whether all have said what they have, and the newest step that it makes up is written."""
        telling = {key.removesuffix(HAS) for key in self._keys if key.endswith(HAS)}
        if not telling or not telling.issuperset(self.unended()):
            return False
        has: dict[tuple[int, int, str], set[str]] = defaultdict(set)
        for listed in self._of_kind(HAS):
            for step, generation, space, shard in listed:
                has[step, generation, space].add(shard)
        for (step, generation, space), shards in sorted(has.items(), reverse=True):
            if is_all(space, shards):
                names = (shard_name(step, generation, space, shard) for shard in shards)
                return all(is_done(name, self._keys) for name in names)
        return False

    def result(self) -> Gathered:
        failed = [line for lines in self._of_kind(ENDED) for line in lines]
        refused = [line for key, line in sorted(self._refused.items()) if key in self._keys]
        return Gathered(self._of_kind(DONE), [*refused, *failed], self.missing(), self.heard())


def is_all(space: str, shards: Collection[str]) -> bool:
    layout = Layout.of_shard_space(space)
    return len(shards) >= layout.world_size and layout.shards() <= set(shards)


# ------------------------------------------------------------------------------- reading


def _parse_begun(value: Any) -> tuple[NodeId, float]:
    return decoder(str)(value["node"]), decoder(float)(value["at_s"])


def _parse_has(value: Any) -> list[tuple[int, int, str, str]]:
    found: list[tuple[int, int, str, str]] = decoder(list[tuple[int, int, str, str]])(value)
    for step, generation, space, _ in found:
        _check_state(step, generation, space)
    return found


def _parse_ended(value: Any) -> list[str]:
    return list(decoder(list[str])(value["failed"]))


def _parse_done(value: Any) -> Shard:
    step, generation, space = (value[key] for key in ("step", "generation", "space"))
    _check_state(*decoder(tuple[int, int, str])([step, generation, space]))
    lines = decoder(list[RecordStep])(value["record"])
    _check_counts(*(n for line in lines for n in (line.step, line.generation, line.world_size)))
    specs = decoder(dict[str, tuple[str, tuple[int, ...]]])(value["tensors"])
    _check_counts(*(size for _, shape in specs.values() for size in shape))
    return Shard(
        step=step,
        generation=generation,
        space=space,
        entries=tuple(map(ShardEntry.from_dict, decoder(list[dict[str, Any]])(value["entries"]))),
        tensors={name: TensorSpec(*spec) for name, spec in specs.items()},
        record={line.step: line for line in lines},
    )


PARSERS = {BEGUN: _parse_begun, HAS: _parse_has, DONE: _parse_done, ENDED: _parse_ended}


def _check_state(step: int, generation: int, space: str) -> None:
    _check_counts(step, generation)
    Layout.of_shard_space(space)


def _check_counts(*numbers: int) -> None:
    if (least := min(numbers, default=0)) < 0:
        raise ValueError(f"expected a count, found {least}")


# ------------------------------------------------------------------------------ composing


def compose(
    shards: Iterable[Shard],
    job: str,
    run: str,
    recorded: int,
    terms: Terms | None = None,
    computed_by: Mapping[int, int] | None = None,
    newest: int = 0,
) -> Saved | None:
    """The newest state that the shards make up, if one is, with the steps since ``recorded``.

    All of it is what one generation computed.

    Args:
        terms: under which ``run`` trained.
        computed_by: the generations of the recorded steps; what came from others is left out.
        newest: the step of the newest checkpoint: what is not recorded up to there, is not needed.
    """
    cuts: dict[StateAt, list[Shard]] = defaultdict(list)
    for shard in shards:
        cuts[shard.step, shard.generation, shard.space].append(shard)
    records = {
        cut: {number: line for part in parts for number, line in part.record.items()}
        for cut, parts in cuts.items()
    }
    for cut, since in candidates(records, recorded, computed_by or {}, newest):
        step, _, space = cut
        recorded_at = records[cut].get(step)
        entries: dict[Any, ShardEntry] = {}
        tensors: dict[str, TensorSpec] = {}
        for part in cuts[cut]:
            tensors |= part.tensors
            for entry in part.entries:  # of replicas, one
                entries.setdefault((entry.tensor, entry.box), entry)
        manifest = Manifest(
            job=job,
            run=run,
            step=step,
            generation=GENERATION,
            nonce=uuid.uuid4().hex,
            layout=recorded_at.layout if recorded_at else str(Layout.of_shard_space(space)),
            created_at_s=time.time(),
            tensors=tensors,
            entries=tuple(entries.values()),
            extra={"terms": dict(terms or {})},
        )
        if not incomplete(manifest):
            return Saved(manifest, since)
    return None


def forget_saved(store: Store, run: str) -> None:
    """Deletes all that its keepers said; what they wrote goes with what no manifest references."""
    store.delete(f"emergency/{run}")
