"""Tells senders up to which number the next controller can read what they told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from elastic_ft.core.assignment import KEEPER, WorkerId
from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.control import Acknowledged, Note

log = logging.getLogger(__name__)
EVERY_S, EVERY_REMOTE_S = 1.0, 0.5
NOW_S = 3.0  # that the controller's thread waits for a store
NOT_DURABLE = "inbox_not_durable"  # the journal's line
SENDERS_PER_S = 500  # of a large world, each is told less often


class Durability(threading.Thread):
    """A thread of its own: nobody waits for a disk or a store, but who asks for it (``now``).

    Args:
        heard: of each sender, the number up to which its messages are in the run folder's files, or
            on their way there.
        send: to a worker or keeper.
        post: takes a line for the journal, where a store is away.
    """

    def __init__(
        self,
        folder: RunFolder,
        heard: dict[str, int],
        send: Callable[[WorkerId, Any], bool],
        post: Callable[[Any], None],
    ) -> None:
        super().__init__(name="durability", daemon=True)
        self._folder, self._heard, self._send, self._post = folder, heard, send, post
        self._told: dict[str, int] = {}
        self._closed, self._wake = threading.Event(), threading.Event()
        self._news = threading.Condition()  # guards the rest
        self._asked = self._done = 0  # by ``now``; what has been tried for it
        self._is_away = False  # the store is, or slow
        self._superseded: Superseded | None = None

    def run(self) -> None:
        every_s = EVERY_REMOTE_S if self._folder.is_remote else EVERY_S
        while not self._closed.is_set():
            self._wake.wait(max(every_s, len(self._told) / SENDERS_PER_S))
            self._wake.clear()
            if not self._closed.is_set():
                self._look()

    def close(self) -> None:
        self._closed.set()
        self._wake.set()

    def now(self) -> None:
        """What was told so far is durable, or can't be made so: that is said, and is no reason to
        stop. In the controller's thread: some milliseconds, a store gets ``NOW_S``, and one that
        is known to be away nothing. Raises Superseded."""
        if self._folder.is_remote and self.is_alive():
            self._have_it_done()
            return
        try:
            self._folder.make_inbox_durable()
        except (OSError, StoreFailed) as error:
            log.warning("inbox.jsonl is not durable: %s", error)

    def _have_it_done(self) -> None:
        with self._news:
            self._asked += 1
            asked = self._asked
            self._wake.set()
            if self._is_away:
                log.warning("inbox.jsonl is not durable: its store is away")
            elif not self._news.wait_for(lambda: self._done >= asked, NOW_S):
                self._be_away(f"not within {NOW_S:g} s")
            if self._superseded is not None:
                raise self._superseded

    def _be_away(self, why: str) -> None:
        """Once, until it is there again: what lasts is not in the journal meanwhile."""
        log.warning("inbox.jsonl is not durable: %s", why)
        if self._folder.is_remote and not self._is_away:
            self._is_away = True
            reason = f"the run folder's store does not take what was told: {why}"
            self._post(Note("controller", 0, NOT_DURABLE, reason))

    def _look(self) -> None:
        asked, heard = self._asked, dict(self._heard)
        if heard == self._told and asked == self._done:
            return
        why, superseded = "", None
        try:
            self._folder.make_inbox_durable()
        except Superseded as error:
            superseded = error  # the controller's thread finds out by itself, or waits for this
        except (OSError, StoreFailed) as error:  # nobody forgets anything meanwhile
            why = str(error)
        with self._news:
            self._done, self._superseded = asked, superseded
            if why:
                self._be_away(why)
            else:
                self._is_away = False
            self._news.notify_all()
        if why or superseded is not None:
            return
        for sender, number in heard.items():
            if self._told.get(sender) != number:
                self._send(worker_of(sender), Acknowledged(sender, number))
        self._told = heard


def worker_of(sender: str) -> WorkerId:
    """Whose messages ``Hello.sender`` numbers."""
    return sender.rpartition("/")[0] if sender.startswith(KEEPER) else sender
