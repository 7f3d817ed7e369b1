"""Messages between the processes of a job: framed, typed, and sealed with the job's key.

A connection begins with a handshake. Each end sends a nonce and the versions that it speaks, and
proves that it has the job's key (HMAC-SHA256 over all that was said, so nobody in between can
change it); both derive the connection's own keys from that, one for each direction. From then on a
frame is

    length: 4 bytes | message: msgpack [kind, fields] | seal: 16 bytes

where the seal is an HMAC-SHA256, cut short, over the frame's number and the message. So who sits
between two ends, or takes over the port of one that has died, can end their connection and can't
do anything else: not read on another's behalf, inject, replay, leave out or reorder.

What arrives is data: a kind that this end expects, with fields of the types that its class
declares (``core.typed``), or it is refused (MessageRefused), which ends the connection.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import secrets
import select
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]
from pydantic import BaseModel

from elastic_ft.core.typed import Decode, Undecodable, decoder, fields_of
from elastic_ft.errors import ConfigError, ElasticError

VERSION, OLDEST = 1, 1  # of the messages: what this release speaks, and what it still understands
MAGIC = b"elastic\n"
HELLO = struct.Struct("!8sHH32s")  # magic, newest version, oldest version, nonce
PROOF_BYTES = 32
LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!Q")
SEAL_BYTES = 16
SLICE_BYTES = 1 << 20  # of a large message: one is sealed while the one before is on its way
SMALL_BYTES = 1 << 16  # sent in one piece
HANDSHAKE_S = 5.0
STRANGERS_MAX = 64
BACKLOG = 1024  # of connections that wait to be accepted; the kernel may allow fewer
PAUSE_S = 0.1  # when there are no descriptors, or no threads, for another connection
MESSAGE_BYTES_MAX = 64 << 20
UNPACKED_BYTES_MAX = 256 << 20  # of a compressed part
COMPRESSED = 1  # msgpack's number for our kind of part

Address = tuple[str, int]


class MessageRefused(EOFError):
    """A message that is not what this end may be sent. Its connection is of no use any more."""


class WrongKey(ElasticError):
    """The other end does not have this job's key."""


class WrongVersion(ElasticError):
    """The two ends have no version of the messages in common. One line names both."""


class CutOff(EOFError):
    """What was sent to the other end has not arrived there for too long."""


# ------------------------------------------------------------------------------- messages


class Packed:
    """A field of what is sent to everyone: packed and compressed once, and itself on arrival."""

    def __init__(self, value: Any) -> None:
        self.part = msgpack.ExtType(COMPRESSED, zlib.compress(pack(value), level=1))


class Encoded:
    """A message for several connections, made once."""

    def __init__(self, message: Any) -> None:
        self.body = encode(message)


def encode(message: Any) -> bytes:
    """Raises TypeError where a field holds what is no plain value."""
    return pack([type(message).__name__, message])


def pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, default=_plain)
    return packed


def _plain(value: Any) -> Any:
    if isinstance(value, Packed):
        return value.part
    if is_dataclass(value):
        return fields_of(value)
    if isinstance(value, (frozenset, set)):
        return list(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if callable(item := getattr(value, "item", None)):  # a number of numpy's or torch's
        return item()
    raise TypeError(f"{type(value).__name__} {repr(value)[:60]} is no plain value")


def unpack(data: bytes | bytearray | memoryview) -> Any:
    """Raises MessageRefused."""
    try:
        return msgpack.unpackb(data, ext_hook=_unpacked)
    except (ValueError, RecursionError) as error:  # all that msgpack raises are ValueErrors
        raise MessageRefused(f"no msgpack: {type(error).__name__} {str(error)[:80]}") from None


def _unpacked(code: int, data: bytes) -> Any:
    if code != COMPRESSED:
        raise ValueError(f"part of kind {code}")
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, UNPACKED_BYTES_MAX)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if not stream.eof:
        raise ValueError("a compressed part that is too large, or torn")
    return msgpack.unpackb(plain)  # one inside another is no part of ours


