"""What keepers say, collected, and a shard of a worker's in a keeper's memory."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np

from elastic_ft.core.assignment import Holding, Source, Tier
from elastic_ft.core.commands import RecordStep
from elastic_ft.core.sharding import Box
from elastic_ft.keeper.buffer import DIGEST_BYTES, label, schema_bytes, schema_of_parts, seal
from elastic_ft.keeper.keeper_client import KeeperClient
from elastic_ft.keeper.protocol import Sealed
from elastic_ft.transport.control import ControlServer, Welcome
from tests.multiproc.harness import make_job

WHOLE = Box((0, 0), (4, 3))
SCHEMA = schema_of_parts([("a", "float32", (8, 3), WHOLE, 4), ("b", "int64", (), Box((), ()), 8)])
VALUES = np.arange(12, dtype=np.float32)
SPACE, SHARD = "pp1.s2.tp1", "pp0.s0.tp0"
RUN = "run"


def held(step: int, generation: int = 1) -> Holding:
    return Holding(step, SPACE, SHARD, Tier.KEEPER, generation)


def of(step: int, generation: int = 1) -> Source:
    return Source(step, Tier.KEEPER, SPACE, generation=generation)


class Desk:
    """A controller's end: collects what keepers say."""

    def __init__(self, checkpoint_url: str) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        self.ended: list[str] = []
        welcome = Welcome(make_job("ddp"), RUN, checkpoint_url, ("", 0))
        self.server = ControlServer(
            "127.0.0.1",
            lambda member: welcome,
            lambda member, message: self.said.put(message),
            lambda member, silent_s: self.ended.append(member.worker),
        )
        self.server.start()

    def next(self, kind: type) -> Any:
        while not isinstance(message := self.said.get(timeout=60), kind):
            pass
        return message


def known(step: int) -> RecordStep:
    return RecordStep(step, 1, 1, "fsdp1", {"loss": 1.0 / step})


def write(client: KeeperClient, step: int, *, sealed: bool = True) -> tuple[str, Any]:
    """A shard in a buffer of the keeper's. Returns its path and memory."""
    path, memory = client.allocate(schema_bytes(SCHEMA) + DIGEST_BYTES)
    buffer = np.frombuffer(memory, np.uint8)
    buffer[:48] = VALUES.view(np.uint8)
    buffer[64:72] = np.array([step], np.int64).view(np.uint8)
    holding = held(step)
    seal(buffer, label(RUN, holding, SCHEMA))
    if sealed:
        client.tell(Sealed(path, holding, SCHEMA, (known(step),)))
    return path, memory
