"""A job's checkpoint store, and the controllers that have it one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_ft.core.assignment import Member
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store, open_store
from elastic_ft.transport.control import TO_CONTROLLER, ControlServer, Hello, Pulse, Welcome
from elastic_ft.transport.lifeline import Lifeline
from elastic_ft.transport.reception import Reception
from elastic_ft.transport.succession import Search, format_address
from elastic_ft.transport.tls import new_key
from elastic_ft.transport.wire import Channel
from tests.multiproc.harness import make_job

MEMBER = Member("w0", "n0", "localhost", 1)
SOON_S = 10.0
TOLD_S = 60.0  # for megabytes to be read, on a busy machine


@contextlib.contextmanager
def pulsing(send: Callable[[Pulse], object]) -> Iterator[None]:
    """As controllers do: whoever hears one goes on telling what there was no room for."""
    over = threading.Event()

    def pulse() -> None:
        while not over.wait(0.05):
            send(Pulse())

    thread = threading.Thread(target=pulse, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SOON_S)


class Reigning:
    """A controller that has the job, as far as its connections go."""

    def __init__(self, realm: Realm, *, named: str = "") -> None:
        self.messages: list[Any] = []
        self.told, self.ended = threading.Condition(), threading.Event()
        self.server = ControlServer(
            "127.0.0.1", realm.welcome, self._hear, lambda *_: self.ended.set(), key=realm.key
        )
        self.server.start()
        self.address = ("127.0.0.1", self.server.port)
        realm.take_over(named or format_address(self.address))

    def _hear(self, hello: Hello, message: Any) -> None:
        with self.told:
            self.messages.append(message)
            self.told.notify_all()

    def wait(self, condition: Callable[[list[Any]], object]) -> None:
        with self.told:
            assert self.told.wait_for(lambda: condition(self.messages), TOLD_S), self.messages


class Stopping:
    """A controller that welcomes one, and is stopped until it ``goes_on``: it reads nothing."""

    def __init__(self, realm: Realm) -> None:
        self.messages: list[Any] = []
        self.told, self.ended = threading.Condition(), threading.Event()
        self.goes_on = threading.Event()
        self._realm = realm
        self.reception = Reception("stopping", "127.0.0.1", realm.key, TO_CONTROLLER, self._serve)
        self.reception.start()
        self.address = ("127.0.0.1", self.reception.port)
        realm.take_over(format_address(self.address))

    def _serve(self, channel: Channel) -> None:
        try:
            channel.send(self._realm.welcome(channel.receive()))
            self.goes_on.wait()
            with pulsing(channel.send):
                while True:
                    message = channel.receive()
                    with self.told:
                        self.messages.append(message)
                        self.told.notify_all()
        except EOFError:
            self.ended.set()

    def wait(self, condition: Callable[[list[Any]], object]) -> None:
        with self.told:
            assert self.told.wait_for(lambda: condition(self.messages), TOLD_S), len(self.messages)


class Realm:
    """A checkpoint store, and who has the job there, one after the other."""

    def __init__(self, path: Path) -> None:
        self.url, self.key = str(path), new_key(tls=False)
        self.store, self.number = open_store(self.url), 0
        self.timeout_s, self.successor_s = 1.0, SOON_S
        self.closing: list[Callable[[], object]] = []

    def take_over(self, address: str) -> None:
        self.number += 1
        owners.take_over(self.store, job="j", run=f"r{self.number}", run_folder="", address=address)

    def welcome(self, hello: Hello) -> Welcome:
        job = make_job(elastic={"heartbeat_timeout_s": self.timeout_s})
        number, store = self.number, ("127.0.0.1", 1)
        return Welcome(job, "r1", self.url, store, owner=number, successor_s=self.successor_s)

    def reigning(self, **kwargs: Any) -> Reigning:
        made = Reigning(self, **kwargs)
        self.closing.append(made.server.close)
        return made

    def stopping(self) -> Stopping:
        made = Stopping(self)
        self.closing += [made.reception.close, made.goes_on.set]
        return made

    def stopped(self) -> threading.Event:
        """One that admits who calls, and is stopped before it says a word; set: it was called."""
        called, over = threading.Event(), threading.Event()

        def serve(channel: Channel) -> None:
            channel.receive()
            called.set()
            over.wait()

        reception = Reception("stopped", "127.0.0.1", self.key, TO_CONTROLLER, serve)
        reception.start()
        self.closing += [reception.close, over.set]
        self.take_over(format_address(("127.0.0.1", reception.port)))
        return called

    def lifeline(self, first: Reigning | Stopping) -> Lifeline:
        made = Lifeline(first.address, self.key, MEMBER)
        self.closing.append(made.close)
        return made

    def search(self, number: int = 1, store: Callable[[float], Store] | None = None) -> Search:
        return Search(
            store or (lambda _: self.store),
            self.key,
            Hello(MEMBER, owner=number),
            1.0,
            remote=False,
        )
