"""What a job's processes share, and TLS around our own connections (``network.tls``).

The controller makes one certificate for the job, signed by itself, and hands it on beside the job's
key. Who calls takes that very certificate and no other: there are no authorities, host names or
dates to check. Who is called learns who calls from the handshake that follows inside.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
import select
import shutil
import socket
import ssl
import subprocess
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from elastic_ft.errors import ConfigError
from elastic_ft.transport.handshake import WrongKey

OPENSSL_S = 30.0  # to make a certificate: some 20 ms, and much on a machine that is busy
PIECE_BYTES = 1 << 18  # read from the socket at once
RECORD_BYTES = 1 << 14
REPLIES_MAX = 1 << 16  # bytes that TLS itself has to say: a few for new keys, now and then
OPENSSL = (
    *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-config", "/dev/stdin", "-subj", "/CN=elastic_ft job", "-days", "3650"),
    *("-keyout", "/dev/stdout"),
)
CONFIG = b"[req]\ndistinguished_name = name\n[name]\n"  # the machine's own may say anything
BEGIN, END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----\n"


class WrongCertificate(WrongKey):
    """Who was called shows another certificate than this job's."""


@dataclass(frozen=True, slots=True)
class JobKey:
    """What the processes of a job have, and nobody else.

    Attributes:
        secret: 32 bytes.
        certificate: PEM; empty: no TLS.
        private_key: PEM, of the certificate.
    """

    secret: bytes = field(repr=False)
    certificate: bytes = field(default=b"", repr=False)
    private_key: bytes = field(default=b"", repr=False)


def new_key(*, tls: bool) -> JobKey:
    """Raises ConfigError where there should be a certificate and none can be made here."""
    secret = secrets.token_bytes(32)
    if not tls:
        return JobKey(secret)
    command = [find_openssl(), *OPENSSL]
    try:
        made = subprocess.run(command, input=CONFIG, capture_output=True, timeout=OPENSSL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"network.tls: openssl makes no certificate: {error}") from error
    private_key, begin, rest = made.stdout.partition(BEGIN)
    if made.returncode or not begin or not private_key:
        said = " ".join(made.stderr.decode(errors="replace").split())[-200:]
        raise ConfigError(f"network.tls: openssl makes no certificate: {said}")
    return JobKey(secret, begin + rest.partition(END)[0] + END, private_key)


def find_openssl() -> str:
    """Raises ConfigError."""
    found = shutil.which("openssl")
    if found is None:
        raise ConfigError(
            "network.tls: needs the program openssl where the controller runs, and it is not there"
        )
    return found


# --------------------------------------------------------------------------- a connection


