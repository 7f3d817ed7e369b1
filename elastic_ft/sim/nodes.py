"""What outlives workers and nodes: the object store; how a state is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_ft.core.assignment import Holding, Tier
from elastic_ft.core.commands import RecordStep

HANG_TIMEOUT_S = 5.0  # of silence, of a worker or a keeper
# The generation that computed each step: the state, as far as it matters.
ComputedBy = tuple[int, ...]
Key = tuple[int, int, str, str]  # step, generation that computed it, space, shard


def holding(key: Key, tier: Tier) -> Holding:
    step, generation, space, shard = key
    return Holding(step, space, shard, tier, generation)


@dataclass(slots=True)
class SimCheckpoint:
    step: int
    url: str
    lineage: ComputedBy
    owner: int  # the controller that published it
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class SimSavedShard:
    """What a keeper wrote of one, as its controller was gone. ``lineage``: the truth."""

    key: Key
    lineage: ComputedBy
    record: Mapping[int, RecordStep]


@dataclass(slots=True)
class ObjectStore:
    """``storage.owners``: its newest owner has it, and an older one publishes nothing that counts.

    Attributes:
        owner: the newest controller.
        found: the checkpoints that were there when it took the store over.
        unread_on: nodes that can't read.
        unwritten_on: nodes that can't write.
        silent: of what is published nobody hears.
        base_away: nobody can read the frozen weights that no member has.
    """

    published: list[SimCheckpoint] = field(default_factory=list)  # newest last
    down: bool = False
    unread_on: set[str] = field(default_factory=set)
    unwritten_on: set[str] = field(default_factory=set)
    silent: bool = False
    base_away: bool = False
    owner: int = 0
    found: frozenset[str] = frozenset()

    def take_over(self, owner: int) -> None:
        self.found = frozenset(c.url for c in self.published if self.counts(c))
        self.owner = owner

    def may_write(self, owner: int) -> bool:
        """Whether lines of the run folder, too, are its to write."""
        return owner == self.owner

    def counts(self, checkpoint: SimCheckpoint) -> bool:
        return checkpoint.owner == self.owner or checkpoint.url in self.found

    def good(self) -> list[SimCheckpoint]:
        """Those that count."""
        return [c for c in self.published if self.counts(c)]

    def is_damaged(self, url: str) -> bool:
        return any(c.damaged for c in self.published if c.url == url)
