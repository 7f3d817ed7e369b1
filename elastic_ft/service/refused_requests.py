"""What is refused is one line of JSON, with a status that says whose fault it is."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from elastic_ft.errors import ElasticError, UsageError
from elastic_ft.service.access import NotAllowed
from elastic_ft.service.office import NotKnown, Refused

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InDoubt(ElasticError):
    """Whether it is done is not known: the same request again will tell."""


@web.middleware
async def refused_in_a_line(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What is refused is one line of JSON."""
    try:
        return await handler(request)
    except NotAllowed as error:
        return _refused(403 if error.known else 401, error)
    except NotKnown as error:
        return _refused(404, error)
    except Refused as error:
        return _refused(409 if request.match_info.get("id") else 422, error)
    except UsageError as error:
        return _refused(422, error)
    except InDoubt as error:
        return _refused(503, error, in_doubt=True)
    except ElasticError as error:
        return _refused(503, error)
    except RecursionError:
        return _refused(422, "values that are nested so deep are read by nobody")
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        refused = _refused(
            405, f"{request.path:.100}: expected {allowed}; found {error.method:.20}"
        )
        refused.headers["Allow"] = allowed
        return refused
    except web.HTTPException as error:
        if error.status < 400:
            raise
        if request.match_info.http_exception is error:
            return _refused(404, f"there is nothing at {request.path:.100}")
        return _refused(error.status, error.text or error.reason, error.headers.get("Retry-After"))
    except ConnectionResetError as error:  # whoever had asked for a stream is gone: no fault here
        return _refused(499, error)
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _refused(500, "a fault of the service's own: its log has more")


def _refused(status: int, error: object, again_s: str | None = None, **more: bool) -> web.Response:
    said = {"error": " ".join(str(error).split()), **more}
    headers = {"Retry-After": again_s or "1"} if status in (429, 503) else {}
    return web.json_response(said, status=status, headers=headers)