class TlsSocket:
    """A connected socket's bytes, encrypted.

    One thread may send while another receives, which ``ssl.SSLSocket`` does not bear: neither waits
    for the network while it has the lock.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, deadline_s: float) -> None:
        """Agrees on keys until ``deadline_s`` (monotonic). Raises OSError or EOFError."""
        self._socket, self._lock = sock, threading.Lock()
        self._come, self._going = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._read = bytearray()  # decrypted, and not asked for yet
        self._timeout_s: float | None = None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a hello waits
        is_server = context.protocol == ssl.PROTOCOL_TLS_SERVER
        self._tls = context.wrap_bio(self._come, self._going, server_side=is_server)
        while True:
            sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._take(deadline_s):
                    raise EOFError("the other end is gone") from None
            except ssl.SSLError:
                self._flush()  # it is told why
                raise
            else:
                self._flush()
                return

    def certificate(self) -> bytes:
        """DER, of the other end."""
        return self._tls.getpeercert(binary_form=True) or b""

    def sendall(self, data: bytes | memoryview) -> None:
        with self._lock:
            self._tls.write(data)
            going = self._going.read()  # at once: who receives counts what lies there
        self._socket.sendall(going)

    def recv(self, size: int) -> bytes:
        part = bytearray(size)
        return bytes(part[: self.recv_into(memoryview(part))])

    def recv_into(self, into: memoryview) -> int:
        """0 at the end, as a socket's. The timeout is for all of it, however many bytes come: a
        record of which one is always missing, and records without data, count as nothing."""
        if self._read:
            count = min(len(self._read), len(into))
            into[:count] = self._read[:count]
            del self._read[:count]
            return count
        until_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while (count := self._decrypt(into)) is None:
            if not self._take(until_s):
                return 0
        return count

    def readable(self, timeout_s: float) -> bool:
        """Whether ``recv`` has something, be it the end; False: nothing came for so long."""
        part, until_s = bytearray(RECORD_BYTES), time.monotonic() + timeout_s
        while not self._read:
            if (count := self._decrypt(memoryview(part))) is not None:
                self._read += part[:count]
                return True
            if not readable(self._socket, max(0.0, until_s - time.monotonic())):
                return False
            if not self._take(None):
                return True
        return True

    def _decrypt(self, into: memoryview) -> int | None:
        """None: the rest of a record has still to come."""
        count: int | None
        with self._lock:
            try:
                count = self._tls.read(len(into), into)
            except ssl.SSLWantReadError:
                count = None
            except ssl.SSLZeroReturnError:
                count = 0
            replies = self._going.pending
        if replies > REPLIES_MAX:  # they go out with what is sent, so nobody who means well sees it
            raise ConnectionError("the other end asks for new keys again and again")
        return count

    def _take(self, until_s: float | None) -> bool:
        """Blocks for what comes, no longer than ``until_s`` (monotonic); False: nothing will."""
        if until_s is not None:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not readable(self._socket, left_s):
                raise TimeoutError("the other end takes too long")
        if data := self._socket.recv(PIECE_BYTES):
            with self._lock:
                self._come.write(data)
        return bool(data)

    def _flush(self) -> None:
        with self._lock:
            data = self._going.read()
        if data:
            self._socket.sendall(data)

    def settimeout(self, seconds: float | None) -> None:
        self._timeout_s = seconds
        self._socket.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int | bytes) -> None:
        self._socket.setsockopt(level, option, value)

    def fileno(self) -> int:
        return self._socket.fileno()

    def getsockname(self) -> Any:
        return self._socket.getsockname()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()


AnySocket = socket.socket | TlsSocket


def readable(line: AnySocket, timeout_s: float) -> bool:
    """Whether something came within ``timeout_s``."""
    if isinstance(line, TlsSocket):
        return line.readable(timeout_s)
    waiting = select.poll()
    waiting.register(line.fileno(), select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def writable(line: AnySocket, timeout_s: float) -> bool:
    """Whether there is room, within ``timeout_s``, for more than a few bytes of what is sent."""
    waiting = select.poll()
    waiting.register(line.fileno(), select.POLLOUT)
    return bool(waiting.poll(timeout_s * 1000))


# ------------------------------------------------------------------------------- both ends


def call(sock: socket.socket, key: JobKey, deadline_s: float) -> AnySocket:
    """The end that connected; ``sock`` itself without TLS. Raises OSError, EOFError or
    WrongCertificate."""
    if not key.certificate:
        return sock
    line = TlsSocket(sock, _client_context(), deadline_s)
    expected, found = ssl.PEM_cert_to_DER_cert(key.certificate.decode()), line.certificate()
    if found != expected:
        raise WrongCertificate(
            f"the process that was called shows the certificate {_fingerprint(found)}, this job's "
            f"is {_fingerprint(expected)}"
        )
    return line


@functools.cache
def _client_context() -> ssl.SSLContext:
    """Takes any certificate: ``call`` compares it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _fingerprint(certificate: bytes) -> str:
    return "SHA-256 " + hashlib.sha256(certificate).hexdigest()[:16]


def server_context(key: JobKey) -> ssl.SSLContext | None:
    """For ``answer``; None without TLS."""
    if not key.certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # nobody resumes
    handle = os.memfd_create("certificate", os.MFD_CLOEXEC)  # ssl takes a path alone
    try:
        os.write(handle, key.certificate + key.private_key)
        context.load_cert_chain(f"/proc/self/fd/{handle}")
    finally:
        os.close(handle)
    return context


def answer(sock: socket.socket, context: ssl.SSLContext | None, deadline_s: float) -> AnySocket:
    """The end that listens. Raises OSError or EOFError."""
    return sock if context is None else TlsSocket(sock, context, deadline_s)
