"""The connection between a controller and its workers: core events up, core commands down.

One authenticated connection per worker (``multiprocessing.connection``: an HMAC challenge with the
job's random key, then pickles). Its end is the first sign of a worker's death, and of a
controller's.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from multiprocessing.context import AuthenticationError
from typing import Any, Literal

from elastic_ft.config import Job
from elastic_ft.core.events import Assignment, Member, WorkerId
from elastic_ft.runtime.faults import Fault

SEND_TIMEOUT_S = 3.0  # for the other end to take what was sent to it

# ---------------------------------------------------------------- messages beside core's own


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's first message."""

    member: Member


@dataclass(frozen=True, slots=True)
class Welcome:
    """The controller's answer: all that a worker needs to know."""

    job: Job
    run: str  # unique per controller start; part of every object it writes
    checkpoint_url: str
    store: tuple[str, int]  # address of the TCPStore through which groups form
    faults: tuple[Fault, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)  # that the run reads; none known: {}


@dataclass(frozen=True, slots=True)
class Form:
    assignment: Assignment
    extra: Any = None  # of the host, for the worker's ``on_generation`` hook
    fired: frozenset[int] = frozenset()  # faults that have fired
    checkpointed_step: int = 0  # of the newest committed checkpoint


class Pickled:
    """What is sent to everyone: pickled and compressed once, and itself again on arrival."""

    def __init__(self, value: Any) -> None:
        self._data = zlib.compress(pickle.dumps(value), level=1)

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return _unpickled, (self._data,)


def _unpickled(data: bytes) -> Any:
    return pickle.loads(zlib.decompress(data))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    worker: WorkerId
    step: int
    place: int  # points that the training thread has reached in this step
    points: int  # points reached in all, background work included
    point: str


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What a node's keeper sees of it, in bytes."""

    node: str
    keeper_memory: int  # snapshots that the keeper owns
    node_memory_free: int
    node_disk_free: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the journal that decides nothing."""

    worker: WorkerId
    generation: int
    event: str
    reason: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inspect:
    """To a worker that seems to hang, and to its node's keeper: where does it stand?"""

    worker: WorkerId
    pid: int


@dataclass(frozen=True, slots=True)
class Stood:
    """Where a worker's training thread stood. Empty: that is not known.

    Attributes:
        by: who says so.
        frames: of its stack, innermost first.
        process: what the kernel says of the process.
        last: nothing more will be said.
    """

    worker: WorkerId
    by: Literal["worker", "keeper"]
    step: int = 0
    point: str = ""
    frames: tuple[str, ...] = ()
    process: dict[str, Any] = field(default_factory=dict)
    last: bool = False


@dataclass(frozen=True, slots=True)
class FaultFired:
    worker: WorkerId
    index: int
    step: int
    at_s: float


# ------------------------------------------------------------------------------- both ends


class CutOff(EOFError):
    """What was sent to the other end has not arrived there for too long."""


class Channel:
    """One end of a connection; ``send`` may be called from any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._unheard = False

    def send(self, message: Any) -> bool:
        """Returns False if the other end is gone, or takes nothing any more (``limit``): that has
        been or will be noticed by reading."""
        with self._lock:
            try:
                self._connection.send(message)
            except (OSError, ValueError) as error:
                self._unheard = self._unheard or isinstance(error, TimeoutError)
                if isinstance(error, BlockingIOError):  # half a message is of use to nobody
                    self.close()
                return False
        return True

    def receive(self, timeout_s: float | None = None) -> Any:
        """Blocks. Raises EOFError when the other end is gone, or silent for ``timeout_s``; CutOff
        when it can't be reached (``end_when_unheard``)."""
        try:
            if timeout_s is not None and not self._connection.poll(timeout_s):
                raise EOFError(f"nothing heard for {timeout_s:g} s")
            return self._connection.recv()
        except TimeoutError as error:
            raise CutOff(str(error)) from None
        except EOFError as error:
            if self._unheard:  # a sender was told so, and the kernel tells once
                raise CutOff(str(error)) from None
            raise
        except (OSError, TypeError) as error:  # closed under our hands
            raise EOFError(str(error)) from None

    def limit(self, send_s: float, receive_s: float | None = None) -> None:
        """From now on sending fails that can't go on for ``send_s``, and so does receiving a
        message that stops half-way for ``receive_s``. The connection is of no use then."""
        limits = ((socket.SO_SNDTIMEO, send_s), (socket.SO_RCVTIMEO, receive_s))
        with socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
            for option, limit_s in limits:
                if limit_s is not None:
                    copy.setsockopt(socket.SOL_SOCKET, option, timeval(limit_s))

    @property
    def own_address(self) -> str:
        """This machine's, as the other end sees it."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
            return str(copy.getsockname()[0])

    def end_when_unheard(self, timeout_s: float) -> None:
        """The kernel ends the connection once something sent has not arrived for so long.

        So whoever sends heartbeats and is cut off, in either direction, knows it in time (I1). A
        controller that is stopped, or slow, is no cut: its kernel still acknowledges.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            with socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
                timeout_ms = int(timeout_s * 1000)
                copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def close(self) -> None:
        """Ends the connection; whoever blocks in ``receive`` is woken."""
        with self._closing:
            if self._connection.closed:
                return
            try:
                with socket.socket(fileno=os.dup(self._connection.fileno())) as copy:
                    copy.shutdown(socket.SHUT_RDWR)  # close alone leaves a reader blocked
            except OSError:
                pass  # the other end was faster
            self._connection.close()


