"""Whom a controller kills: its own, and nobody who trains for a successor that it has not seen."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from elastic_ft.controller.host import Host
from elastic_ft.core.assignment import NodeId, WorkerId


class Kills:
    """In the controller's thread.

    One that was stopped finds all its connections ended when it wakes up, and that looks like a
    world that is lost. Workers and keepers have names that its successor's have, too: so whoever
    was away kills nobody until the store says that the job is still its own. A store that is away
    is asked again. A local run folder says it before each line.

    Args:
        confirm: calls what it is given, from a thread of its own, once that is so.
        away_s: after so long a successor may have been there.
    """

    def __init__(
        self,
        host: Host,
        confirm: Callable[[Callable[[], None]], None],
        away_s: float,
        *,
        is_remote: bool,
    ) -> None:
        self._host, self._confirm = host, confirm
        self._away_s, self._is_remote = away_s, is_remote
        self._awake_at_s = time.monotonic()
        self._doubts = 0  # looks that are under way
        self._settled = 0
        self._held: list[Callable[[], None]] = []

    def awake(self) -> None:
        """Called again and again, before anything is made of what came meanwhile."""
        now_s = time.monotonic()
        away_s, self._awake_at_s = now_s - self._awake_at_s, now_s
        if self._is_remote and away_s > self._away_s:
            self._doubts += 1
            self._confirm(partial(self._settle, self._doubts))
        if self._held and not self._is_in_doubt:
            held, self._held = self._held, []
            for kill in held:
                kill()

    def worker(self, worker: WorkerId) -> None:
        self._do(partial(self._host.kill_worker, worker))

    def keeper(self, node: NodeId) -> None:
        self._do(partial(self._host.kill_keeper, node))

    @property
    def _is_in_doubt(self) -> bool:
        return self._settled < self._doubts

    def _settle(self, doubt: int) -> None:
        self._settled = doubt

    def _do(self, kill: Callable[[], None]) -> None:
        if self._is_in_doubt:
            self._held.append(kill)
        else:
            kill()
