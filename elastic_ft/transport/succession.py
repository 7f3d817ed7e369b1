"""Who has the job after a controller that is gone, or says nothing: the checkpoint store knows.

A controller's end is heard at once, that of its connection. One that is stopped (SIGSTOP, a machine
that is moved) keeps its connections: its kernel answers for it. Then whoever has the job by now is
known to the store alone (``storage.owners``).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial

from elastic_ft.errors import ElasticError
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store
from elastic_ft.transport.control import PULSES_PER_TIMEOUT, Hello, Welcome, connect
from elastic_ft.transport.handshake import HANDSHAKE_S, WrongKey, WrongVersion
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Address, Channel

log = logging.getLogger(__name__)
LOOK_UP_S = 5.0  # for an owner's object, with retries; then it is asked for again,
LOOK_UP_MAX_S = 20.0  # and once for longer: the store may be slow. As storage.kinds.READ_TIMEOUT_S
LOOK_S, LOOK_MAX_S = 0.02, 0.25  # between two looks: at first, and later
LOOK_REMOTE_S, LOOK_REMOTE_MAX_S = 0.2, 2.0  # the same, of a store that is no folder
SLOWER = 1.5
SAME_S = 0.5  # for the present controller to answer a call: it may be what is gone
PORTS = 1 << 16


class _Patience:
    """How long a look into the store may take: twice as long after each that came to nothing."""

    def __init__(self) -> None:
        self._s = LOOK_UP_S

    def at_most(self, left_s: float) -> float:
        return min(self._s, max(LOOK_UP_S, left_s))

    def grow(self) -> None:
        self._s = min(2 * self._s, LOOK_UP_MAX_S)


class Succession(threading.Thread):
    """Ends the connection to a controller that is silent and has a successor.

    The one who reads there goes on as if the controller had ended. A silent one without a
    successor, or with a store that can't tell, is waited for.

    Args:
        silent_s: since the controller's last message.
        controller: its number, and its connection. Both are taken before the store is asked: by
            the time that it answers the one who reads may have another controller.
        store: its calls take at most so many seconds.
    """

    def __init__(
        self,
        timeout_s: float,
        silent_s: Callable[[], float],
        controller: Callable[[], tuple[int, Channel]],
        store: Callable[[float], Store],
    ) -> None:
        super().__init__(name="succession", daemon=True)
        self._timeout_s, self._silent_s = timeout_s, silent_s
        self._controller, self._store = controller, store
        self._closed, self._patience = threading.Event(), _Patience()

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        ended = None  # the one whose connection was: whoever reads there may take its time
        while not self._closed.wait(self._timeout_s / PULSES_PER_TIMEOUT):
            number, channel = self._controller()
            silent_s = self._silent_s()
            if number == ended or silent_s <= self._timeout_s:
                continue
            if self._is_over(number, silent_s):
                ended = number
                channel.close()

    def _is_over(self, number: int, silent_s: float) -> bool:
        store = self._store(self._patience.at_most(math.inf))
        try:
            successor = owners.successor(store, number)
        except ElasticError as error:  # not known: it is asked again
            self._patience.grow()
            log.warning("the controller is silent for %.0f s, and %s", silent_s, error)
            return False
        if successor is not None:
            log.warning("the controller is silent for %.0f s, and %s", silent_s, successor)
        return successor is not None


class Search:
    """For the controller after owner ``number``.

    Args:
        store: its calls take at most so many seconds.
        hello: to it.
        unheard_s: ``Channel.end_when_unheard`` of whoever is called.
        remote: the store is no folder, and looked at less often.
        same: where owner ``number`` listens, who is called again while there is none after it: the
            line to it may be all that has ended. None: it is not.

    Attributes:
        called: who was found listens there.
    """

    def __init__(
        self,
        store: Callable[[float], Store],
        key: JobKey,
        hello: Hello,
        unheard_s: float,
        *,
        remote: bool,
        same: Address | None = None,
    ) -> None:
        self._store, self._key, self._hello = store, key, hello
        self._same, self.called = same, ("", 0)
        self._unheard_s, self._remote = unheard_s, remote
        self._read_at_s = time.monotonic()  # the store, when last
        self._pause_s, self._pause_max_s = LOOK_S, LOOK_MAX_S
        if remote:
            self._pause_s, self._pause_max_s = LOOK_REMOTE_S, LOOK_REMOTE_MAX_S
        self._trouble, self._patience = "", _Patience()

    def run(
        self, within_s: float, over: threading.Event, *, unread_s: float = math.inf
    ) -> tuple[Channel, Welcome] | None:
        """The connection to it. None: nobody came ``within_s``, the store could not be read for
        ``unread_s``, nobody is adopted by who came, or it was ``over`` before.

        A folder counts as not read: it may be this machine's own, and say nothing of the network.
        """
        self._read_at_s = time.monotonic()
        until_s, pause_s = self._read_at_s + within_s, self._pause_s
        while not over.is_set():
            # A look that begins in time may end later: who is found then is called all the same.
            began_s = time.monotonic()
            cut_off_in_s = self._read_at_s + unread_s - began_s
            number, newest = self._newest(self._hello.owner, cut_off_in_s)
            if newest is not None and not newest.address:
                log.warning("run %s, on %s, has the job now, alone", newest.run, newest.host)
                return None
            now_s = time.monotonic()
            left_s = min(until_s, self._read_at_s + unread_s) - now_s
            if newest is not None and began_s < until_s:
                left_s = max(left_s, LOOK_UP_S)
            if left_s <= 0:
                after_s = now_s - until_s + within_s
                log.warning("nobody has the job after %.0f s%s", after_s, self._trouble)
                return None
            over_now = partial(self._is_over, number, over)
            if found := self._call_one(newest, left_s, over_now):
                return found
            over.wait(min(pause_s * random.uniform(0.75, 1.25), left_s))
            pause_s = min(SLOWER * pause_s, self._pause_max_s)
        return None

    def _newest(self, number: int, left_s: float) -> tuple[int, owners.Owner | None]:
        """The newest owner after ``number``, and its own; None: there is none, or none is known.
        ``left_s``: to look for it."""
        store = self._store(self._patience.at_most(left_s))
        try:
            found = owners.newest_after(store, number)
        except ElasticError as error:  # it is asked again
            self._trouble = f": {error}"
            self._patience.grow()
            return number, None
        if self._remote:
            self._read_at_s = time.monotonic()
        return found or (number, None)

    def _is_over(self, number: int, over: threading.Event) -> bool:
        """Whether owner ``number``, that has been called and says nothing, is to be waited for no
        longer: it may be stopped, or its machine gone, and the store alone knows who comes next."""
        return over.is_set() or self._newest(number, 0.0)[1] is not None

    def _call_one(
        self, newest: owners.Owner | None, left_s: float, is_over: Callable[[], bool]
    ) -> tuple[Channel, Welcome] | None:
        """``newest``: of those after the present controller, if there is any."""
        if newest is not None:
            return self._call(newest.address, self._hello.owner + 1, left_s, left_s, is_over)
        if self._same is not None:
            same = format_address(self._same)
            return self._call(same, self._hello.owner, SAME_S, left_s, is_over)
        return None

    def _call(
        self, address: str, least: int, dial_s: float, left_s: float, is_over: Callable[[], bool]
    ) -> tuple[Channel, Welcome] | None:
        """None: it is not there yet, or no more, or it is none of ours: anybody may write such an
        address. ``least``: an older one than this number is none, either."""
        try:
            self.called = parse_address(address)
            channel, welcome = connect(
                self.called,
                self._key,
                self._hello,
                min(dial_s, HANDSHAKE_S, left_s),
                left_s,
                unheard_s=self._unheard_s,
                is_over=is_over,
            )
        except (OSError, EOFError, ValueError, WrongKey, WrongVersion) as error:
            self._trouble = f": {address}: {type(error).__name__}: {error}"
            return None
        if welcome.owner < least:
            self._trouble = f": {address} is an older one, number {welcome.owner}"
            channel.close()
            return None
        return channel, welcome


def parse_address(text: str) -> Address:
    """Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not 0 < int(port) < PORTS:  # else the socket says so, with an OverflowError
        raise ValueError(f"{text!r:.80} has no port below {PORTS:,}")
    return host.strip("[]"), int(port)


def format_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
