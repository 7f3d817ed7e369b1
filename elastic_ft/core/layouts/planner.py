"""Which layout, micro-batch and recomputation a job should have on given devices. Pure.

``plans`` ranks every choice that fits by ``core.costs``; ``best`` is the first of them. Each plan
says in words why it is what it is. The search is exact up to 64 devices; above that it tries the
numbers of stages, shards and replicas that can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from math import ceil, gcd

from elastic_ft.core.layouts.costs import (
    Choice,
    Devices,
    Interconnect,
    Memory,
    ModelShape,
    Schedule,
    StepTime,
    Work,
    memory,
    step_time,
)
from elastic_ft.core.layouts.layout import Layout, LayoutWish, divisors
from elastic_ft.core.layouts.moved import Previous, bytes_moved

NEAR = 1.03  # times the fastest: as good as it
EXACT_DEVICES = 64  # up to here every number of stages and replicas is tried
CHUNKS: dict[Schedule, int] = {"interleaved1f1b": 2, "zero_bubble": 2}  # of layers per rank
NEAR_MAX = 32  # near-equal layouts whose bytes moved are counted
PRUNE = 1.15  # times the fastest so far: not worth ranking


class NoLayout(ValueError):
    """Nothing fits. The message says what the least need is, and what there is."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What may be chosen."""

    micro_batches: tuple[int, ...] = ()  # sizes in samples; none: what divides the global batch
    recompute: tuple[bool, ...] = (False, True)
    schedules: tuple[Schedule, ...] = ("1f1b",)
    tp_max: int | None = None
    pp_max: int | None = None
    tp_sizes: tuple[int, ...] = ()  # that the engine can do; none: what divides the model
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
        """Whether tensor-parallel peers share a node."""
        return all(count % self.layout.tp == 0 for count in self.used)

    @property
    def idle(self) -> tuple[int, ...]:
        """Devices on each node that have no rank."""
        return tuple(n - u for n, u in zip(self.nodes, self.used, strict=True))

    @property
    def devices(self) -> tuple[int, ...]:
        """The device of each rank."""
        firsts = accumulate(self.nodes, initial=0)
        return tuple(f + i for f, used in zip(firsts, self.used, strict=False) for i in range(used))


def best(
    work: Work,
    devices: Devices,
    limits: Limits | None = None,
    previous: Previous | None = None,
) -> LayoutPlan:
    """Returns the plan to take. Raises NoLayout."""
    return plans(work, devices, limits, previous, top=1)[0]


def plans(
    work: Work,
    devices: Devices,
    limits: Limits | None = None,
    previous: Previous | None = None,
    top: int = 10,
) -> tuple[LayoutPlan, ...]:
    """Returns at most ``top`` plans of different layouts, the one to take first.

    The fastest wins. Those within 3 % of it are as good, and are ordered by: tensor parallelism
    inside a node, fewest bytes moved from ``previous``, most replicas of the state (what is left
    of a loss), fewest ranks to a copy of the model, time. Raises NoLayout if nothing fits.
    """
    if previous is not None and len(previous.ranks) != devices.count:
        raise ValueError(f"{len(previous.ranks)} previous ranks for {devices.count} devices")
    search = _Search(work, devices, limits or Limits())
    search.run()
    if not search.found:
        raise NoLayout(search.refusal())
    ordered = sorted(search.found.values(), key=lambda plan: plan.time.total)
    fastest = ordered[0]
    near = [plan for plan in ordered if plan.time.total <= NEAR * fastest.time.total][:NEAR_MAX]
    if previous is not None:
        near = [
            replace(p, bytes_moved=bytes_moved(work, p.layout, p.devices, previous)) for p in near
        ]
    near.sort(key=_preference)
    ranked = (near + ordered[len(near) :])[:top]
    fastest = next(plan for plan in near if plan.choice == fastest.choice)
    first = replace(ranked[0], why=tuple(_why(ranked[0], fastest, search)))
    return (first, *(replace(p, why=(_compared(p, first),)) for p in ranked[1:]))


def _preference(plan: LayoutPlan) -> tuple[bool, int, int, int, float, str]:
    layout, moved = plan.layout, plan.bytes_moved or 0
    parts = layout.pp * layout.tp
    return not plan.tp_inside, moved, -layout.dp_replicate, parts, plan.time.total, str(layout)


