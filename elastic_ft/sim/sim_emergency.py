"""The last resort, simulated: keepers save as their controller is gone, the next one publishes."""

from __future__ import annotations

from collections import defaultdict
from typing import Protocol

from elastic_ft.core.commands import RecordStep
from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.rescuing import StateAt, candidates
from elastic_ft.sim import checks
from elastic_ft.sim.kernel import Clock
from elastic_ft.sim.nodes import SimCheckpoint, SimSavedShard
from elastic_ft.sim.sim_keeper import SimNode

POLL_S = 0.5
SAVED_WITHIN_S = 4.0  # by a keeper; some take longer than anybody waits
PATIENCE_S = 5.0


class BetweenControllers(Clock, checks.Truth, Protocol):
    controller: int
    rescued: list[int]

    def take_over(self) -> None: ...
    def start_controller(self) -> None: ...
    def note(self, what: str) -> None: ...


class Emergency:
    """Between two controllers. The protocol of ``keeper.emergency`` is left out: a keeper's
    shards are there all at once, late, or never; what is made of them is the real rule."""

    def __init__(self, world: BetweenControllers) -> None:
        self.world = world
        self._writing: set[str] = set()
        self._saved: list[SimSavedShard] = []
        self._began_s = world.now_s

    def save(self, node: SimNode) -> None:
        """By its keeper, if that can, and the store can be reached."""
        keeper = node.keeper
        if keeper is None or not keeper.answers() or not node.up:
            return
        shards, world = keeper.saves(), self.world
        self._writing.add(node.id)

        def done() -> None:
            self._writing.discard(node.id)
            if node.up and not node.cut and not world.store.down:
                self._saved += shards

        world.after(world.rng.uniform(0.1, 1.5 * SAVED_WITHIN_S), done)

    def end(self) -> None:
        """The next controller starts: it waits for them, not for ever, and goes on from there."""
        world = self.world
        waits = self._writing and world.now_s < self._began_s + PATIENCE_S
        if waits or world.store.down:
            world.after(POLL_S, self.end)
            return
        world.take_over()
        self._publish()
        world.start_controller()

    def _publish(self) -> None:
        world = self.world
        parts: dict[StateAt, list[SimSavedShard]] = defaultdict(list)
        records: dict[StateAt, dict[int, RecordStep]] = defaultdict(dict)
        for shard in self._saved:
            step, generation, space, _ = shard.key
            parts[step, generation, space].append(shard)
            records[step, generation, space].update(shard.record)
        newest = max((c.step for c in world.store.good()), default=0)
        found = candidates(records, len(world.recorded), dict(world.recorded), newest)
        whole = (
            (cut, since) for cut, since in found if cut[0] > newest and is_one_state(parts[cut])
        )
        cut, since = next(whole, (None, ()))
        checks.nothing_saved_is_newer(world, self._saved, cut[0] if cut else newest)
        if cut is None:
            return
        lineage = checks.rescued(world, cut[0], parts[cut], since)
        world.recorded += [(line.step, line.generation) for line in since]
        url = f"mem://{cut[0]}-rescued-{world.controller}"
        world.store.published.append(SimCheckpoint(cut[0], url, lineage, world.controller))
        world.rescued.append(cut[0])
        world.note(f"rescued step {cut[0]}")


def is_one_state(shards: list[SimSavedShard]) -> bool:
    _, _, space, _ = shards[0].key
    return Layout.of_shard_space(space).shards() <= {shard.key[3] for shard in shards}
