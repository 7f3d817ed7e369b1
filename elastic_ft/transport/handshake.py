"""How a connection begins: each end proves that it has the job's key.

Each sends a nonce and the versions that it speaks, and an HMAC-SHA256 over all that was said, so
nobody in between can change it; both derive the connection's own keys from that.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import time
from dataclasses import dataclass
from typing import Protocol

from elastic_ft.errors import ElasticError

VERSION, OLDEST = 1, 1  # of the messages: what this release speaks, and what it still understands
MAGIC = b"elastic\n"
HELLO = struct.Struct("!8sHH32s")  # magic, newest version, oldest version, nonce
PROOF_BYTES = 32
HANDSHAKE_S = 5.0


class WrongKey(ElasticError):
    """The other end does not have this job's key."""


class WrongVersion(ElasticError):
    """The two ends have no version of the messages in common. One line names both."""


class Stream(Protocol):
    """A connected socket, or TLS over one."""

    def settimeout(self, seconds: float | None, /) -> None: ...
    def sendall(self, data: bytes, /) -> None: ...
    def recv(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Session:
    """What both ends have agreed on: the version, and a key for each direction."""

    version: int
    sends: bytes
    receives: bytes


def greet(sock: Stream, key: bytes, deadline_s: float) -> Session:
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


def admit(sock: Stream, key: bytes, deadline_s: float) -> Session:
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


def _exactly(sock: Stream, size: int, deadline_s: float) -> bytes:
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
