"""A worker's, or keeper's, line to its controller, which outlives controllers.

Where one ends or falls silent, the next is looked for (``transport.succession``), called, and told
what the last one may not have made durable (``transport.outbox``). Nobody else waits for that: what
is said meanwhile is kept, and what is heard comes from whoever is the controller.

One that is silent and has no successor may go on: its connection stays, and is told nothing until
it is heard again. No worker calls the same controller twice: where its connection has ended it has
lost us, as it finds out once it goes on, and we wait for the next one. A keeper does: nothing takes
its place while its process lives, and what it has is of use (``core.adoption.keeper_returned``).
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_ft.core.assignment import Keeper, Member
from elastic_ft.core.commands import Bench, PauseWorkers, ReleaseWorker
from elastic_ft.storage.store import Store, open_store
from elastic_ft.transport import control
from elastic_ft.transport.messages import MessageRefused
from elastic_ft.transport.outbox import LineOutbox
from elastic_ft.transport.succession import Search, Succession
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Address, Channel, CutOff

log = logging.getLogger(__name__)
SAME_MAX = 5  # calls of one and the same controller: it may end the line for what it is told


class Lifeline:
    """``send`` and ``await_room`` are for any thread, ``receive`` is for one.

    Attributes:
        cut_off_s: if what was sent did not arrive, it may be this machine that is cut off from all
            others: for how long a successor is looked for while no object store answers, either.
            One that does answer says that it is the controller's machine. None: as after any end.
        keeper: where this process serves, if it is one.

    Raises OSError, EOFError, WrongKey or WrongVersion where there is no first controller.
    """

    def __init__(self, address: Address, key: JobKey, member: Member) -> None:
        self._hello = control.Hello(member, secrets.token_hex(4))
        self._key, self._address, self._same = key, address, 0
        self.cut_off_s: float | None = None
        self._line = control.connect(
            address, key, self._hello
        )  # the channel, and whose it is: one value
        self.keeper: Keeper | None = None
        self._timeout_s = self.welcome.job.elastic.heartbeat_timeout_s
        self._generation, self._heard_at_s, self._searches = 0, time.monotonic(), False
        keeps = self.welcome.successor_s > 0
        self._outbox = LineOutbox(self._channel, self._is_silent, keeps=keeps)
        self._bound(self._channel, self.welcome)
        self._opened: Store | None = None
        self._over = threading.Event()  # nobody is looked for any more
        self._changed: Callable[[control.Welcome], None] = lambda welcome: None
        self._succession = Succession(
            self._timeout_s, lambda: self.silent_s, self._controller, self._store
        )

    def start(self, changed: Callable[[control.Welcome], None]) -> None:
        """``changed``: told, in the thread that reads, of each new controller before it is told
        anything."""
        self._changed = changed
        self._succession.start()

    @property
    def welcome(self) -> control.Welcome:
        return self._line[1]

    @property
    def _channel(self) -> Channel:
        return self._line[0]

    def _controller(self) -> tuple[int, Channel]:
        channel, welcome = self._line
        return welcome.owner, channel

    def _store(self, deadline_s: float) -> Store:
        if self._opened is None:
            self._opened = open_store(self.welcome.checkpoint_url)
        return self._opened.within(deadline_s)

    @property
    def silent_s(self) -> float:
        """Since the controller's last message."""
        return time.monotonic() - self._heard_at_s

    def _is_silent(self) -> bool:
        return self.silent_s > self._timeout_s

    def _bound(self, channel: Channel, welcome: control.Welcome) -> None:
        """Who trains does not wait for a controller that takes nothing: its line ends."""
        if welcome.successor_s:
            channel.limit(control.SEND_TIMEOUT_S)

    @property
    def own_address(self) -> str:
        """This machine's, as the controller sees it."""
        return self._channel.own_address

    def send(self, message: Any) -> bool:
        """Returns False if it did not go out; see ``LineOutbox.send``."""
        return self._outbox.send(message)

    def await_room(self, timeout_s: float) -> bool:
        return self._outbox.await_room(timeout_s)

    def receive(self) -> Any:
        """What a controller says. Raises EOFError as ``Channel.receive``, once the last one is
        gone and there is no other, or it can't be looked for."""
        try:
            return self._receive()
        except EOFError:
            self._outbox.close()
            raise
        except Exception as error:  # whoever reads would be gone, and nobody would know
            self._outbox.close()
            log.exception("the line to the controller ends")
            raise EOFError(f"{type(error).__name__}: {error}") from error

    def _receive(self) -> Any:
        while True:
            try:
                message = self._channel.receive()
            except EOFError as error:
                if self._follow(error):
                    continue
                raise
            self._heard_at_s = time.monotonic()
            self._outbox.catch_up()
            match message:
                case control.Acknowledged(sender=sender, number=number):
                    if sender == self._hello.sender:
                        self._outbox.acknowledge(number)
                    continue
                case PauseWorkers(generation=generation) | Bench(generation=generation):
                    self._generation = max(generation, self._generation)
                case control.Form():
                    self._generation = max(message.assignment.generation, self._generation)
                case control.Farewell() | ReleaseWorker():
                    self._over.set()
            return message

    def _follow(self, error: EOFError) -> bool:
        """Whether there is another controller."""
        within_s, unread_s = self.welcome.successor_s, math.inf
        if isinstance(error, CutOff) and self.cut_off_s is not None:
            unread_s = self.cut_off_s
        if not within_s or self._over.is_set() or isinstance(error, MessageRefused):
            return False
        self._channel.close()
        hello = replace(
            self._hello, owner=self.welcome.owner, generation=self._generation, keeper=self.keeper
        )
        url = self.welcome.checkpoint_url
        remote = "://" in url and not url.startswith("file://")
        same = self._address if self.keeper is not None and self._same < SAME_MAX else None
        search = Search(self._store, self._key, hello, self._timeout_s, remote=remote, same=same)
        self._searches = True
        found = search.run(within_s, self._over, unread_s=unread_s)
        self._searches = False
        if found is None:
            return False
        channel, welcome = found
        self._same = self._same + 1 if welcome.owner == hello.owner else 0
        self._address, self._heard_at_s = search.called, time.monotonic()
        self._line = found
        self._bound(channel, welcome)
        if self._over.is_set():  # meanwhile
            channel.close()
        self._changed(welcome)
        again = self._outbox.go_on(channel, welcome.heard)
        log.info("controller %d is called: %d messages told again", welcome.owner, again)
        return True

    @property
    def is_alone(self) -> bool:
        """The controller has ended, or says nothing, and another one may follow."""
        return (self._searches or self._is_silent()) and not self.is_closed

    @property
    def is_closed(self) -> bool:
        """No controller is there, and none is looked for."""
        return self._over.is_set() or not self.welcome.successor_s

    def stop(self) -> None:
        """No other controller is looked for. What is to be said can still be sent."""
        self._over.set()
        self._succession.close()

    def close(self) -> None:
        self.stop()
        self._outbox.close()
        self._channel.close()
