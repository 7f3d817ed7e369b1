"""What the loop of a generation is given: by its worker, by its controller, by forming it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ft.config import Job
from elastic_ft.data.dataset import DataBundle
from elastic_ft.data.prefetch import Prefetcher
from elastic_ft.engines.base import StateEngine
from elastic_ft.faults import Points
from elastic_ft.groups.groups import Groups
from elastic_ft.keeper.buffer import Schema
from elastic_ft.state.checkpointer import Checkpointer, OwnedBoxes
from elastic_ft.state.snapshot import Snapshots


@dataclass(slots=True)
class Flags:
    """What is asked of a running generation; read at the next agreement.

    Attributes:
        snapshot: a keeper has just come, which has none of this worker's; the others by the
            controller.
    """

    pause: bool = False
    stop: bool = False
    checkpoint: bool = False
    snapshot: bool = False

    def take(self) -> list[float]:
        """What is asked, as numbers to sum; a checkpoint and a snapshot are asked for once."""
        checkpoint, self.checkpoint = self.checkpoint, False
        snapshot, self.snapshot = self.snapshot, False
        return [float(asked) for asked in (self.pause, self.stop, checkpoint, snapshot)]


@dataclass(slots=True)
class Formed:
    """One formed generation, ready to train."""

    groups: Groups
    owned: OwnedBoxes
    peer_schemas: dict[int, Schema]  # of the ranks whose copies are kept here
    step: int


@dataclass(slots=True)
class Tools:
    """What outlives every generation (I6)."""

    job: Job
    worker: str
    engine: StateEngine
    data: DataBundle
    prefetcher: Prefetcher
    snapshots: Snapshots
    checkpointer: Checkpointer
    points: Points
    send: Callable[[Any], object]
    pretrained: str | None = None  # digest of the weights at model.pretrained
    pretrained_config: str | None = None  # of the model there, as JSON
    checkpointed_step: int = 0  # the newest step with a checkpoint, committed or begun here
