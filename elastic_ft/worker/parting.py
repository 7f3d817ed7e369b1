"""Whether ranks part: one waits for others where they never come.

A loop of the user's that is left by a count of its own does that, as who joined in the middle began
to count there; so does an evaluation by one rank alone. Each would wait until one passed for hung,
and the next one do the same. So who stands in a collective for two heartbeats says at the store
where, and hears where others stand. If that differs the generation is broken off: the next one
begins with where each is (``worker.whereabouts``), and ends where a loop has ended.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from elastic_ft.groups.groups import Groups
from elastic_ft.transport.stacks import stack_of
from elastic_ft.worker.loop import Loop
from elastic_ft.worker.outside import waits
from elastic_ft.worker.party import LEFT
from elastic_ft.worker.steering import Steering

log = logging.getLogger(__name__)
NOBODY = -1  # no rank's: who has left, as it was found first
STANDS = "stands"  # in the store, by rank: how often it has said so, and where
ADVICE = "let step.number, or what all ranks have, decide, and no count of the script's own"


class Parting:
    """Looked at with each heartbeat, by the thread that beats. The store is asked in another one:
    it may be away.

    Args:
        standing: identifier of the thread that runs.
        break_off: ends a generation's groups, with a reason.
    """

    def __init__(
        self, standing: Callable[[], int], break_off: Callable[[Groups, str], None]
    ) -> None:
        self._standing, self._break_off = standing, break_off
        self._at: tuple[int, int, str] = (0, 0, "")  # generation, step, and where this rank was
        self._heard: dict[int, tuple[int, str]] = {}  # of others, since this one stands there
        self._said = 0
        self._asking: threading.Thread | None = None

    def look(self, own: Steering | None, loop: Loop | None) -> None:
        """Where members have come in at several places, parties of them rightly stand apart, until
        they meet."""
        if own is None or loop is None or not loop.party.is_whole or loop.groups.world_size == 1:
            return
        groups = loop.groups
        where = own.at.in_words()
        before, self._at = self._at, (groups.generation, loop.step, where)
        if self._at != before or not where or not waits(stack_of(self._standing())):
            self._heard = {}
        elif self._asking is None or not self._asking.is_alive():
            asking = partial(self._ask, groups, where, self._heard)
            self._asking = threading.Thread(target=asking, name="parting", daemon=True)
            self._asking.start()

    def _ask(self, groups: Groups, where: str, heard: dict[int, tuple[int, str]]) -> None:
        try:
            self._said += 1
            other = elsewhere(groups, where, self._said, heard)
        except Exception as error:  # torch raises many types; who is away others see
            log.info("where others stand is not known: %s", error)
            return
        if other:
            self._break_off(groups, f"{other}, rank {groups.rank} {where}: {ADVICE}")


def elsewhere(groups: Groups, where: str, said: int, heard: dict[int, tuple[int, str]]) -> str:
    """Says that this rank stands at ``where``. Returns who stands elsewhere, or has left; "" if
    nobody is known to: one has to have said so again, else it may have gone on; and who has left is
    to be found so again, else what this rank waited for may have come just now.

    ``heard``: what the others had said, and have now.
    """
    store = groups.store
    assert store is not None
    store.set(f"{STANDS}/{groups.rank}", f"{said} {where}")
    if store.check([LEFT]):
        left = bytes(store.get(LEFT)).decode()
        return left if heard.setdefault(NOBODY, (said, left))[0] < said else ""
    for rank in range(groups.world_size):
        key = f"{STANDS}/{rank}"
        if rank == groups.rank or not store.check([key]):
            continue
        count, _, place = bytes(store.get(key)).decode().partition(" ")
        before, heard[rank] = heard.get(rank), (int(count), place)
        if place != where and before is not None and before[1] == place and before[0] < int(count):
            return f"rank {rank} {place}"
    return ""
