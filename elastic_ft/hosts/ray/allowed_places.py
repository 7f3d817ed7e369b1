"""Where a job's workers may be, once somebody who shares the cluster out has said so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from elastic_ft.core.assignment import NodeId


class Seated(Protocol):
    """A worker. ``node``: where it is; "": it waits. ``destined``: where it is to be."""

    node: NodeId
    destined: NodeId


@dataclass
class AllowedPlaces:
    """``by_node``: so many workers on each; {}: anywhere."""

    by_node: dict[NodeId, int] = field(default_factory=dict)

    def free(self, workers: Iterable[Seated]) -> NodeId | None:
        """The node for another one; "": any; None: there is no place for it."""
        if not self.by_node:
            return ""
        taken = Counter(worker.node or worker.destined for worker in workers)
        return next((node for node, here in self.by_node.items() if taken[node] < here), None)

    def beyond(self, workers: Iterable[Seated]) -> list[Seated]:
        """Those who wait for a place that is not theirs any more."""
        left, out = dict(self.by_node), []
        for worker in sorted(workers, key=lambda worker: not worker.node):
            node = worker.node or worker.destined
            left[node] = left.get(node, 0) - 1
            if left[node] < 0 and not worker.node:
                out.append(worker)
        return out
