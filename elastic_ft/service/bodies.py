"""What is sent to the service: JSON of so many bytes, within so long."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from aiohttp import web

from elastic_ft.errors import ConfigError
from elastic_ft.service.crews import READING

BODY_MAX = 8 << 20
BODY_WITHIN_S = 60.0  # of a request's head
SMALL = 1 << 16  # bytes of JSON that are read at once


def bytes_of(request: web.Request) -> int:
    """That its body may take, at most. Nobody reads one of who only looks."""
    if not request.can_read_body or request.method in ("GET", "HEAD"):
        return 0
    said = request.content_length
    packed = "Content-Encoding" in request.headers
    return BODY_MAX if said is None or packed else min(said, BODY_MAX)


async def read_body(request: web.Request, by: str, *known: str) -> dict[str, Any]:
    """The keys that are ``known``. ``by``: who asks.

    Raises ConfigError; HTTPUnsupportedMediaType: what a form of another site can send.
    """
    if request.can_read_body and request.content_length != 0:
        _check_type(request)  # before megabytes are read
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            content = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the request's body did not come within {BODY_WITHIN_S:g} s"
        ) from None
    except web.RequestPayloadError as error:
        raise web.HTTPBadRequest(text=f"the request's body can't be read: {error}") from None
    if not content:
        return {}
    try:
        if len(content) < SMALL:  # waits for nobody's megabytes
            found = _loads(content)
        else:
            found = await READING.do(by, _loads, content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"expected an object, found {type(found).__name__}")
    if unknown := [key for key in found if key not in known]:
        raise ConfigError(f"{unknown[0]:.80}: unknown key, expected {', '.join(known)}")
    return found


def _check_type(request: web.Request) -> None:
    """Raises HTTPUnsupportedMediaType."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(
            text=f"Content-Type: expected application/json, found {request.content_type:.100}"
        )


def _loads(content: bytes) -> Any:
    """Raises ValueError, RecursionError."""
    return json.loads(content, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no value of JSON")
