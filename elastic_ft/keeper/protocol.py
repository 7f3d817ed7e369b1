"""What workers and peers ask of a node's keeper, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elastic_ft.core.assignment import Holding, WorkerId
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.deadlines import upload_s
from elastic_ft.core.sharding import Box
from elastic_ft.keeper.buffer import Schema
from elastic_ft.transport.messages import MESSAGE_BYTES_MAX, Messages


@dataclass(frozen=True, slots=True)
class Attach:
    """A worker's first message: what it puts here is told to the controller when it is gone."""

    worker: WorkerId
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Allocate:
    """Answered with a path to open and map, or with Refusal."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Allocated:
    path: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """``damaged``: what was asked for is damaged, or is not here."""

    reason: str
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class Unseal:
    """The buffer is about to be written to. No answer."""

    path: str


@dataclass(frozen=True, slots=True)
class Sealed:
    """The buffer holds this shard, digest included. No answer.

    ``schema``: None: it lies there as the one before. ``record``: of the steps up to that one that
    this worker has not told yet: when the controller is killed, nobody else may know of them.
    """

    path: str
    holding: Holding
    schema: Schema | None
    record: tuple[RecordStep, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    """No answer."""

    path: str


@dataclass(frozen=True, slots=True)
class Upload:
    """Answered with the manifest entries, or with Refusal. ``owned``: tensors' names to write."""

    path: str
    holding: Holding
    schema: Schema
    owned: frozenset[tuple[str, Box]]
    url: str
    prefix: str
    rank: int
    max_mb_per_s: float | None = None

    @property
    def timeout_s(self) -> float:
        """As long as so much may take."""
        nbytes = sum(s.nbytes for s in self.schema if (s.name, s.box) in self.owned)
        rate = None if self.max_mb_per_s is None else self.max_mb_per_s * 1e6
        return upload_s(nbytes, rate)


@dataclass(frozen=True, slots=True)
class Describe:
    """Answered with the schema of a shard that an ended worker left, or with Refusal."""

    worker: WorkerId
    holding: Holding


@dataclass(frozen=True, slots=True)
class Read:
    """Answered with the bytes of ``parts`` one after the other, then their digest."""

    worker: WorkerId
    holding: Holding
    parts: tuple[tuple[str, Box], ...]


@dataclass(frozen=True, slots=True)
class Described:
    schema: Schema


@dataclass(frozen=True, slots=True)
class Content:
    payload: bytes


@dataclass(frozen=True, slots=True)
class Uploaded:
    entries: tuple[dict[str, Any], ...]


TO_KEEPER = Messages(Attach, Allocate, Unseal, Sealed, Free, Upload, Describe, Read)
FROM_KEEPER = Messages(
    Allocated, Described, Content, Uploaded, Refusal, bytes_max=2 * MESSAGE_BYTES_MAX
)