def timeval(seconds: float) -> bytes:
    """For SO_SNDTIMEO and SO_RCVTIMEO."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def dial(address: tuple[str, int], key: bytes, timeout_s: float) -> Channel:
    """Connects to a listener and is admitted, each within ``timeout_s`` of silence.

    Raises OSError, EOFError or AuthenticationError.
    """
    with socket.create_connection(address, timeout_s) as sock:
        sock.settimeout(None)
        connection = Connection(sock.detach())
    channel = Channel(connection)
    try:
        channel.limit(timeout_s, timeout_s)
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
    except BaseException:
        channel.close()
        raise
    return channel


def connect(address: tuple[str, int], key: bytes, member: Member) -> tuple[Channel, Welcome]:
    """Connects a worker. Raises OSError, EOFError or AuthenticationError."""
    channel = Channel(Client(address, authkey=key))
    channel.send(Hello(member))
    welcome = channel.receive()
    assert isinstance(welcome, Welcome)
    channel.end_when_unheard(welcome.job.elastic.heartbeat_timeout_s)
    return channel, welcome


class ControlServer:
    """Accepts workers and reads them, a thread each; what they say goes to ``on_message``."""

    def __init__(
        self,
        host: str,
        welcome: Callable[[Member], Welcome],
        on_message: Callable[[Member, Any], None],
        on_end: Callable[[Member, float], None],
    ) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), backlog=128)
        self._welcome, self._on_message, self._on_end = welcome, on_message, on_end
        self._channels: dict[WorkerId, Channel] = {}
        self._strangers: set[Channel] = set()  # not yet admitted
        self._heard: dict[WorkerId, float] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="control-accept", daemon=True)

    @property
    def port(self) -> int:
        return int(self._listener.address[1])

    def start(self) -> None:
        self._acceptor.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except OSError:
                continue  # gone before it was accepted
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _admit(self, connection: Connection) -> tuple[Channel, Member] | None:
        """Who connects, or None if it is not one of ours.

        In the connection's own thread: one that says nothing (a stopped process, a port scanner)
        keeps nobody else out.
        """
        channel = Channel(connection)
        with self._lock:
            self._strangers.add(channel)
        try:
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            hello = channel.receive()
        except (AuthenticationError, OSError, EOFError):
            hello = None
        finally:
            with self._lock:
                self._strangers.discard(channel)
        if isinstance(hello, Hello) and not self._closed:
            return channel, hello.member
        channel.close()
        return None

    def _serve(self, connection: Connection) -> None:
        admitted = self._admit(connection)
        if admitted is None:
            return
        channel, member = admitted
        channel.limit(SEND_TIMEOUT_S)  # who is stopped must not stop the controller
        with self._lock:
            self._channels[member.worker] = channel
            self._heard[member.worker] = time.monotonic()
        channel.send(self._welcome(member))
        while True:
            try:
                message = channel.receive()
            except EOFError:
                break
            if self._channels.get(member.worker) is not channel:
                break  # dismissed, or it has started again: this was its last life
            self._heard[member.worker] = time.monotonic()
            self._on_message(member, message)
        silent_s = self.silent_s(member.worker)
        with self._lock:
            superseded = self._channels.get(member.worker) is not channel
            if not superseded:
                del self._channels[member.worker]
        channel.close()
        if not superseded:  # a keeper that has started again is not lost with its last life
            self._on_end(member, silent_s)

    def send(self, worker: WorkerId, message: Any) -> bool:
        with self._lock:
            channel = self._channels.get(worker)
        return channel is not None and channel.send(message)

    def dismiss(self, worker: WorkerId, message: Any) -> None:
        """Ends its connection, ``message`` being the last it gets. Nothing of it counts any more,
        and its end is no news."""
        with self._lock:
            channel = self._channels.pop(worker, None)
        if channel is not None:
            channel.send(message)
            channel.close()

    def silent_s(self, worker: WorkerId) -> float:
        """Seconds since the worker's last message."""
        return time.monotonic() - self._heard.get(worker, time.monotonic())

    def connected(self) -> tuple[WorkerId, ...]:
        with self._lock:
            return tuple(self._channels)

    def close(self) -> None:
        """Ends every connection and the threads that read them. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), socket.create_connection(self._listener.address, 5):
            pass  # wakes the acceptor, which closing the listener would not
        self._acceptor.join(5)
        self._listener.close()
        with self._lock:
            channels = [*self._channels.values(), *self._strangers]
        for channel in channels:
            channel.close()
