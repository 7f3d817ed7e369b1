"""Messages between the processes of a job: framed, typed, and sealed with the job's key.

A connection begins with a handshake (``transport.handshake``), which gives it keys of its own, one
for each direction. From then on a frame is

    length: 4 bytes | message: msgpack [kind, fields] | seal: 16 bytes

where the seal is an HMAC-SHA256, cut short, over the frame's number and the message. So who sits
between two ends, or takes over the port of one that has died, can end their connection and can't
do anything else: not read on another's behalf, inject, replay, leave out or reorder.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import struct
import threading
import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

from elastic_ft.transport.handshake import HANDSHAKE_S, Session, greet
from elastic_ft.transport.messages import Encoded, MessageRefused, Messages, encode
from elastic_ft.transport.tls import AnySocket, JobKey, call, readable, writable

LENGTH = struct.Struct("!I")
NUMBER = struct.Struct("!Q")
SEAL_BYTES = 16
SLICE_BYTES = 1 << 20  # of a large message: one is sealed while the one before is on its way
SMALL_BYTES = 1 << 16  # sent in one piece
PAUSE_S = 0.0125  # before one that was dropped calls again, the first time

Address = tuple[str, int]


class CutOff(EOFError):
    """What was sent to the other end has not arrived there for too long."""


class Channel:
    """One end of a connection; ``send`` may be called from any thread, ``receive`` from one.

    Args:
        sock: connected; it is this channel's from now on.
        receives: what this end may be sent.
    """

    def __init__(self, sock: AnySocket, session: Session, receives: Messages) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._receives = sock, receives
        self._sending, self._receiving = _Seals(session.sends), _Seals(session.receives)
        self._lock, self._closing = threading.Lock(), threading.Lock()
        self._unheard = self._closed = False
        self._come = bytearray()  # and not read yet

    def send(self, *messages: Any) -> bool:
        """In one piece, where they are small. Returns False if the other end is gone, or takes
        nothing any more (``limit``): that has been or will be noticed by reading. Raises TypeError
        if one is no message."""
        bodies = [m.body if isinstance(m, Encoded) else encode(m) for m in messages]
        with self._lock:
            try:
                self._write(bodies)
            except OSError as error:
                self._unheard = self._unheard or isinstance(error, TimeoutError)
                if not isinstance(error, TimeoutError):  # half a message is of use to nobody
                    self._shut_down()
                return False
        return True

    def _write(self, bodies: Sequence[bytes]) -> None:
        if sum(map(len, bodies)) <= SMALL_BYTES:
            frames = ((LENGTH.pack(len(body)), body, self._sending.of(body)) for body in bodies)
            self._socket.sendall(b"".join(chain.from_iterable(frames)))
            return
        for body in bodies:
            self._write_large(body)

    def _write_large(self, body: bytes) -> None:
        seal, rest = self._sending.begin(), memoryview(body)
        self._socket.sendall(LENGTH.pack(len(body)))
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
        if timeout_s is not None and not readable(self._socket, timeout_s):
            raise EOFError(f"nothing heard for {timeout_s:g} s")

    def has_come(self, timeout_s: float) -> bool:
        """Whether there is something to receive, or an end to be told, within ``timeout_s``. For
        the thread that receives. Raises EOFError where this end was closed."""
        try:
            return bool(self._come) or readable(self._socket, timeout_s)
        except (OSError, ValueError) as error:
            raise EOFError(str(error)) from None

    def has_room(self, timeout_s: float) -> bool:
        """Whether a message of some kilobytes can be sent without waiting, within ``timeout_s``;
        True as well of one that has ended."""
        try:
            return writable(self._socket, timeout_s)
        except (OSError, ValueError):  # ``send`` says so
            return True

    def limit(self, send_s: float) -> None:
        """From now on sending fails that can't go on for ``send_s``, and ends the connection."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(send_s))

    @property
    def own_address(self) -> str:
        """This machine's, as the other end sees it."""
        return str(self._socket.getsockname()[0])

    def end_when_unheard(self, timeout_s: float) -> None:
        """The kernel ends the connection once something sent has not arrived for so long, or, with
        nothing to send, the other end's kernel has not answered.

        So whoever is cut off, in either direction, knows it in time (I1). One that is stopped, or
        slow, is no cut while its buffers have room: its kernel answers. Once they are full it takes
        nothing, and the connection ends as well: see ``transport.outbox``.
        """
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            tcp, timeout_ms, ask_s = socket.IPPROTO_TCP, int(timeout_s * 1000), int(timeout_s / 3)
            self._socket.setsockopt(tcp, socket.TCP_USER_TIMEOUT, timeout_ms)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._socket.setsockopt(tcp, socket.TCP_KEEPIDLE, max(1, ask_s))
            self._socket.setsockopt(tcp, socket.TCP_KEEPINTVL, max(1, ask_s))

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


def dial(
    address: Address, key: JobKey, receives: Messages, timeout_s: float = HANDSHAKE_S
) -> Channel:
    """Connects, and is admitted, within ``timeout_s``.

    Raises OSError, EOFError, WrongKey (a WrongCertificate, too) or WrongVersion.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, PAUSE_S
    while True:
        sock = socket.create_connection(address, max(0.001, deadline_s - time.monotonic()))
        try:
            line = call(sock, key, deadline_s)
            return Channel(line, greet(line, key.secret, deadline_s), receives)
        except (EOFError, ConnectionError):  # dropped: many others want to be admitted
            sock.close()
            if time.monotonic() + pause_s > deadline_s:
                raise
        except BaseException:
            sock.close()
            raise
        time.sleep(pause_s)
        pause_s *= 2
