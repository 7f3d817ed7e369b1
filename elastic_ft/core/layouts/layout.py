"""How a model is laid out over ranks. Pure; the mesh itself is built by an engine.

Rank order is row-major over ``DIMENSIONS``, torch's order for ``init_device_mesh`` with those
dimension names, so tensor-parallel peers are neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby, pairwise, product
from math import inf, isqrt, lcm, prod
from typing import Literal, NamedTuple

Strategy = Literal["ddp", "fsdp", "hsdp"]
# How ranks that share positions attend: each gathers all keys and values, or has some heads of the
# whole sequence (ulysses), where their number divides the heads.
ContextMethod = Literal["all_gather", "ulysses", "auto"]
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # of a layout, the outermost first
OF_LAYERS = "tp"  # by which the ranks that share each layer are found
MODEL_DIMENSIONS = ("tp", "pp", "cp")  # those of them that share one sample's work; wished for
WISHES = (*MODEL_DIMENSIONS, "ep")  # what a job file says the size of
EXPERTS_MAX = 4096  # of a layer
FEATURES = {  # of a layout, in words
    "pp": "pipeline stages",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "dp_shard": "sharding",
}


@dataclass(frozen=True, kw_only=True)
class LayoutWish:
    """What layouts are made of by rule, see ``plan_layout``."""

    strategy: Strategy = "ddp"  # how data ranks hold the state
    shard_size: int | None = None  # hsdp: ranks that share one replica
    tp: int = 1  # ranks that share each layer
    pp: int = 1  # ranks that share the layers out
    cp: int = 1  # ranks that share the positions of each sample
    cp_method: ContextMethod = "all_gather"  # ulysses: cp is lowered to its divisors alone
    ep: int = 1  # data ranks that share the experts of each layer out

    @property
    def ranks_per_sample(self) -> int:
        """Ranks that work on one sample together, where all is as wished."""
        return prod(getattr(self, name) for name in MODEL_DIMENSIONS)

    @property
    def shared(self) -> tuple[str, ...]:
        """What ranks share, of ``WISHES``."""
        return tuple(name for name in WISHES if getattr(self, name) > 1)

    @property
    def has_stages(self) -> bool:
        return self.pp > 1

    def sizes_in_words(self) -> str:
        """Such as "tp 2 x pp 4", cp too if it is more."""
        sizes = {name: getattr(self, name) for name in MODEL_DIMENSIONS}
        shown = (name for name in sizes if name != "cp" or self.cp > 1)
        return " x ".join(f"{name} {sizes[name]}" for name in shown)


class Coordinates(NamedTuple):
    """Indices of a rank, by dimension, in the order of ``DIMENSIONS``."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class ShardPlace(NamedTuple):
    """Where a part of the state is, by the dimensions that cut it; or how often each cuts it.

    On disk and on the wire it is a string: a shard's name has indices, a shard space has sizes.
    Ranks that share positions are shards as well: context parallelism has no state of its own.
    """

    pp: int
    dp_shard: int
    tp: int

    @staticmethod
    def parse(name: str) -> ShardPlace:
        """What ``str`` makes of a place. Raises ValueError."""
        match = re.fullmatch(r"pp(\d+)\.s(\d+)\.tp(\d+)", name)
        if match is None:
            raise ValueError(f"not a shard space, nor a shard: {name!r}")
        return ShardPlace(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"pp{self.pp}.s{self.dp_shard}.tp{self.tp}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the parallel dimensions; their product is the world size.

    ``ep`` is none of them: of the shards, so many neighbours share experts out, and hold these cut
    otherwise than the rest of the state. ``owners``: of each expert of a layer, which of them has
    it; none: they have runs of them, see ``expert_owners``.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    ep: int = 1
    owners: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(*self.sizes, self.ep) < 1:
            raise ValueError(f"every dimension of a layout is at least 1, got {self}")
        if self.state_shards % self.ep:
            raise ValueError(f"ep {self.ep} does not divide {self.state_shards} shards")
        if self.owners and not (0 <= min(self.owners) <= max(self.owners) < self.ep > 1):
            raise ValueError(f"experts are of ranks that ep {self.ep} has not: {self.owners}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of ``DIMENSIONS``."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def gradient_size(self) -> int:
        """Number of ranks over which gradients of one parameter are summed."""
        return self.data_parallel_size * self.cp

    @property
    def state_shards(self) -> int:
        """Into how many shards the ranks of one replica and stage cut the state, beside ``tp``."""
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Into how many shards the experts that one rank computes are cut."""
        return self.state_shards // self.ep

    @property
    def shares_experts(self) -> bool:
        """Whether each rank computes some of the experts alone."""
        return self.ep > 1

    def coordinates(self, rank: int) -> Coordinates:
        """Raises ValueError for a rank that the layout has not."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside layout {self} of {self.world_size} ranks")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, shard = divmod(rest, self.dp_shard)
        pp, replicate = divmod(rest, self.dp_replicate)
        return Coordinates(pp, replicate, shard, cp, tp)

    def data_rank(self, rank: int) -> int:
        """Index of ``rank`` among the ranks that read different samples."""
        at = self.coordinates(rank)
        return at.dp_replicate * self.dp_shard + at.dp_shard

    def counts_samples(self, rank: int) -> bool:
        """Whether ``rank`` counts what its batch has: of those that share one batch, the first."""
        at = self.coordinates(rank)
        return not any(getattr(at, name) for name in MODEL_DIMENSIONS)

    def counts_loss(self, rank: int) -> bool:
        """Whether ``rank`` counts the loss that it has: of tensor-parallel peers, the first."""
        return self.coordinates(rank).tp == 0

    def mesh_dims(self) -> dict[str, int]:
        """Names and sizes of the device mesh's dimensions.

        Those of size 1 are left out, and ``cp`` is part of "dp_shard". FSDP2 needs a dimension of
        shards beside model dimensions, whatever its size, and a mesh has one dimension at least.
        """
        sizes = dict(zip(DIMENSIONS, self.sizes, strict=True))
        sizes["dp_shard"] *= sizes.pop("cp")
        used = {name: size for name, size in sizes.items() if size > 1}
        if used and not used.keys() & {*MODEL_DIMENSIONS}:
            return used
        return {name: n for name, n in sizes.items() if n > 1 or name == "dp_shard"}

    def expert_mesh_dims(self) -> dict[str, int]:
        """Into what "dp_shard" of ``mesh_dims`` is split where ranks share experts out."""
        return {"efsdp": self.expert_shards, "ep": self.ep}

    def place_of(self, rank: int) -> ShardPlace:
        """Where in the shard space ``rank`` is. Equal places hold equal state."""
        at = self.coordinates(rank)
        return ShardPlace(at.pp, at.dp_shard * self.cp + at.cp, at.tp)

    def shard_of(self, rank: int) -> str:
        """Name of the part of the state that ``rank`` holds. Equal names hold equal state.

        Comparable only within one layout: see ``shard_space``.
        """
        return str(self.place_of(rank))

    def replicas_of(self, rank: int) -> range:
        """The ranks that hold the same shard, ``rank`` among them."""
        apart = self.state_shards * self.tp
        stage = apart * self.dp_replicate
        first = rank // stage * stage + rank % apart
        return range(first, first + stage, apart)

    def context_of(self, rank: int) -> range:
        """The ranks that share the positions of one sample, ``rank`` among them."""
        first = rank - self.coordinates(rank).cp * self.tp
        return range(first, first + self.cp * self.tp, self.tp)

    @property
    def features(self) -> dict[str, bool]:
        """Which of ``FEATURES`` it has, by their words."""
        return {words: getattr(self, name) > 1 for name, words in FEATURES.items()}

    @property
    def pipeline_size(self) -> int:
        """Number of ranks that share the layers out."""
        return self.pp

    @property
    def has_stages(self) -> bool:
        """Whether the layers are shared out as pipeline stages."""
        return self.pp > 1

    @property
    def cuts_layers(self) -> bool:
        """Whether each layer is cut, beside what ``state_shards`` are."""
        return self.tp > 1

    @property
    def parts_per_layer(self) -> int:
        """Into how many parts each layer is cut, beside what ``state_shards`` are."""
        return self.tp

    @property
    def ranks_per_layer(self) -> int:
        """Ranks that share each layer of one sample."""
        return self.tp * self.cp

    @property
    def ranks_together(self) -> int:
        """Ranks that talk within each layer: they should share a node."""
        return self.tp * lcm(self.cp, self.ep)

    @property
    def is_cut(self) -> bool:
        """Whether no rank has all of the state."""
        return max(self.cuts) > 1

    @property
    def cuts(self) -> ShardPlace:
        """Into how many parts each dimension cuts the state."""
        return ShardPlace(self.pp, self.state_shards, self.tp)

    def shards(self) -> frozenset[str]:
        """Every shard name; together they are the whole state."""
        return frozenset(shard_names(self))

    @property
    def shard_space(self) -> str:
        """Names the way the state is cut. Layouts with one shard space have the same shards."""
        runs = "_".join(f"{owner}x{len([*some])}" for owner, some in groupby(self.owners))
        return str(self.cuts) + f".ep{self.ep}" * self.shares_experts + f".{runs}" * bool(runs)

    @staticmethod
    def of_shard_space(space: str) -> Layout:
        """The smallest layout whose ``shard_space`` is ``space``. Raises ValueError."""
        match = re.fullmatch(r"(.*?)(?:\.ep(\d+)(?:\.(\d+x\d+(?:_\d+x\d+)*))?)?", space)
        if match is None:
            raise ValueError(f"not a shard space: {space!r}")
        cuts, ep, runs = match.groups()
        counted = [[*map(int, run.split("x"))] for run in runs.split("_")] if runs else []
        if sum(count for _, count in counted) > EXPERTS_MAX:
            raise ValueError(f"not a shard space, of over {EXPERTS_MAX} experts: {space!r:.80}")
        owners = [owner for owner, count in counted for _ in range(count)]
        return Layout(**ShardPlace.parse(cuts)._asdict(), ep=int(ep or 1), owners=tuple(owners))

    @staticmethod
    def parse(name: str) -> Layout:
        """What ``str`` makes of a layout, which says nothing of ``owners``. Raises ValueError."""
        match = re.fullmatch(
            r"(?:pp(\d+)-)?(?:ddp(\d+)|fsdp(\d+)|hsdp(\d+)x(\d+))(?:-cp(\d+))?(?:-ep(\d+))?"
            r"(?:-tp(\d+))?",
            name,
        )
        if match is None:
            raise ValueError(f"not a layout: {name!r}")
        pp, ddp, fsdp, replicas, shards, cp, ep, tp = (int(group or 1) for group in match.groups())
        return Layout(
            dp_replicate=ddp * replicas, dp_shard=fsdp * shards, pp=pp, tp=tp, cp=cp, ep=ep
        )

    def __str__(self) -> str:
        if self.dp_shard == 1:
            data = f"ddp{self.dp_replicate}"
        elif self.dp_replicate == 1:
            data = f"fsdp{self.dp_shard}"
        else:
            data = f"hsdp{self.dp_replicate}x{self.dp_shard}"
        return "-".join(
            [f"pp{self.pp}"] * (self.pp > 1)
            + [data]
            + [f"cp{self.cp}"] * (self.cp > 1)
            + [f"ep{self.ep}"] * (self.ep > 1)
            + [f"tp{self.tp}"] * (self.tp > 1)
        )


@lru_cache(maxsize=16)
def shard_names(layout: Layout) -> tuple[str, ...]:
    """``shard_of`` of every rank, in order: asked for several times while a world of N forms."""
    names: list[str] = []
    for pp in range(layout.pp):
        places = product((pp,), range(layout.state_shards), range(layout.tp))
        names += [str(ShardPlace(*place)) for place in places] * layout.dp_replicate
    return tuple(names)


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """In ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def plan_layout(wish: LayoutWish, world_size: int) -> tuple[Layout, str]:
    """Returns the layout for ``world_size`` ranks, and the reason in words. Uses every rank.

    ``tp``, ``pp`` and ``cp`` are as wished where their product divides the world. Else tensor
    parallelism is kept before pipeline stages, and these before context parallelism: the largest
    divisor of ``tp``, with it the most stages up to ``pp``, with these the most ranks up to ``cp``,
    that do (of ulysses a divisor of ``cp``, as it is known to divide the heads). What is left is
    data parallel by ``strategy``; ``shard_size`` is HSDP's. Of shards, as many share experts as
    ``_plan_experts`` says.
    """
    if min(world_size, wish.tp, wish.pp, wish.cp, wish.ep) < 1:
        raise ValueError(
            f"a layout needs at least one rank, got {world_size} ({wish.sizes_in_words()})"
        )
    tp, pp, cp = next(
        (tensor, stages, context)
        for tensor in range(wish.tp, 0, -1)
        for stages in range(wish.pp, 0, -1)
        for context in range(wish.cp, 0, -1)
        if wish.tp % tensor == 0
        and world_size % (tensor * stages * context) == 0
        and (wish.cp_method != "ulysses" or wish.cp % context == 0)
    )
    data, why = _plan_data(wish.strategy, world_size // (tp * pp * cp), wish.shard_size)
    layout = replace(data, tp=tp, pp=pp, cp=cp)
    if wish.ep > 1:
        ep, of_experts = _plan_experts(wish.ep, layout.state_shards)
        layout, why = replace(layout, ep=ep), f"{why}, {of_experts}"
    if wish.ranks_per_sample == 1:
        return layout, why
    context = f" x cp {cp}" if wish.cp > 1 else ""
    found = f"pp {pp} x tp {tp}{context} x {why}"
    if (tp, pp, cp) == (wish.tp, wish.pp, wish.cp):
        return layout, found
    asked = f"pp {wish.pp} x tp {wish.tp}" + (f" x cp {wish.cp}" if wish.cp > 1 else "")
    by_heads = cp != wish.cp and wish.cp_method == "ulysses"
    heads = f", and ulysses takes divisors of cp {wish.cp}" if by_heads else ""
    return layout, f"{found}, as {asked} does not divide {world_size} ranks{heads}"


def trades_heads(method: ContextMethod, heads: int, parts: int, cp: int) -> bool:
    """Whether ``cp`` ranks have some of the ``heads`` each, of all a layer's ``parts``."""
    return cp > 1 and method != "all_gather" and heads % (parts * cp) == 0


def _plan_data(strategy: Strategy, world_size: int, shard_size: int | None) -> tuple[Layout, str]:
    """The data-parallel layout of ``world_size`` ranks.

    Where ``shard_size`` does not divide the world, HSDP takes the largest smaller divisor (at
    least 2), or, if there is none, the whole world shards: the state of one replica must fit, so
    fewer shards than wanted is the exception, not the rule.
    """
    if strategy == "ddp":
        return Layout(dp_replicate=world_size), f"ddp: {world_size} replicas"
    if strategy == "fsdp":
        return Layout(dp_shard=world_size), f"fsdp: {world_size} shards"
    wanted = min(shard_size or world_size, world_size)
    fitting = [size for size in range(wanted, 1, -1) if world_size % size == 0]
    shards = fitting[0] if fitting else world_size
    layout = Layout(dp_replicate=world_size // shards, dp_shard=shards)
    why = "as asked" if shards == wanted else f"{wanted} shards do not divide {world_size} ranks"
    return layout, f"hsdp: {layout.dp_replicate} replicas of {shards} shards, {why}"


def _plan_experts(wanted: int, shards: int) -> tuple[int, str]:
    """How many of ``shards`` neighbours share experts out, and why.

    Where as many as wanted do not divide the shards: the divisor that is nearest by ratio, of two
    the larger, and none over twice of what was wanted, as ranks would be left without experts.
    """
    fitting = [size for size in divisors(shards) if size <= 2 * wanted]
    ep = min(fitting, key=lambda size: (max(size / wanted, wanted / size), -size))
    shared = f"experts shared by {ep}" if ep > 1 else "experts not shared"
    if ep == wanted:
        return ep, shared
    return ep, f"{shared}, as {wanted} do not divide {shards} shards"


def split_layers(costs: Sequence[float], parts: int) -> tuple[range, ...]:
    """Cuts layers into consecutive ``parts``, none empty, the costliest as cheap as can be."""
    if not 1 <= parts <= len(costs):
        raise ValueError(f"cannot cut {len(costs)} layers into {parts} parts")
    total = [0.0, *accumulate(costs)]
    # best[n]: (cost of the costliest, where each part ends) of the first n layers
    best: list[tuple[float, tuple[int, ...]]] = [(cost, (n,)) for n, cost in enumerate(total)]
    for part in range(1, parts):
        best = [
            min(
                (
                    (max(best[cut][0], total[n] - total[cut]), (*best[cut][1], n))
                    for cut in range(part, n)
                ),
                default=(inf, ()),
            )
            for n in range(len(total))
        ]
    return tuple(range(a, b) for a, b in pairwise((0, *best[-1][1])))


def stages_of(pp_rank: int, pp: int, schedule: str) -> tuple[int, ...]:
    """The pipeline stages that a rank has: one, or two, side by side or in the shape of a V."""
    if schedule == "interleaved1f1b":
        return pp_rank, pp + pp_rank
    if schedule == "zero_bubble":
        return pp_rank, 2 * pp - 1 - pp_rank
    return (pp_rank,)


def count_stages(pp: int, schedule: str) -> int:
    return pp * len(stages_of(0, pp, schedule))