# --------------------------------------------------------------------------------- search


_Placed = tuple[tuple[int, ...], Interconnect]  # devices used on each node, and what joins them


@dataclass(slots=True)
class _Search:
    work: Work
    devices: Devices
    limits: Limits
    found: dict[Layout, LayoutPlan] = field(default_factory=dict)  # the fastest of each layout
    fastest_s: float = float("inf")
    least: tuple[float, Choice] | None = None  # bytes: the smallest need of all
    placed: dict[tuple[int, int], _Placed] = field(default_factory=dict)  # by tp and world
    without: dict[str, tuple[float, float]] = field(default_factory=dict)  # see _note

    @property
    def exact(self) -> bool:
        return self.devices.count <= EXACT_DEVICES

    def run(self) -> None:
        for tp in reversed(tensor_sizes(self.work.model, self.devices, self.limits)):
            seats = seats_on_nodes(self.devices.nodes, tp)
            groups = sum(seats) // tp
            for pp in self._stages(groups):
                for dp, micro_batch in self._replicas(groups // pp):
                    self._try_shards(pp, tp, dp, micro_batch, seats)

    def _try_shards(
        self, pp: int, tp: int, dp: int, micro_batch: int, seats: tuple[int, ...]
    ) -> None:
        world = pp * tp * dp
        if world < self.limits.world_min or world % self.limits.multiple_of:
            return
        # The busiest rank's share, at full speed: no choice of what is left can be faster.
        rounds = ceil(self.work.global_batch / micro_batch / dp)
        share = micro_batch * self.work.model.sample_flops / (pp * tp)
        least_s = rounds * share / self.devices.flops_per_s
        if least_s > PRUNE * self.fastest_s:
            return
        placed = self._place(seats, tp, world)
        shards = divisors(dp)
        if not self.exact:
            shards = tuple(n for n in shards if n & (n - 1) == 0 or n == dp)
            if not self._may_fit(Layout(dp_shard=dp, pp=pp, tp=tp), micro_batch):
                return
        for shard in shards:
            layout = Layout(dp_replicate=dp // shard, dp_shard=shard, pp=pp, tp=tp)
            for schedule, chunks in self._schedules(pp):
                for recompute in sorted(self.limits.recompute):
                    if recompute and least_s * 4 / 3 > PRUNE * self.fastest_s and not self.exact:
                        continue
                    choice = Choice(layout, micro_batch, recompute, schedule, chunks)
                    if self._try(choice, placed):
                        break  # recomputing what fits is never faster

    def _may_fit(self, layout: Layout, micro_batch: int) -> bool:
        """Whether the most frugal choice does: all sharded, all recomputed that may be."""
        for schedule, chunks in self._schedules(layout.pp):
            choice = Choice(layout, micro_batch, max(self.limits.recompute), schedule, chunks)
            need = memory(self.work, choice, self.devices.fused).total
            if need <= self.devices.usable_bytes:
                return True
            self._note(choice, need, float("inf"))
        return False

    def _place(self, seats: tuple[int, ...], tp: int, world: int) -> _Placed:
        key = tp, world
        if key not in self.placed:
            used = fill(seats, world)
            self.placed[key] = used, Interconnect.of(self.devices, used)
        return self.placed[key]

    def _try(self, choice: Choice, placed: _Placed) -> bool:
        """Whether it fits; keeps it if it is the fastest of its layout."""
        need = memory(self.work, choice, self.devices.fused)
        if need.total > self.devices.usable_bytes:
            self._note(choice, need.total, float("inf"))
            return False
        used, links = placed
        time = step_time(self.work, choice, links)
        self._note(choice, need.total, time.total)
        self.fastest_s = min(self.fastest_s, time.total)
        known = self.found.get(choice.layout)
        if known is None or time.total < known.time.total:
            self.found[choice.layout] = LayoutPlan(choice, need, time, used, self.devices.nodes)
        return True

    def _note(self, choice: Choice, nbytes: float, time_s: float) -> None:
        """The least need and the best time without each feature: what makes it worth having."""
        if self.least is None or nbytes < self.least[0]:
            self.least = nbytes, choice
        for feature, has in _features(choice):
            if not has:
                known = self.without.get(feature, (float("inf"), float("inf")))
                self.without[feature] = min(known[0], nbytes), min(known[1], time_s)

    def _stages(self, groups: int) -> list[int]:
        most = min(groups, self.work.model.layers, self.limits.pp_max or groups)
        if self.exact:
            return list(range(1, most + 1))
        layers = self.work.model.layers
        fewest = {ceil(layers / each) for each in range(1, layers + 1)}
        return [pp for pp in range(1, most + 1) if pp in fewest or groups % pp == 0]

    def _replicas(self, most: int) -> Iterator[tuple[int, int]]:
        """(data-parallel size, micro-batch size), the largest first."""
        batch = self.work.global_batch
        sizes = self.limits.micro_batches or micro_batch_sizes(batch, self.exact)
        for micro_batch in sizes:
            count = batch // micro_batch
            top = min(most, count)
            for dp in _counts(top, count, self.exact):
                yield dp, micro_batch

    def _schedules(self, pp: int) -> Iterator[tuple[Schedule, int]]:
        if pp == 1:
            yield self.limits.schedules[0], 1
            return
        for schedule in self.limits.schedules:
            chunks = CHUNKS.get(schedule, 1)
            if pp * chunks <= self.work.model.layers:
                yield schedule, chunks

    def refusal(self) -> str:
        count, there = self.devices.count, self.devices.usable_bytes
        limits = self.limits
        if self.least is None and (limits.world_min > 1 or limits.multiple_of > 1):
            return (
                f"no layout of at least {limits.world_min} of {count} devices"
                + f", in multiples of {limits.multiple_of}" * (limits.multiple_of > 1)
            )
        if self.least is None:
            return (
                f"no layout: global batch {self.work.global_batch} makes no micro-batch of "
                f"{self.limits.micro_batches} samples"
            )
        need, choice = self.least
        return (
            f"nothing fits on {count} devices: the least need is {gb(need)} per device "
            f"({describe(choice)}), there are {gb(there)} beside what is reserved"
        )


def allowed(model: ModelShape, most: int, can: Callable[[LayoutWish], bool]) -> Limits:
    """What the engine can do on up to ``most`` ranks. ``can``: whether it lays the model out so."""
    return Limits(
        tp_sizes=tuple(tp for tp in divisors(model.heads) if can(LayoutWish(tp=tp))),
        pp_max=max(pp for pp in range(1, most + 1) if can(LayoutWish(pp=pp))),
    )


def tensor_sizes(model: ModelShape, devices: Devices, limits: Limits) -> list[int]:
    """Those that divide heads, key-value heads and the feed-forward width, and have devices."""
    common = gcd(model.heads, model.kv_heads, model.ffn_dim)
    most = min(devices.count, limits.tp_max or devices.count)
    allowed = limits.tp_sizes or divisors(common)
    return [tp for tp in divisors(common) if tp <= most and tp in allowed]


def seats_on_nodes(nodes: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Devices of each node that tensor-parallel groups of ``tp`` can take.

    A group stays within a node if any node has room for one, else groups span whole nodes.
    """
    if tp <= max(nodes):
        return tuple(count // tp * tp for count in nodes)
    return fill(nodes, sum(nodes) // tp * tp)


def fill(seats: tuple[int, ...], world: int) -> tuple[int, ...]:
    """``world`` ranks on nodes in order, each full before the next."""
    before = accumulate(seats, initial=0)
    return tuple(max(0, min(n, world - b)) for n, b in zip(seats, before, strict=False))


@lru_cache(maxsize=256)
def micro_batch_sizes(batch: int, exact: bool = True) -> tuple[int, ...]:
    """Divisors of the global batch, up to 32 samples; not exact: powers of two among them."""
    small = tuple(size for size in divisors(batch) if size <= 32)
    return small if exact else tuple(size for size in small if size & (size - 1) == 0)


@lru_cache(maxsize=4096)
def _counts(most: int, micro_batches: int, exact: bool) -> tuple[int, ...]:
    """Numbers of replicas to try, the largest first.

    Not exact: the most there can be, rounded down to what shards well, and the fewest that take
    as many rounds of micro-batches.
    """
    if most < 1:
        return ()
    if exact:
        return tuple(range(most, 0, -1))
    counts = {most} | {most // step * step for step in (2, 4, 8, 16, 32, 64) if most >= step}
    rounds = ceil(micro_batches / most)
    counts |= {ceil(micro_batches / r) for r in range(rounds, rounds + 4)}
    return tuple(sorted((n for n in counts if 1 <= n <= most), reverse=True))


# ---------------------------------------------------------------------------------- words


def gb(nbytes: float) -> str:
    """In 10^9 bytes; small amounts in 10^6."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def describe(choice: Choice) -> str:
    """A choice in a line."""
    schedule = f", {choice.schedule}" if choice.layout.pp > 1 else ""
    chunks = f" of {choice.chunks} chunks" if choice.chunks > 1 else ""
    again = ", recomputing" if choice.recompute else ""
    return f"{choice.layout}, micro-batch {choice.micro_batch}{schedule}{chunks}{again}"


def _features(choice: Choice) -> tuple[tuple[str, bool], ...]:
    layout = choice.layout
    return (
        ("pipeline stages", layout.pp > 1),
        ("tensor parallelism", layout.tp > 1),
        ("sharding", layout.dp_shard > 1),
        ("recomputation", choice.recompute),
    )


def _why(plan: LayoutPlan, fastest: LayoutPlan, search: _Search) -> Iterator[str]:
    """Sentences: fit, each feature against doing without it, tie-break, who is idle."""
    there = search.devices.usable_bytes
    yield f"fits: {gb(plan.memory.total)} of {gb(there)} on the fullest device"
    for feature, has in _features(plan.choice):
        if has:
            yield f"{feature}: {_loss_without(feature, plan, search)}"
    if plan.layout.tp > 1:
        where = "inside a node" if plan.tp_inside else "across nodes: no node has room for a group"
        yield f"tensor-parallel peers are {where}"
    if plan.choice != fastest.choice:
        slower = plan.time.total / fastest.time.total - 1
        yield (
            f"{slower:.1%} slower than {describe(fastest.choice)}, which is as good, "
            + _preferred(plan, fastest)
        )
    work, dp = search.work, plan.layout.data_parallel_size
    count = work.global_batch // plan.choice.micro_batch
    if count % dp:
        yield (
            f"{count} micro-batches over {dp} replicas are uneven: the busiest has "
            f"{plan.choice.micro_batches(work)}"
        )
    yield from _idle(plan)


def _loss_without(feature: str, plan: LayoutPlan, search: _Search) -> str:
    need, time_s = search.without.get(feature, (float("inf"), float("inf")))
    if time_s < float("inf"):
        ratio = time_s / plan.time.total - 1
        return f"without it {abs(ratio):.0%} {'slower' if ratio >= 0 else 'faster'}"
    if need < float("inf"):
        return f"without it nothing fits, the least need is {gb(need)}"
    return "nothing else was allowed"


def _preferred(plan: LayoutPlan, fastest: LayoutPlan) -> str:
    if plan.tp_inside and not fastest.tp_inside:
        return "and keeps tensor parallelism inside a node"
    if plan.bytes_moved != fastest.bytes_moved:
        return f"and moves {gb(plan.bytes_moved or 0)} instead of {gb(fastest.bytes_moved or 0)}"
    layout, other = plan.layout, fastest.layout
    if layout.dp_replicate != other.dp_replicate:
        return f"and has {layout.dp_replicate} replicas of the state, not {other.dp_replicate}"
    return "and shares each copy of the model among fewer ranks"


def _idle(plan: LayoutPlan) -> Iterator[str]:
    """Which devices have no rank, and why."""
    if not any(plan.idle):
        return
    total, tp = sum(plan.nodes), plan.layout.tp
    where = ", ".join(f"{n} on node {i}" for i, n in enumerate(plan.idle) if n)
    yield f"{sum(plan.idle)} of {total} devices idle: {where}"
    seats = seats_on_nodes(plan.nodes, tp)
    if seats != plan.nodes:
        yield f"a node's devices beyond a multiple of {tp} have no tensor-parallel group"
    spare, copy = sum(seats) - plan.layout.world_size, plan.layout.pp * tp
    if 0 < spare < copy:
        yield f"{spare} are too few for another replica, which takes {copy}"
    elif spare:
        yield f"{spare} would not make a step faster: it would have as many micro-batches in a row"


def _compared(plan: LayoutPlan, first: LayoutPlan) -> str:
    ratio = plan.time.total / first.time.total - 1
    return f"{abs(ratio):.1%} {'slower' if ratio >= 0 else 'faster'} than {first.layout}"
