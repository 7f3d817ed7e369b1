"""What a process tells its controllers, kept until one of them has it where the next can read it.

Each event, note and fired fault gets a number, from 1. A controller journals it with the message,
and acknowledges what is durable; who loses its controller tells the next one the rest again, and
that one leaves out what it has. So nothing that was told is lost, and nothing counts twice.
Heartbeats and the like are of the moment: they have no number, and are never told again.

Who is silent, or takes nothing, is told nothing: a controller that is stopped takes no bytes, and
once its buffers were full training would wait for it, and the kernel end the connection. It is told
the rest as soon as it is heard again, by the thread that hears it: no other waits for that.

What is told of one step after another may wait a moment for what comes next, and goes out with it:
each message that goes alone wakes a thread at the other end, which at short steps takes as much of
a processor as the rest of the telling. A heartbeat is such a next one, if nothing else is.
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
STEPS_EVERY_S = 0.2  # a step's word waits for the next message, if the last one is no older
KEPT_MAX = 100_000  # messages, some 50 MB: an hour of steps, ten a second
NUMBERED = frozenset({*typing.get_args(ev.Event), Note, FaultFired})
PATIENT = frozenset({ev.StepApplied})


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
        self._waiting: list[Encoded] = []  # of the newest: what goes out with the next message
        self._patient_until_s = 0.0
        self._closed = False

    def send(self, message: Any) -> bool:
        """Returns False if it did not go out: what is numbered will, to this controller once it is
        heard again, or to the next."""
        if type(message) not in NUMBERED:
            with self._changed:
                self._tell_waiting()
            return self._takes_more() and self._channel.send(message)
        with self._changed:  # they go out in the order of their numbers
            encoded = Encoded(Numbered(self._number + 1, message) if self._keeps else message)
            is_behind = self._keeps and self._told < self._number - len(self._waiting)
            self._number += 1
            if self._keeps:
                self._kept.append((self._number, encoded))
            if is_behind:
                return False
            self._waiting.append(encoded)
            is_patient, now_s = type(message) in PATIENT, time.monotonic()
            if is_patient and now_s < self._patient_until_s:
                return True
            self._patient_until_s = now_s + STEPS_EVERY_S if is_patient else 0.0
            return self._tell_waiting()

    def _tell_waiting(self) -> bool:
        """What does not go out now is held back with the rest. With the lock."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return True
        if not (self._takes_more() and self._channel.send(*waiting)):
            return False
        self._told = self._number
        return True

    def _takes_more(self) -> bool:
        if not self._keeps:
            return True
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
            known = max(0, len(self._kept) - (self._number - self._told))  # kept, and told
            until = min(known + AT_ONCE, len(self._kept) - len(self._waiting))
            return list(itertools.islice(self._kept, known, max(known, until)))

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
            self._waiting = []  # with the rest
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
