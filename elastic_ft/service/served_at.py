"""What the service is started with: where it listens, and what its address is called."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time
import uuid
from dataclasses import dataclass, field

from aiohttp import web

from elastic_ft.core.sharing.asks import SharingTerms
from elastic_ft.errors import ConfigError, UsageError
from elastic_ft.service.access import Rights, check_host

BIND_TIMEOUT_S, BIND_AGAIN_S = 15.0, 0.2  # of a port that the service before this one had
ANYWHERE = ("0.0.0.0", "::")


def service_url(host: str, port: int, secure: bool) -> str:
    """``host``: a name, or an address of IPv4 or IPv6."""
    name = f"[{host}]" if ":" in host else host
    return f"http{'s' * secure}://{name}:{port}"


@dataclass(frozen=True, slots=True)
class HowToServe:
    """What the service is started with, wherever that is.

    Attributes:
        port: 0: any, and the same again after a restart.
        take_over: the folder, from a service that lives elsewhere, too.
        actor: drawn once, the same for all lives of the service's actor.
    """

    folder: str
    host: str = "127.0.0.1"
    port: int = 8266
    terms: SharingTerms = field(default_factory=SharingTerms)
    users: dict[str, Rights] = field(default_factory=dict)
    tls_cert: str = ""
    tls_key: str = ""
    warm: bool = False
    take_over: bool = False
    actor: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        check_host(self.host, self.users)
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key: expected both of them, or none")

    @property
    def url_here(self) -> str:
        """At which this machine finds it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return service_url(host, self.port, bool(self.tls_cert))

    def tls(self) -> ssl.SSLContext | None:
        """Of the files of this machine. Raises UsageError."""
        if not self.tls_cert:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key or None)
        except OSError as error:  # SSLError, too
            why = f"{self.tls_cert}, {self.tls_key}: {error.strerror or error}"
            raise UsageError(f"--tls-cert, --tls-key: {why}") from None
        return context


async def bound(
    runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None, insist: bool
) -> int:
    """Listens there; returns the port. One that somebody has is waited for: the service before
    this one may be ending. ``insist``: so is what else is in the way. Raises UsageError."""
    until_s = time.monotonic() + BIND_TIMEOUT_S
    while True:
        try:
            await web.TCPSite(runner, host, port, ssl_context=tls).start()
            return int(runner.addresses[0][1])
        except OSError as error:
            waits = insist or error.errno == errno.EADDRINUSE
            if time.monotonic() > until_s or not waits:
                raise UsageError(f"--port: {host}:{port} can't be had: {error.strerror}") from None
        await asyncio.sleep(BIND_AGAIN_S)
