"""One placement group per worker: where it runs, and that nobody else takes its resources."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from elastic_ft.core.assignment import NodeId, WorkerId
from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY

PLACE_S = 1  # for free resources to be reserved (whole seconds); a longer wait is one for capacity


@dataclass
class Placements:
    """Attributes:
    prefix: of the groups' names (``names``): they outlive who made them.
    bundle: resources of a worker.
    label_selector: of the nodes it may run on.
    workers_per_node: more than so many share a node only where no other has room.
    """

    prefix: str
    bundle: dict[str, float]
    label_selector: dict[str, str] | None
    workers_per_node: int
    _kept: list[PlacementGroup] = field(default_factory=list)  # of dead workers, for the next
    _count: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def take(
        self,
        worker: WorkerId,
        nodes: Sequence[NodeId],
        avoid: Sequence[NodeId] = (),
        at: NodeId = "",
    ) -> tuple[PlacementGroup, NodeId]:
        """Returns a group, and its node or "" if it waits for capacity.

        ``nodes``: of the other workers. One call after the other, so that they spread. ``avoid``:
        not these in any case. ``at``: there, and nowhere else.
        """
        if at:
            return await self._take_at(worker, at)
        async with self._turn:
            if self._kept:
                return self._kept.pop(), ""
            full = [n for n, count in Counter(nodes).items() if count >= self.workers_per_node]
            group = self._reserve(worker, {*full, *avoid})
            node = await _placed(group)
            if full and not node:
                remove_placement_group(group)
                group = self._reserve(worker, avoid)
                node = await _placed(group)
            return group, node

    async def _take_at(self, worker: WorkerId, node: NodeId) -> tuple[PlacementGroup, NodeId]:
        """Asks again and again: a group that is asked for while its node is being freed may be left
        pending by Ray for good, with the node free beside it."""
        while True:
            group = self._reserve(worker, (), node)
            try:
                if placed := await _placed(group):
                    return group, placed
            except BaseException:  # it is not wanted any more
                remove_placement_group(group)
                raise
            remove_placement_group(group)

    def give_back(self, group: PlacementGroup | None, *, keep: bool) -> None:
        if group is not None and keep:
            self._kept.append(group)
        elif group is not None:
            remove_placement_group(group)

    def clear(self) -> None:
        """Frees what is kept for workers to come."""
        while self._kept:
            remove_placement_group(self._kept.pop())

    def _reserve(
        self, worker: WorkerId, avoid: Collection[NodeId], at: NodeId = ""
    ) -> PlacementGroup:
        self._count += 1
        selector = dict(self.label_selector or {})
        if at:
            selector[RAY_NODE_ID_KEY] = at
        elif avoid:
            selector[RAY_NODE_ID_KEY] = f"!in({','.join(sorted(avoid))})"
        return placement_group(
            [self.bundle],
            name=f"{self.prefix}{worker}.{self._count}",
            lifetime="detached",
            bundle_label_selector=[selector] if selector else None,
        )


async def _placed(group: PlacementGroup) -> NodeId:
    """Waits a moment for the group to be placed. Returns where, or "" if it is not."""

    def look() -> NodeId:
        return node_of(group) if group.wait(PLACE_S) else ""

    return await asyncio.get_running_loop().run_in_executor(None, look)


def node_of(group: PlacementGroup) -> NodeId:
    """Returns where the group is placed now, or "". Blocks while the GCS is away."""
    entry = placement_group_table(group)
    return str(entry["bundles_to_node_id"][0]) if entry.get("state") == "CREATED" else ""