class Messages:
    """The kinds of messages that one end of a connection may be sent.

    Args:
        kinds: data classes.
        bytes_max: of one message.
    """

    def __init__(self, *kinds: type, bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self._kinds = {kind.__name__: kind for kind in kinds}
        self._decoders: dict[str, Decode] = {}
        self.bytes_max = bytes_max

    def has(self, kind: type) -> bool:
        return self._kinds.get(kind.__name__) is kind

    def decode(self, body: bytes | bytearray | memoryview) -> Any:
        """Raises MessageRefused, and nothing else, whatever ``body`` is."""
        match unpack(body):
            case [str(name), fields] if name in self._kinds:
                pass
            case [str(name), _]:
                raise MessageRefused(f"{name[:40]!r} is no message for this process")
            case other:
                raise MessageRefused(f"no message: {type(other).__name__}")
        decode = self._decoders.get(name)
        if decode is None:
            decode = self._decoders[name] = decoder(self._kinds[name])
        try:
            return decode(fields)
        except (Undecodable, RecursionError) as error:
            raise MessageRefused(" ".join(str(error).split())[:200]) from None


# ------------------------------------------------------------------------------- handshake


@dataclass(frozen=True)
class Session:
    """What both ends have agreed on: the version, and a key for each direction."""

    version: int
    sends: bytes
    receives: bytes


def greet(sock: socket.socket, key: bytes, deadline_s: float) -> Session:
    """The end that connected. Raises OSError, EOFError, WrongKey or WrongVersion."""
    hello = HELLO.pack(MAGIC, VERSION, OLDEST, secrets.token_bytes(32))
    sock.sendall(hello)
    answer = _exactly(sock, HELLO.size, deadline_s)
    version = _common_version(answer, "the process that was called")
    said = hello + answer
    if not hmac.compare_digest(_exactly(sock, PROOF_BYTES, deadline_s), _mac(key, b"called", said)):
        raise WrongKey("the process that was called does not have this job's key")
    sock.sendall(_mac(key, b"caller", said))
    return Session(version, _mac(key, b"to called", said), _mac(key, b"to caller", said))


def admit(sock: socket.socket, key: bytes, deadline_s: float) -> Session:
    """The end that listens. Raises as ``greet``."""
    hello = _exactly(sock, HELLO.size, deadline_s)
    if not hello.startswith(MAGIC):
        raise WrongVersion("what calls does not speak elastic_ft")
    answer = HELLO.pack(MAGIC, VERSION, OLDEST, secrets.token_bytes(32))
    said = hello + answer
    sock.sendall(answer + _mac(key, b"called", said))
    version = _common_version(hello, "the process that calls")
    if not hmac.compare_digest(_exactly(sock, PROOF_BYTES, deadline_s), _mac(key, b"caller", said)):
        raise WrongKey("the process that calls does not have this job's key")
    return Session(version, _mac(key, b"to caller", said), _mac(key, b"to called", said))


def _common_version(hello: bytes, who: str) -> int:
    magic: bytes
    newest: int
    oldest: int
    magic, newest, oldest, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise WrongVersion(f"{who} does not speak elastic_ft, or an old version of it")
    version = min(newest, VERSION)
    if version < max(oldest, OLDEST):
        raise WrongVersion(
            f"{who} speaks versions {oldest} to {newest} of the messages, this one {OLDEST} to "
            f"{VERSION}: a job's processes must be of one release, or of the next"
        )
    return version


def _mac(key: bytes, role: bytes, said: bytes) -> bytes:
    return hmac.digest(key, role + b"\0" + said, "sha256")


def _exactly(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """``deadline_s``: on the monotonic clock, for all of it."""
    found = bytearray()
    while len(found) < size:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        sock.settimeout(left_s)
        if not (part := sock.recv(size - len(found))):
            raise EOFError("the other end is gone")
        found += part
    return bytes(found)


# ------------------------------------------------------------------------------- both ends


class Channel:
    """One end of a connection; ``send`` may be called from any thread, ``receive`` from one.

    Args:
        sock: connected; it is this channel's from now on.
        receives: what this end may be sent.
    """

    def __init__(self, sock: socket.socket, session: Session, receives: Messages) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._receives = sock, receives
        self._sending, self._receiving = _Seals(session.sends), _Seals(session.receives)
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._unheard = self._closed = False
        self._come = bytearray()  # and not read yet

    def send(self, message: Any) -> bool:
        """Returns False if the other end is gone, or takes nothing any more (``limit``): that has
        been or will be noticed by reading. Raises TypeError if it is no message."""
        body = message.body if isinstance(message, Encoded) else encode(message)
        with self._lock:
            try:
                self._write(body)
            except OSError as error:
                self._unheard = self._unheard or isinstance(error, TimeoutError)
                if not isinstance(error, TimeoutError):  # half a message is of use to nobody
                    self._shut_down()
                return False
        return True

    def _write(self, body: bytes) -> None:
        head = LENGTH.pack(len(body))
        if len(body) <= SMALL_BYTES:
            self._socket.sendall(head + body + self._sending.of(body))
            return
        seal, rest = self._sending.begin(), memoryview(body)
        self._socket.sendall(head)
        for start in range(0, len(rest), SLICE_BYTES):
            part = rest[start : start + SLICE_BYTES]
            seal.update(part)
            self._socket.sendall(part)
        self._socket.sendall(seal.digest()[:SEAL_BYTES])

    def receive(self, timeout_s: float | None = None) -> Any:
        """Blocks. Raises EOFError when the other end is gone, or silent for ``timeout_s``; CutOff
        when it can't be reached (``end_when_unheard``); MessageRefused."""
        try:
            (size,) = LENGTH.unpack(self._read(LENGTH.size, timeout_s))
            if size > self._receives.bytes_max:
                raise MessageRefused(f"a message of {size:,} bytes")
            body, sealed = self._frame(size, timeout_s)
            if not sealed:
                raise MessageRefused("its seal is wrong: it was changed, or sent by someone else")
            return self._receives.decode(body)
        except MessageRefused:
            self._shut_down()
            raise
        except TimeoutError as error:
            raise CutOff(str(error)) from None
        except EOFError as error:
            if self._unheard:  # a sender was told so, and the kernel tells once
                raise CutOff(str(error)) from None
            raise
        except (OSError, ValueError) as error:  # closed under our hands
            raise EOFError(str(error)) from None

    def _frame(self, size: int, timeout_s: float | None) -> tuple[memoryview | bytearray, bool]:
        """The message, and whether its seal is right."""
        if size <= SMALL_BYTES:
            frame = memoryview(self._read(size + SEAL_BYTES, timeout_s))
            body, seal = frame[:size], self._receiving.of(frame[:size])
            return body, hmac.compare_digest(seal, frame[size:])
        sealing = self._receiving.begin()
        large = self._read_large(size, timeout_s, sealing)
        seal = sealing.digest()[:SEAL_BYTES]
        return large, hmac.compare_digest(seal, self._read(SEAL_BYTES, timeout_s))

    def _read(self, size: int, timeout_s: float | None) -> bytes:
        """Of small messages several come at once."""
        while len(self._come) < size:
            self._await_bytes(timeout_s)
            if not (part := self._socket.recv(SMALL_BYTES)):
                raise EOFError("the other end is gone")
            self._come += part
        if self._closed:  # what came before that is heard no more
            raise EOFError("this end was closed")
        found = bytes(self._come[:size])
        del self._come[:size]
        return found

    def _read_large(self, size: int, timeout_s: float | None, seal: hmac.HMAC) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            if count := min(len(self._come), len(rest)):
                rest[:count] = self._come[:count]
                del self._come[:count]
            else:
                self._await_bytes(timeout_s)
                count = self._socket.recv_into(rest[:SLICE_BYTES])
                if not count:
                    raise EOFError("the other end is gone")
            seal.update(rest[:count])
            rest = rest[count:]
        return found

    def _await_bytes(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not _readable(self._socket, timeout_s):
            raise EOFError(f"nothing heard for {timeout_s:g} s")

    def limit(self, send_s: float) -> None:
        """From now on sending fails that can't go on for ``send_s``, and ends the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(send_s))

    @property
    def own_address(self) -> str:
        """This machine's, as the other end sees it."""
        return str(self._socket.getsockname()[0])

    def end_when_unheard(self, timeout_s: float) -> None:
        """The kernel ends the connection once something sent has not arrived for so long.

        So whoever sends heartbeats and is cut off, in either direction, knows it in time (I1). A
        controller that is stopped, or slow, is no cut: its kernel still acknowledges.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = int(timeout_s * 1000)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def _shut_down(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection; whoever blocks in ``receive`` is woken. Idempotent."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._shut_down()  # close alone leaves a reader blocked
                self._socket.close()


class _Seals:
    """Of one direction: a key, and the number of the next frame."""

    def __init__(self, key: bytes) -> None:
        self._keyed, self._key = hmac.new(key, digestmod=hashlib.sha256), key
        self._number = 0

    def begin(self) -> hmac.HMAC:
        """Of the next frame: to be told the message."""
        seal = self._keyed.copy()
        seal.update(self._take())
        return seal

    def of(self, body: bytes | memoryview) -> bytes:
        return hmac.digest(self._key, self._take() + body, "sha256")[:SEAL_BYTES]

    def _take(self) -> bytes:
        self._number += 1
        return NUMBER.pack(self._number)


def timeval(seconds: float) -> bytes:
    """For SO_SNDTIMEO."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


def _readable(sock: socket.socket, timeout_s: float) -> bool:
    waiting = select.poll()
    waiting.register(sock.fileno(), select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def dial(
    address: Address, key: bytes, receives: Messages, timeout_s: float = HANDSHAKE_S
) -> Channel:
    """Connects, and is admitted, within ``timeout_s``.

    Raises OSError, EOFError, WrongKey or WrongVersion.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, PAUSE_S / 8
    while True:
        sock = socket.create_connection(address, max(0.001, deadline_s - time.monotonic()))
        try:
            return Channel(sock, greet(sock, key, deadline_s), receives)
        except (EOFError, ConnectionError):  # dropped: many others want to be admitted
            sock.close()
            if time.monotonic() + pause_s > deadline_s:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(pause_s)
        pause_s *= 2


# ------------------------------------------------------------------------------ listening


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
        key: bytes,
        receives: Messages,
        serve: Callable[[Channel], object],
        ports: range | None = None,
    ) -> None:
        self._name, self._key, self._receives, self._serve = name, key, receives, serve
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
            session = admit(sock, self._key, time.monotonic() + HANDSHAKE_S)
        except (OSError, EOFError, WrongKey, WrongVersion):
            self._forget(sock)
            sock.close()
            return
        channel = Channel(sock, session, self._receives)
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
