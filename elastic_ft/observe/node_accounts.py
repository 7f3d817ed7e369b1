"""Which nodes offered workers, and for how long: a part of ``observe.accounts``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.core.assignment import Keeper, Member, NodeId, WorkerId
from elastic_ft.core.state import State


class NodeAccounts:
    """Which nodes are there: from the first word of a keeper or worker until both are gone.

    Those heard of before the first generation forms were there from the start; one that a worker
    is the first to tell of, from that worker's start.
    """

    def __init__(self, started_at_s: float, workers_per_node: int, max_workers: int) -> None:
        self._per_node, self._max = workers_per_node, max_workers
        self._started_s = self._since_s = started_at_s
        self._worker_s, self._slots = 0.0, 0
        self.there: set[NodeId] = set()
        self._ready: Mapping[WorkerId, Member] | None = None
        self._keepers: dict[NodeId, Keeper] | None = None

    def on(self, now_s: float, event: ev.Event, state: State, allocated: int) -> None:
        if state.ready is self._ready and state.keepers is self._keepers:
            return
        self._ready, self._keepers = state.ready, state.keepers
        self._worker_s = self.available_s(now_s)
        self._since_s = max(now_s, self._since_s)
        if isinstance(event, ev.WorkerReady) and event.member.worker in state.ready:
            self.there.add(event.member.node)
        else:
            self.there = {*state.keepers, *(member.node for member in state.ready.values())}
        slots = min(self._max, max(allocated, self._per_node * len(self.there)))
        if slots > self._slots:
            began_s = self._since_s
            if state.phase == "starting":
                began_s = self._started_s
            elif isinstance(event, ev.WorkerReady) and event.started_at_s:
                began_s = min(began_s, max(event.started_at_s, self._started_s))
            self._worker_s += (slots - self._slots) * (self._since_s - began_s)
        self._slots = slots

    def as_json(self) -> list[Any]:
        return [self._started_s, self._since_s, self._worker_s, self._slots, sorted(self.there)]

    def go_on(self, values: list[Any]) -> None:
        self._started_s, self._since_s, self._worker_s, self._slots, there = values
        self.there = set(there)

    def available_s(self, now_s: float) -> float:
        return self._worker_s + self._slots * max(0.0, now_s - self._since_s)
