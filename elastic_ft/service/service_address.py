"""Where a client finds the service, and how it gets there. The standard library alone."""

from __future__ import annotations

import ssl
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from elastic_ft.errors import ConfigError
from elastic_ft.service.access import LOOPBACK


def scheme_of(url: str) -> str:
    """ "" where it is no address that a service could have: of a user, a question or a place in a
    page it would make another one, or none."""
    if not url.isascii() or not url.isprintable() or {*url} & set(" ?#@"):
        return ""
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.hostname and parts.hostname.encode("idna")
        return parts.scheme if is_one and (parts.port is None or parts.port) else ""
    except ValueError:  # its port is no number, its name too long
        return ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The service never redirects: whoever does is somebody else, and is told no token."""

    def redirect_request(self, *_: Any) -> None:
        return None


def opener_of(url: str, ca_file: str | Path | None) -> urllib.request.OpenerDirector:
    """This machine's own service is not asked through a proxy, wherever other sites are. Raises
    ConfigError."""
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=_trusted(ca_file)))
    if urllib.parse.urlsplit(url).hostname in LOOPBACK:
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _trusted(ca_file: str | Path | None) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.create_default_context()
    try:
        if ca_file:
            context.load_verify_locations(ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{ca_file}: no certificates can be read there: {error}") from None
    return context
