"""Where the service listens, and what its address is called."""

from __future__ import annotations

import asyncio
import errno
import ssl
import time

from aiohttp import web

from elastic_ft.errors import UsageError

BIND_TIMEOUT_S, BIND_AGAIN_S = 15.0, 0.2  # of a port that the service before this one had
ANYWHERE = ("0.0.0.0", "::")


def service_url(host: str, port: int, secure: bool) -> str:
    """``host``: a name, or an address of IPv4 or IPv6."""
    name = f"[{host}]" if ":" in host else host
    return f"http{'s' * secure}://{name}:{port}"


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
