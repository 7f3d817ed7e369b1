"""Which nodes: free slots, and how workers are put there. Pure arithmetic on a scratch pad."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from elastic_ft.core.sharing.asks import Places
from elastic_ft.core.sharing.ledger import SharedJob, removed


class Rooms:
    """Free slots by node, of nodes that may be used. Changed as workers are placed."""

    def __init__(self, nodes: Mapping[str, int], jobs: Iterable[SharedJob]) -> None:
        self.slots = dict(nodes)
        self.free = dict(nodes)
        for job in jobs:
            for node, workers in job.held:
                if node in self.free:
                    self.free[node] -= workers * job.slots

    @property
    def free_slots(self) -> int:
        return sum(free for free in self.free.values() if free > 0)

    def place(self, job: SharedJob, workers: int, avoid: Collection[str] = ()) -> Places:
        """Puts up to ``workers`` somewhere: where it is already, then where least is left over."""
        own = {node for node, _ in job.held}
        open_nodes = [
            node for node, free in self.free.items() if free >= job.slots and node not in avoid
        ]
        open_nodes.sort(key=lambda node: (node not in own, self.free[node], node))
        placed, left = [], workers
        for node in open_nodes:
            if left == 0:
                break
            here = min(left, self.free[node] // job.slots)
            placed.append((node, here))
            left -= here
        for node, here in placed:
            self.free[node] -= here * job.slots
        return tuple(sorted(placed))

    def take_back(self, job: SharedJob, places: Places) -> None:
        for node, workers in places:
            self.free[node] += workers * job.slots

    def place_all(self, job: SharedJob, workers: int, avoid: Collection[str] = ()) -> Places:
        """All of them, or none."""
        placed = self.place(job, workers, avoid)
        if sum(n for _, n in placed) < workers:
            self.take_back(job, placed)
            return ()
        return placed

    def leave(self, job: SharedJob, workers: int) -> Places:
        """From where so many workers go: so that whole nodes become free, if they can."""
        order = sorted(
            removed(job.held, job.leaving),
            key=lambda place: (place[1], -self.free.get(place[0], 0), place[0]),
        )
        gone, left = [], workers
        for node, here in order:
            if left == 0:
                break
            less = min(left, here)
            gone.append((node, less))
            left -= less
        return tuple(sorted(gone))

    def holds_ever(self, slots_per_worker: int) -> int:
        """Workers of that size for which there is room if nobody else has any."""
        return sum(slots // slots_per_worker for slots in self.slots.values())
