"""A generation: who, in which rank order, laid out how, with state from where. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from elastic_ft.core.layouts.layout import Layout

WorkerId = str  # one process, never reused: a restarted worker has a new id
NodeId = str
KEEPER = "keeper:"  # and the node: a keeper's name among workers


class Tier(StrEnum):
    """Where a piece of state lies, nearest first."""

    LIVE = "live"  # the device memory of the rank that trains with it
    HOST = "host"  # its own snapshot in host memory
    KEEPER = "keeper"  # shared memory of the node, outliving the worker
    PEER = "peer"  # a copy kept for a peer
    CHECKPOINT = "checkpoint"  # object storage
    INITIAL = "initial"  # recomputed from the seed: step 0

    __hash__ = str.__hash__  # of what it equals, and no call of Python's


TIER_ORDER = tuple(Tier)


@dataclass(frozen=True, slots=True)
class Member:
    """A worker process and where it runs, as journalled in ``generation_formed``."""

    worker: WorkerId
    node: NodeId
    host: str
    pid: int
    raylet_pid: int | None = None
    # What fails together with the node's neighbours (a rack, a zone), if known. Nested ones are
    # parted by "/", the outermost first; who shares more of them is nearer.
    domain: str = ""
    memory_bytes: int = 0  # of its device, if known


@dataclass(frozen=True, slots=True)
class Holding:
    """One complete shard of the state at one step, held by a worker."""

    step: int
    space: str  # Layout.shard_space
    shard: str  # Layout.shard_of(rank)
    tier: Tier
    generation: int = 0  # that computed the step: with it, a state is one of a kind


@dataclass(frozen=True, slots=True)
class Keeper:
    """The process of a node that owns its workers' snapshots, and outlives them."""

    node: NodeId
    address: tuple[str, int]  # where it serves

    @property
    def name(self) -> str:
        """Its name among workers."""
        return KEEPER + self.node

    def left_by(self, worker: WorkerId) -> str:
        """Among the holders of a source: what a worker left here.

        By worker: two that ended at the same step may have left states of different histories.
        """
        return f"{self.name}/{worker}"


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    step: int
    url: str
    generation: int = 0  # that computed the step, 0 if this run folder does not know


@dataclass(frozen=True, slots=True)
class Source:
    """Where the state of a new generation comes from.

    ``holders`` maps each shard name to who has it (workers, keepers, a checkpoint of that step),
    nearest tier first; empty for a whole CHECKPOINT (``url``) and INITIAL (made from the seed).
    """

    step: int
    tier: Tier  # the farthest tier used
    space: str = ""
    holders: dict[str, tuple[tuple[str, Tier], ...]] = field(default_factory=dict)
    url: str = ""
    generation: int = 0  # that computed the step


class Basis:
    """What follows from how a generation is laid out, and from what it began with."""

    __slots__ = ()

    generation: int
    layout: Layout
    source: Source

    @property
    def is_cut(self) -> bool:
        """Whether no member has all of the state."""
        return self.layout.is_cut

    def computed_by(self, step: int) -> int:
        """Which generation computed ``step``, of the states that this one has."""
        return self.generation if step > self.source.step else self.source.generation

    def holding_of(self, rank: int, step: int, tier: Tier) -> Holding:
        """The shard of ``rank`` after ``step``, in ``tier``."""
        space, shard = self.layout.shard_space, self.layout.shard_of(rank)
        return Holding(step, space, shard, tier, self.computed_by(step))


@dataclass(frozen=True, slots=True)
class Assignment(Basis):
    """One generation: who, in which rank order, laid out how, with state from where."""

    generation: int
    members: tuple[Member, ...]  # index = rank
    donors: tuple[Member, ...]  # not in the new world; give their state, then leave
    layout: Layout
    source: Source
    buddies: tuple[tuple[int, ...], ...]  # rank -> ranks that keep a copy of its shard
    reason: str
    keepers: tuple[Keeper, ...] = ()  # alive when it was made

    @property
    def holding(self) -> range:
        """The ranks that keep snapshots in host memory; steps commit once held there.

        All of them where the state is cut into shards, replicated ones among them: without, a loss
        between the first and the last optimizer of a step can leave some shards at that step only,
        others at the one before, and no step whole. Where every rank has all of it, they survive
        each other, and the first one's snapshot is for when all end at once: their controller is
        killed, say. It needs a keeper to outlive its worker.
        """
        if self.is_cut:
            return range(len(self.members))
        kept = self.members[0].node in {keeper.node for keeper in self.keepers}
        return range(1) if kept else range(0)

    def rank_of(self, worker: WorkerId) -> int | None:
        return next((r for r, m in enumerate(self.members) if m.worker == worker), None)
