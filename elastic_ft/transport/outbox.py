"""What a process tells its controllers, kept until one of them has it where the next can read it.

Each event, note and fired fault gets a number, from 1. A controller journals it with the message,
and acknowledges what is durable; who loses its controller tells the next one the rest again, and
that one leaves out what it has. So nothing that was told is lost, and nothing counts twice.
Heartbeats and the like are of the moment: they have no number, and are never told again.

Who is silent, or takes nothing, is told nothing: a controller that is stopped takes no bytes, and
once its buffers were full training would wait for it, and the kernel end the connection. It is told
the rest as soon as it is heard again, by the thread that hears it: no other waits for that.
"""

from __future__ import annotations

import itertools
import threading
import time
import typing
from collections import deque
from collections.abc import Callable
from typing import Any

from elastic_ft.core import events as ev
from elastic_ft.transport.control import FaultFired, Note
from elastic_ft.transport.messages import Encoded, Numbered
from elastic_ft.transport.wire import Channel

TELL_S = 0.25  # of what was held back, before more is heard
ROOM_S = 0.05  # that who is told has, to make room
AT_ONCE = 64  # messages
KEPT_MAX = 100_000  # messages, some 50 MB: an hour of steps, ten a second
NUMBERED = frozenset({*typing.get_args(ev.Event), Note, FaultFired})


class LineOutbox:
    """``send`` and ``await_room`` are for any thread.

    Args:
        is_silent: whether nothing was heard of the controller for too long.
        keeps: False: no controller comes after the first one, and nothing is numbered or held back.
    """

    def __init__(
        self,
        channel: Channel,
        is_silent: Callable[[], bool] = lambda: False,
        *,
        keeps: bool = True,
        kept_max: int = KEPT_MAX,
    ) -> None:
        self._channel, self._is_silent = channel, is_silent
        self._keeps, self._kept_max = keeps, kept_max
        self._changed = threading.Condition(threading.RLock())  # guards what follows
        self._kept: deque[tuple[int, Encoded]] = deque()
        self._number = self._told = 0  # the newest, and the newest that this controller was told
        self._closed = False

    def send(self, message: Any) -> bool:
        """Returns False if it did not go out: what is numbered will, to this controller once it is
        heard again, or to the next."""
        if not self._keeps:
            return self._channel.send(message)
        if type(message) not in NUMBERED:
            return self._takes_more() and self._channel.send(message)
        with self._changed:  # they go out in the order of their numbers
            self._number += 1
            encoded = Encoded(Numbered(self._number, message))
            self._kept.append((self._number, encoded))
            if self._told < self._number - 1 or not self._takes_more():
                return False
            if self._channel.send(encoded):
                self._told = self._number
            return self._told == self._number

    def _takes_more(self) -> bool:
        return not self._is_silent() and self._channel.has_room(ROOM_S)

    def catch_up(self) -> None:
        """The controller was heard: it is told what was held back, as far as it takes that without
        waiting, and within TELL_S; the rest once it is heard again. In the thread that receives."""
        until_s = time.monotonic() + TELL_S
        while untold := self._untold():
            for number, encoded in untold:
                if time.monotonic() > until_s:
                    return
                if not self._channel.has_room(ROOM_S) or not self._channel.send(encoded):
                    return  # if it has ended the next one is told
                with self._changed:
                    self._told = number

    def _untold(self) -> list[tuple[int, Encoded]]:
        """The oldest. As long as there are some, nobody else tells anything."""
        with self._changed:
            known = len(self._kept) - (self._number - self._told)  # kept, and told
            return list(itertools.islice(self._kept, max(0, known), max(0, known) + AT_ONCE))

    def acknowledge(self, number: int) -> None:
        """All up to ``number`` need not be told again."""
        with self._changed:
            while self._kept and self._kept[0][0] <= number:
                self._kept.popleft()
            self._changed.notify_all()

    def go_on(self, channel: Channel, heard: int) -> int:
        """Over ``channel`` from now on: first what its controller has not ``heard``. Returns how
        many messages that was."""
        with self._changed:
            self.acknowledge(heard)
            self._channel, self._told = channel, self._number - len(self._kept)
            again = len(self._kept)
        self.catch_up()
        return again

    def await_room(self, timeout_s: float) -> bool:
        """Waits while so much is kept that no more is to be made: nothing is ever dropped. False:
        there is still no room after ``timeout_s``.

        A worker comes here at the end of a step. It waits where its controllers could make nothing
        durable for thousands of steps; not longer than it has, or looks for, a controller. To one
        that lives it looks hung by then, and is replaced after ``hang_timeout_s``.
        """
        if len(self._kept) < self._kept_max:
            return True
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closed or len(self._kept) < self._kept_max, timeout_s
            )

    def close(self) -> None:
        """Nothing will be acknowledged any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
