"""A plan of a layout: what may be chosen, what was, and at which costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from elastic_ft.core.layouts.layout import Layout
from elastic_ft.core.layouts.memory_costs import Memory
from elastic_ft.core.layouts.time_costs import StepTime
from elastic_ft.core.layouts.work import RECOMPUTES, Choice, Devices, Recompute, Schedule, Work


class NoLayout(ValueError):
    """Nothing fits. The message says what the least need is, and what there is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be chosen."""

    micro_batches: tuple[int, ...] = ()  # sizes in samples; none: what divides the global batch
    recompute: tuple[Recompute, ...] = RECOMPUTES
    schedules: tuple[Schedule, ...] = ("1f1b",)
    tp_max: int | None = None
    pp_max: int | None = None
    tp_sizes: tuple[int, ...] = ()  # that the engine can do; none: what divides the model
    cp_sizes: tuple[int, ...] = (1,)
    world_min: int = 1
    multiple_of: int = 1  # of the world


@dataclass(frozen=True, slots=True)
class Planning:
    """What a running job's layouts are planned by.

    Attributes:
        devices: what each is like; on which nodes they are is known when a world is formed.
        memory_bytes: of each; None: as the workers say.
    """

    work: Work
    devices: Devices
    limits: Limits
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """A choice, its costs, and why. Devices are numbered node by node."""

    choice: Choice
    memory: Memory  # of the fullest rank
    time: StepTime
    used: tuple[int, ...]  # devices on each node; the first ones of each
    nodes: tuple[int, ...]  # all devices on each node
    bytes_moved: int | None = None  # from the previous layout
    why: tuple[str, ...] = ()

    @property
    def layout(self) -> Layout:
        return self.choice.layout

    @property
    def tp_inside(self) -> bool:
        """Whether tensor- and context-parallel peers share a node."""
        return all(count % self.layout.ranks_per_layer == 0 for count in self.used)

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices on each node that have no rank."""
        return tuple(n - u for n, u in zip(self.nodes, self.used, strict=True))

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each rank."""
        firsts = accumulate(self.nodes, initial=0)
        return tuple(f + i for f, used in zip(firsts, self.used, strict=False) for i in range(used))


def seats_on_nodes(nodes: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Devices of each node that groups of ``tp`` which talk within each layer can take.

    A group stays within a node if any node has room for one, else groups span whole nodes.
    """
    if tp <= max(nodes):
        return tuple(count // tp * tp for count in nodes)
    return fill(nodes, sum(nodes) // tp * tp)


def fill(seats: tuple[int, ...], world: int) -> tuple[int, ...]:
    """``world`` ranks on nodes in order, each full before the next."""
    before = accumulate(seats, initial=0)
    return tuple(max(0, min(n, world - b)) for n, b in zip(seats, before, strict=False))
