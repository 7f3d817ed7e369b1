"""Who listens: a socket at one address, and a thread for each who calls."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Callable

from elastic_ft.errors import ConfigError
from elastic_ft.transport.handshake import HANDSHAKE_S, WrongKey, WrongVersion, admit
from elastic_ft.transport.messages import Messages
from elastic_ft.transport.tls import JobKey, answer, server_context
from elastic_ft.transport.wire import Channel

STRANGERS_MAX = 64
BACKLOG = 1024  # of connections that wait to be accepted; the kernel may allow fewer
PAUSE_S = 0.1  # when there are no descriptors, or no threads, for another connection


class Reception:
    """Listens, and admits who has the key: each on a thread of its own, in HANDSHAKE_S.

    Who says nothing (a port scanner, a stopped process) keeps nobody else out: no more than
    STRANGERS_MAX wait to be admitted, the oldest is dropped for the next.

    Args:
        host, ports: the one address to listen at, one of these ports.
        receives: what those who are admitted may send.
        serve: told each channel, on its thread; it is closed when that returns.
    """

    def __init__(
        self,
        name: str,
        host: str,
        key: JobKey,
        receives: Messages,
        serve: Callable[[Channel], object],
        ports: range | None = None,
    ) -> None:
        self._name, self._key, self._receives, self._serve = name, key, receives, serve
        self._tls = server_context(key)
        self._listener = listen(host, ports)
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._channels: set[Channel] = set()
        self._closed = threading.Event()
        self._acceptor = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._drop_strangers(0)
                    self._closed.wait(PAUSE_S)
                continue  # gone before it was accepted
            with self._lock:
                self._strangers[sock] = None
            self._drop_strangers(STRANGERS_MAX)
            try:
                threading.Thread(
                    target=self._receive, args=(sock,), name=self._name, daemon=True
                ).start()
            except RuntimeError:  # the machine has no more threads to give
                self._forget(sock)
                sock.close()
                self._closed.wait(PAUSE_S)

    def _drop_strangers(self, left: int) -> None:
        """Until ``left`` are left, the oldest first; their threads close them."""
        with self._lock:
            for sock in list(self._strangers)[: max(0, len(self._strangers) - left)]:
                del self._strangers[sock]
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _forget(self, sock: socket.socket) -> bool:
        """Whether it was not dropped before."""
        with self._lock:
            known = sock in self._strangers
            self._strangers.pop(sock, None)
            return known

    def _receive(self, sock: socket.socket) -> None:
        try:
            deadline_s = time.monotonic() + HANDSHAKE_S
            line = answer(sock, self._tls, deadline_s)
            session = admit(line, self._key.secret, deadline_s)
        except (OSError, EOFError, WrongKey, WrongVersion):
            self._forget(sock)
            sock.close()
            return
        channel = Channel(line, session, self._receives)
        with self._lock:
            self._channels.add(channel)
            self._strangers.pop(sock, None)
        try:
            if not self._closed.is_set():
                self._serve(channel)
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)

    def close(self) -> None:
        """Ends every connection. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor; closing would not
        if self._acceptor.is_alive():
            self._acceptor.join(HANDSHAKE_S)
        self._listener.close()
        self._drop_strangers(0)
        with self._lock:
            channels = tuple(self._channels)
        for channel in channels:
            channel.close()


def listen(host: str, ports: range | None = None) -> socket.socket:
    """A listening socket at ``host`` alone, its port one of ``ports``.

    Raises ConfigError where none of them is free, OSError where ``host`` is not of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or (0,):
        try:
            return socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    assert ports is not None
    raise ConfigError(f"network.ports: none of {ports[0]}-{ports[-1]} is free at {host}")
