"""A plan of a layout: what was chosen, and at which costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import Memory
from elastic_ft.core.layouts.time_costs import StepTime
from elastic_ft.core.layouts.work import Choice


class NoLayout(ValueError):
    """Nothing fits. The message says what the least need is, and what there is."""


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A choice, its costs, and why. Devices are numbered node by node."""

    choice: Choice
    memory: Memory  # of the fullest rank
    time: StepTime
    used: tuple[int, ...]  # devices on each node; the first ones of each
    nodes: tuple[int, ...]  # all devices on each node
    host_bytes: float = 0.0  # of the node's memory, for an offloaded optimizer; of the fullest rank
    bytes_moved: int | None = None  # from the previous layout
    why: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.choice.layout

    @property
    def peers_inside(self) -> bool:
        """Whether tensor-, context- and expert-parallel peers share a node."""
        return all(count % self.layout.ranks_together == 0 for count in self.used)

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices on each node that have no rank."""
        return tuple(n - u for n, u in zip(self.nodes, self.used, strict=True))

    @property
    def devices(self) -> tuple[int, ...]:
        firsts = accumulate(self.nodes, initial=0)
        return tuple(f + i for f, used in zip(firsts, self.used, strict=False) for i in range(used))


def seats_on_nodes(nodes: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Devices of each node that groups of ``group`` which talk within each layer can take.

    A group stays within a node if any node has room for one, else groups span whole nodes.
    """
    if group <= max(nodes):
        return tuple(count // group * group for count in nodes)
    return fill(nodes, sum(nodes) // group * group)


def fill(seats: tuple[int, ...], world: int) -> tuple[int, ...]:
    """``world`` ranks on nodes in order, each full before the next."""
    before = accumulate(seats, initial=0)
    return tuple(max(0, min(n, world - b)) for n, b in zip(seats, before, strict=False))
