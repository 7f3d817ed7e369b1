"""Where workers and keepers reach the controller, and the store through which they form groups."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from elastic_ft.controller.hearing import Hearing
from elastic_ft.core import commands as cmd
from elastic_ft.core.assignment import KEEPER, WorkerId
from elastic_ft.transport.control import WELCOME_TIMEOUT_S, ControlServer, Farewell, Hello, Welcome
from elastic_ft.transport.reception import listen
from elastic_ft.transport.tls import JobKey


class Connections:
    """The control server and the TCPStore; both are open from ``open`` to ``close``.

    ``send``, ``send_all``, ``dismiss`` and ``hang_up`` are for any thread, and wait for nobody: who
    does not take what it is sent is cut off (``transport.control``).

    Attributes:
        address: this machine's, as workers reach it.
        ports: to listen on; None: the kernel's choice.
    """

    def __init__(
        self,
        address: str,
        ports: range | None,
        *,
        tls: bool = False,
        key: JobKey | None = None,
    ) -> None:
        """``key``: of the job; None: a new one. ``tls``: such a new one is for TLS."""
        self.address, self.ports, self._tls, self._key = address, ports, tls, key
        self._store: Future[Any] | None = None
        self._server: ControlServer | None = None

    def open(self, welcome: Callable[[Hello], Welcome], hearing: Hearing) -> None:
        """``welcome``: for who has connected; called in the thread that reads it.

        What keeps the store from being served comes into the inbox. Raises ConfigError where
        there is no port for it, or for the server.
        """
        listener = listen(self.address, self.ports)
        try:
            self._server = ControlServer(
                self.address,
                welcome,
                hearing.on_message,
                hearing.on_connection_end,
                hearing.on_refused,
                self.ports,
                tls=self._tls,
                key=self._key,
            )
        except BaseException:
            listener.close()
            raise
        starting = ThreadPoolExecutor(1, thread_name_prefix="tcp-store")
        self._store = starting.submit(self._serve_store, listener)
        self._store.add_done_callback(hearing.on_store)
        starting.shutdown(wait=False)
        self._server.start()

    def _serve_store(self, listener: socket.socket) -> Any:
        """torch takes seconds to import: workers are started meanwhile."""
        with listener:
            from elastic_ft.groups.store_links import serve_store

            return serve_store(self.address, listener)

    @property
    def was_opened(self) -> bool:
        return self._server is not None

    @property
    def server(self) -> ControlServer:
        assert self._server is not None, "open() comes first"
        return self._server

    @property
    def store(self) -> tuple[str, int]:
        """The TCPStore's address, once it is there."""
        assert self._store is not None, "open() comes first"
        return self.address, self._store.result(WELCOME_TIMEOUT_S).port

    def send(self, worker: WorkerId, message: Any) -> bool:
        """A worker that can't be reached is lost; the connection's end says so."""
        return self.server.send(worker, message)

    def hang_up(self, worker: WorkerId) -> None:
        self.server.hang_up(worker)

    def await_workers_end(self, timeout_s: float, meanwhile: Callable[[], object]) -> None:
        """Gives released workers a moment to end by themselves. ``meanwhile`` waits a little."""
        deadline_s = time.monotonic() + timeout_s
        while self._are_workers_connected() and time.monotonic() < deadline_s:
            meanwhile()

    def _are_workers_connected(self) -> bool:
        return any(not name.startswith(KEEPER) for name in self.server.connected())

    def release_keepers(self) -> None:
        """The job has ended in good order: what they have is of no use any more."""
        for name in self.server.connected() if self.was_opened else ():
            if name.startswith(KEEPER):
                self.send(name, cmd.ReleaseWorker(name, "the job has ended"))

    def say_farewell(self) -> None:
        """To all: this controller ends and meant to, nobody comes after it."""
        if self._server is not None:
            self._server.send_all(Farewell())

    def close(self) -> None:
        """Idempotent. The store is closed with its last reference."""
        if self._server is not None:
            self._server.close()
        self._store = None
