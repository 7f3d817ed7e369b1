"""Which layout, micro-batch and recomputation a job should have on given devices. Pure.

``plans`` ranks every choice that fits by its costs; ``best`` is the first of them. Each plan
says in words why it is what it is. The search is exact up to 64 devices; above that it tries the
numbers of stages, shards and replicas that can matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import combinations, product
from math import ceil, gcd
from typing import Any

from elastic_ft.core.layouts.layout import WISHES, Layout, LayoutWish, divisors
from elastic_ft.core.layouts.layout_plan import LayoutPlan, NoLayout, fill, seats_on_nodes
from elastic_ft.core.layouts.memory_costs import host_bytes, memory
from elastic_ft.core.layouts.moved import Previous, bytes_moved
from elastic_ft.core.layouts.plan_words import Without, compared, describe, features, gb, why
from elastic_ft.core.layouts.time_costs import AGAIN, Interconnect, step_time
from elastic_ft.core.layouts.work import (
    RECOMPUTES,
    Choice,
    Devices,
    ModelShape,
    Recompute,
    Schedule,
    Work,
)

NEAR = 1.03  # times the fastest: as good as it
EXACT_DEVICES = 64  # up to here every number of stages and replicas is tried
CHUNKS: dict[Schedule, int] = {"interleaved1f1b": 2, "zero_bubble": 2}  # of layers per rank
NEAR_MAX = 32  # near-equal layouts whose bytes moved are counted
CONTEXT_TOKENS_MIN = 4096
CONTEXTS_ALL = 8  # up to here ranks of any number share positions: what a loss leaves
PRUNE = 1.15  # times the fastest so far: not worth ranking


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
    ep_max: int = 1
    apart: tuple[tuple[str, str], ...] = (("tp", "ep"), ("pp", "ep"))  # of WISHES: not together
    world_min: int = 1
    multiple_of: int = 1  # of the world
    may_offload: bool = False  # the job's file might put its optimizer in host memory

    @property
    def shared(self) -> tuple[str, ...]:
        """What ranks may share, of ``WISHES``, where an engine was asked."""
        most = {"tp": max(self.tp_sizes, default=1), "pp": self.pp_max or 1}
        most |= {"cp": max(self.cp_sizes), "ep": self.ep_max}
        return tuple(name for name in WISHES if most[name] > 1)


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


def best(
    work: Work, devices: Devices, limits: Limits | None = None, previous: Previous | None = None
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
        raise NoLayout(search.refusal() + _with_offload(work, devices, search.limits))
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
    there = devices.usable_bytes, search.without, search.limits.multiple_of
    explained = why(ranked[0], fastest, work, *there)
    first = replace(ranked[0], why=tuple(explained))
    return (first, *(replace(p, why=(compared(p, first),)) for p in ranked[1:]))


def _with_offload(work: Work, devices: Devices, limits: Limits) -> str:
    """What to say of a job that would fit with its optimizer in host memory. It is the user's to
    ask for: how much of that there is beside snapshots nobody here knows."""
    if not limits.may_offload or work.offloads_optimizer:
        return ""
    search = _Search(replace(work, offloads_optimizer=True), devices, limits)
    search.run()
    if not search.found:
        return ""
    plan = min(search.found.values(), key=lambda plan: plan.time.total)
    return (
        f"; with optimizer.offload: cpu {describe(plan.choice)} fits and takes "
        f"{gb(plan.host_bytes)} of host memory a device"
    )


def _preference(plan: LayoutPlan) -> tuple[bool, int, int, int, float, str]:
    layout, moved = plan.layout, plan.bytes_moved or 0
    parts = layout.pp * layout.tp * layout.cp
    return not plan.peers_inside, moved, -layout.dp_replicate, parts, plan.time.total, str(layout)


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
    without: dict[str, Without] = field(default_factory=dict)  # see _note

    @property
    def exact(self) -> bool:
        return self.devices.count <= EXACT_DEVICES

    def run(self) -> None:
        for tp in reversed(tensor_sizes(self.work.model, self.devices, self.limits)):
            may = partial(self.work.may_share_positions, tp)
            for cp in filter(may, self.limits.cp_sizes):
                seats = seats_on_nodes(self.devices.nodes, tp * cp)
                groups = sum(seats) // (tp * cp)
                for pp in self._stages(groups, tp, cp):
                    for dp, micro_batch in self._replicas(groups // pp):
                        self._try_shards(
                            Layout(dp_shard=dp, pp=pp, tp=tp, cp=cp), micro_batch, seats
                        )

    def _try_shards(self, sharded: Layout, micro_batch: int, seats: tuple[int, ...]) -> None:
        """All ways to replicate what ``sharded`` shards over all its data ranks."""
        world, dp, pp = sharded.world_size, sharded.dp_shard, sharded.pp
        if world < self.limits.world_min or world % self.limits.multiple_of:
            return
        # The busiest rank's share, at full speed: no choice of what is left can be faster.
        rounds = ceil(self.work.global_batch / micro_batch / dp)
        share = micro_batch * self.work.model.sample_flops / (world // dp)
        least_s = rounds * share / self.devices.flops_per_s
        if least_s > PRUNE * self.fastest_s:
            self._leave(Choice(replace(sharded, dp_replicate=dp, dp_shard=1), micro_batch), least_s)
            return
        placed = self._place(seats, world // dp // pp, world)
        shards = divisors(dp)
        if not self.exact:
            shards = tuple(n for n in shards if n & (n - 1) == 0 or n == dp)
            if not self._may_fit(sharded, micro_batch):
                return
        replicated = (replace(sharded, dp_replicate=dp // n, dp_shard=n) for n in shards)
        layouts = (
            replace(layout, ep=ep) for layout in replicated for ep in self._sharing_experts(layout)
        )
        for layout in layouts:
            for schedule, chunks in self._schedules(pp):
                for recompute in sorted(self.limits.recompute, key=RECOMPUTES.index):
                    choice = Choice(layout, micro_batch, recompute, schedule, chunks)
                    again_s = least_s * (1 + AGAIN[recompute] / 3)
                    if recompute and again_s > PRUNE * self.fastest_s and not self.exact:
                        self._leave(choice, least_s)
                        continue
                    if self._try(choice, placed):
                        break  # recomputing what fits is never faster

    def _sharing_experts(self, layout: Layout) -> tuple[int, ...]:
        """By how many of its shards the experts may be shared out. Of strategy ddp they are not."""
        most = min(self.limits.ep_max, self.work.model.experts)
        if layout.dp_shard < layout.data_parallel_size == layout.dp_replicate:
            return (1,)
        among = (ep for ep in divisors(layout.state_shards) if ep == 1 or ep <= most)
        return tuple(ep for ep in among if self._may(tp=layout.tp, pp=layout.pp, ep=ep))

    def _may(self, **sizes: int) -> bool:
        """Whether ranks may share all of it."""
        shared = [name for name in WISHES if sizes.get(name, 1) > 1]
        return not any(pair in self.limits.apart for pair in combinations(shared, 2))

    def _may_fit(self, layout: Layout, micro_batch: int) -> bool:
        """Whether the most frugal choice does: all sharded, all recomputed that may be."""
        ways = self._sharing_experts(layout)
        # What is sent to experts may take more than all of them, gathered.
        ends = sorted({ways[0], ways[-1]})
        for ep, (schedule, chunks) in product(ends, self._schedules(layout.pp)):
            frugal = max(self.limits.recompute, key=RECOMPUTES.index)
            choice = Choice(replace(layout, ep=ep), micro_batch, frugal, schedule, chunks)
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
        twice = choice.layout.has_stages and choice.schedule == "zero_bubble"
        if twice and choice.recompute == "selective":  # which is differentiated once
            return False
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
            nodes, host = self.devices.nodes, host_bytes(self.work, choice)
            self.found[choice.layout] = LayoutPlan(choice, need, time, used, nodes, host)
        return True

    def _note(self, choice: Choice, nbytes: float, time_s: float) -> None:
        """The least need and the best time without each feature: what makes it worth having."""
        if self.least is None or nbytes < self.least[0]:
            self.least = nbytes, choice
        for feature, has in features(choice).items():
            if not has:
                known = self.without.get(feature, Without())
                best_s = min(known.time_s, time_s)
                nbytes = min(known.nbytes, nbytes)
                self.without[feature] = known._replace(nbytes=nbytes, time_s=best_s)

    def _leave(self, choice: Choice, least_s: float) -> None:
        """Not tried, as it can't be faster than ``least_s``: which says something of doing without
        what it has not."""
        for feature in (feature for feature, has in features(choice).items() if not has):
            known = self.without.get(feature, Without())
            self.without[feature] = known._replace(untried_s=min(known.untried_s, least_s))

    def _stages(self, groups: int, tp: int, cp: int) -> list[int]:
        most = min(groups, self.work.model.layers, self.limits.pp_max or groups)
        if not self._may(tp=tp, cp=cp):
            return []
        if not self._may(tp=tp, cp=cp, pp=2):
            return [1] if groups else []
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
    """What the engine can do on up to ``most`` ranks. ``can``: whether it lays the model out so.

    Positions are shared only as long as each rank has CONTEXT_TOKENS_MIN of them: with fewer there
    is nothing to gain.
    """
    most_cp = min(most, max(1, model.sequence_length // CONTEXT_TOKENS_MIN))
    contexts = (cp for cp in range(1, most_cp + 1) if cp <= CONTEXTS_ALL or cp & (cp - 1) == 0)
    most_ep = max(1, min(most, model.experts))
    stages = range(min(most, model.layers), 0, -1)
    sizes = {
        "tp": [tp for tp in divisors(model.heads) if tp == 1 or can(LayoutWish(tp=tp))],
        "pp": [next(pp for pp in stages if pp == 1 or can(LayoutWish(pp=pp)))],
        "cp": [cp for cp in contexts if cp == 1 or can(LayoutWish(cp=cp))],
        "ep": [max(ep for ep in range(1, most_ep + 1) if ep == 1 or can(LayoutWish(ep=ep)))],
    }
    least = {name: min((n for n in sizes[name] if n > 1), default=1) for name in WISHES}
    least["pp"] = min(2, least["pp"])
    return Limits(
        tp_sizes=tuple(sizes["tp"]),
        pp_max=sizes["pp"][0],
        cp_sizes=tuple(sizes["cp"]),
        ep_max=sizes["ep"][0],
        apart=tuple(_apart(least, can)),
    )


def as_asked(limits: Limits, wish: LayoutWish, can: Callable[[LayoutWish], bool]) -> Limits:
    """Positions are shared by as many as wished, or by a divisor of it, however few each has."""
    sizes = (cp for cp in divisors(wish.cp) if can(LayoutWish(cp=cp)))
    return replace(limits, cp_sizes=tuple(sizes))


def _apart(
    sizes: Mapping[str, int], can: Callable[[LayoutWish], bool]
) -> Iterator[tuple[str, str]]:
    """Of what ranks can share one by one (``sizes``), the pairs that they can't."""
    for pair in combinations((name for name in WISHES if sizes[name] > 1), 2):
        together: dict[str, Any] = {name: sizes[name] for name in pair}
        if not can(LayoutWish(**together)):
            yield pair


def tensor_sizes(model: ModelShape, devices: Devices, limits: Limits) -> list[int]:
    """Those that divide heads, key-value heads and the feed-forward width, and have devices."""
    common = gcd(model.heads, model.kv_heads, model.ffn_dim)
    most = min(devices.count, limits.tp_max or devices.count)
    allowed = limits.tp_sizes or divisors(common)
    return [tp for tp in divisors(common) if tp <= most and tp in allowed]


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
