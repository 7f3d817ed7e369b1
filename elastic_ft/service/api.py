"""HTTP: JSON and server-sent events under /api/v1, the page at / (docs/service.md).

The event loop never waits for a store, the cluster or the journal: those are asked in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.service.access import Caller, Rights, caller_of, check_site
from elastic_ft.service.bodies import BODY_MAX, bytes_of, read_body
from elastic_ft.service.crews import LISTS, LOGS, LOOKS, READING, RUNS, WORDS, Crew
from elastic_ft.service.floods import AskedTooMuch, Pace, Room
from elastic_ft.service.line_stream import Item, LineStream
from elastic_ft.service.listing import flag, listing_of
from elastic_ft.service.office import UNWRITTEN, NotKnown, Refused
from elastic_ft.service.openapi import document
from elastic_ft.service.page_routes import PageRoutes
from elastic_ft.service.refused_requests import Handler, InDoubt, refused_in_a_line
from elastic_ft.service.service import Service, check_priority
from elastic_ft.service.service_metrics import exposition

CALLER = web.RequestKey("caller", Caller)
COOKIE = "elastic_ft_token"
ANSWER_TIMEOUT_S = 30.0  # a change that is not journalled by then is answered with 503
STOP_TIMEOUT_S = 540.0  # of all jobs; a client waits for longer
STREAM_EVERY_S = 0.2
LOGS_EVERY_S = 1.0
PING_EVERY_S = 15.0
ITEMS_AT_ONCE = 500  # of a stream: others are answered in between
STREAM_BYTES = 1 << 16  # that the kernel keeps for one; unless told it is megabytes
TAKEN_WITHIN_S = 60.0  # what a stream sends; who takes nothing keeps no memory here
STREAMS_MAX, STREAMS_OF_ONE = 1000, 250  # who follows more is asked to come later
BODIES_BYTES, BODIES_OF_ONE_BYTES = 256 << 20, 64 << 20  # of requests under way
ASKED_PER_S, ASKED_TOGETHER, AT_ONCE_OF_ONE = 100.0, 500, 600  # by one user, streams included
T = TypeVar("T")


class Api:
    """Attributes:
    on_stop: ends the service.
    """

    def __init__(
        self, service: Service, users: Mapping[str, Rights], on_stop: Callable[[], object]
    ) -> None:
        self._service, self._users, self._on_stop = service, users, on_stop
        self._closing, self._taking_in = False, 0  # no job is taken in; how many just are
        self._telling = asyncio.Lock()
        self._streams = Room("streams are followed", STREAMS_MAX, STREAMS_OF_ONE)
        self._pace = Pace(ASKED_PER_S, ASKED_TOGETHER, AT_ONCE_OF_ONE)
        self._room = Room("bytes are being read", BODIES_BYTES, BODIES_OF_ONE_BYTES)

    def application(self) -> web.Application:
        app = web.Application(client_max_size=BODY_MAX, middlewares=[refused_in_a_line, self.known])
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/api/v1/openapi.json", self.openapi),
                web.get("/api/v1/service", self.about),
                web.post("/api/v1/login", self.login),
                web.post("/api/v1/service/stop", self.stop_service),
                web.get("/api/v1/jobs", self.jobs),
                web.post("/api/v1/jobs", self.submit),
                web.get("/api/v1/jobs/{id}", self.job),
                web.get("/api/v1/jobs/{id}/events", self.events),
                web.get("/api/v1/jobs/{id}/steps", self.steps),
                web.get("/api/v1/jobs/{id}/logs", self.logs),
                web.post("/api/v1/jobs/{id}/stop", self.stop),
                web.post("/api/v1/jobs/{id}/resize", self.resize),
                web.post("/api/v1/jobs/{id}/priority", self.priority),
            ]
        )
        app.add_routes(PageRoutes(self._service.run_url, self._pictured).routes())
        return app

    # ------------------------------------------------------------------------------------- jobs

    @web.middleware
    async def known(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Of the interface, all but the page: it has nothing but what its reader's token gives."""
        if request.path.startswith(("/api/", "/metrics")):
            changes = request.method not in ("GET", "HEAD")
            check_site(
                self._users, request.host, request.headers.get("Origin") if changes else None
            )
            token = _bearer(request) or request.cookies.get(COOKIE, "")
            caller = request[CALLER] = caller_of(self._users, token)
            with self._pace.one(caller.name), self._room.for_one(caller.name, bytes_of(request)):
                self._check_job(request, caller, changes)
                return await handler(request)
        return await handler(request)

    def _check_job(self, request: web.Request, caller: Caller, changes: bool) -> None:
        """Raises NotKnown, NotAllowed."""
        if job := request.match_info.get("id"):
            queue = self._service.queue_of(job)
            if not caller.may_read(queue):  # nor is it told that there is such a job
                raise NotKnown(f"there is no job {job:.100}")
            if changes:
                caller.check_write(queue)

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def metrics(self, request: web.Request) -> web.Response:
        office = self._service.office
        may_read = request[CALLER].may_read
        by = _by(request)
        content = await WORDS.do(by, exposition, office.standing, office.terms, may_read)
        return web.Response(body=content, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def login(self, request: web.Request) -> web.Response:
        """The page's way: streams of a browser can't have a header."""
        response = _json({"name": request[CALLER].name})
        if token := _bearer(request):
            response.set_cookie(
                COOKIE,
                token,
                httponly=True,
                samesite="Strict",
                secure=request.secure,
                path="/api/",
            )
        return response

    async def about(self, request: web.Request) -> web.Response:
        return await _json_of(request, partial(self._service.about, request[CALLER].may_read))

    async def jobs(self, request: web.Request) -> web.Response:
        listing, caller = listing_of(request.query.items()), request[CALLER]

        def found() -> dict[str, Any]:
            jobs, more = self._service.jobs(listing, caller.may_read)
            return {"jobs": jobs} | ({"more": more} if listing.limit is not None else {})

        return await _json_of(request, found, WORDS if listing.limit is not None else LISTS)

    async def submit(self, request: web.Request) -> web.Response:
        if self._closing:
            raise web.HTTPServiceUnavailable(text="the service is being stopped")
        request[CALLER].check_writes()  # before megabytes are read
        asked = await read_body(
            request, _by(request), "job", "priority", "queue", "name", "request"
        )
        request[CALLER].check_write(str(asked.get("queue", "default")))
        if self._closing:  # meanwhile
            raise web.HTTPServiceUnavailable(text="the service is being stopped")
        self._taking_in += 1
        try:
            by = _by(request)
            answer = await READING.do(by, self._service.submit, asked, by)
            job = await _answered(answer)
        finally:
            self._taking_in -= 1
        return _json({"id": job, "page": f"{request.url.origin()}/jobs/{job}"}, status=201)

    async def job(self, request: web.Request) -> web.Response:
        return _json(await self._looked(request, self._service.job))

    async def _looked(self, request: web.Request, look: Callable[[str], T]) -> T:
        """At its job. One that has ended has to be read; of others all is known here."""
        job = request.match_info["id"]
        crew = WORDS if self._service.knows(job) else self._crew_of(job)
        found: T = await crew.do(_by(request), look, job)
        return found

    async def _pictured(self, request: web.Request, look: Callable[[], str]) -> str:
        crew = self._crew_of(request.match_info["id"])
        return str(await crew.do(_by(request), look))

    def _crew_of(self, job: str) -> Crew:
        return RUNS if self._is_live(job) else LOOKS

    def _is_live(self, job: str) -> bool:
        return job in self._service.office.standing.sharing.jobs

    async def stop(self, request: web.Request) -> web.Response:
        now = (await _body(request, "now")).get("now", False)
        if not isinstance(now, bool):
            raise ConfigError(f"now: expected true or false, found {now!r:.80}")
        return await self._changed(request, partial(self._service.stop, now=now))

    async def resize(self, request: web.Request) -> web.Response:
        workers = (await _body(request, "workers")).get("workers")
        if type(workers) is not int or workers < 1:
            raise ConfigError(f"workers: expected a number from 1 on, found {workers!r:.80}")
        return await self._changed(request, partial(self._service.resize, workers=workers))

    async def priority(self, request: web.Request) -> web.Response:
        priority = check_priority((await _body(request, "priority")).get("priority"))
        return await self._changed(request, partial(self._service.set_priority, priority=priority))

    async def _changed(self, request: web.Request, change: Callable[..., Future[str]]) -> Any:
        """By what is known here: a change that was made is not refused for what comes after it."""
        job = request.match_info["id"]
        await _answered(change(job, by=_by(request)))
        return _json(self._service.known(job))

    async def stop_service(self, request: web.Request) -> web.Response:
        request[CALLER].check_all()
        jobs = (await _body(request, "jobs")).get("jobs", "keep")
        if jobs not in ("keep", "stop"):
            raise ConfigError(f"jobs: expected keep or stop, found {jobs!r:.80}")
        self._closing = True
        try:
            if jobs == "stop":
                await self._stop_jobs(_by(request))
        except BaseException:
            self._closing = False
            raise
        asyncio.get_running_loop().call_later(STREAM_EVERY_S, self._end)
        return _json({"stopped": True})

    def _end(self) -> None:
        """In a thread of its own: it may wait for the cluster's head, and others are answered."""
        threading.Thread(target=self._on_stop, name="stopping", daemon=True).start()

    async def _stop_jobs(self, by: str) -> None:
        """Returns once they have ended, those included that were being taken in when it was asked
        for. Raises HTTPGatewayTimeout."""
        until_s = time.monotonic() + STOP_TIMEOUT_S
        while True:
            for answer in self._service.stop_all(by):
                with contextlib.suppress(Refused, NotKnown):  # it has ended meanwhile
                    await _answered(answer)
            live = list(self._service.office.standing.sharing.jobs)
            if not live and not self._taking_in:
                return
            if time.monotonic() > until_s:
                raise web.HTTPGatewayTimeout(
                    text=f"after {STOP_TIMEOUT_S:g} s there are jobs: {', '.join(live)[:200]}"
                )
            await asyncio.sleep(STREAM_EVERY_S)

    # ---------------------------------------------------------------------------------- streams

    async def events(self, request: web.Request) -> web.StreamResponse:
        story = await self._looked(request, self._service.story)
        return await self._stream(request, story.events, "events")

    async def steps(self, request: web.Request) -> web.StreamResponse:
        story = await self._looked(request, self._service.story)
        return await self._stream(request, story.steps, "steps")

    async def logs(self, request: web.Request) -> web.StreamResponse:
        """From the end of each file on; who connects again is told what comes from then on."""
        reader = await self._looked(request, self._service.logs)
        if not _follows(request):
            return _json({"logs": await LOGS.do(_by(request), reader)})
        if request.method == "HEAD":
            return await _event_stream(request)
        with self._streams.for_one(_by(request)):
            return await self._follow_logs(request, reader)

    async def _follow_logs(
        self, request: web.Request, reader: Callable[[], list[dict[str, Any]]]
    ) -> web.StreamResponse:
        job, by, number = request.match_info["id"], _by(request), _last_id(request)
        if number is not None:
            await LOGS.do(by, reader)
        response, number = await _event_stream(request), number or 0
        while True:
            live = self._is_live(job)
            try:
                lines = await LOGS.do(by, reader)
            except (
                web.HTTPServiceUnavailable,
                AskedTooMuch,
            ):  # in the middle of a stream: they come later
                live, lines = True, []
            for line in lines:
                number += 1
                await _send(request, response, _sent(Item(number, line)))
            if not live:
                return await self._ended(request, response)
            await _send(request, response, b": still here\n\n")
            await asyncio.sleep(LOGS_EVERY_S)

    async def _stream(
        self, request: web.Request, stream: LineStream, name: str
    ) -> web.StreamResponse:
        position = _position(request, stream)
        if not _follows(request):
            return await _json_of(request, lambda: {name: stream.data(position)})
        if request.method == "HEAD":  # what would come, and nothing of it
            return await _event_stream(request)
        with self._streams.for_one(_by(request)):
            return await self._follow(request, stream, position)

    async def _follow(
        self, request: web.Request, stream: LineStream, position: int
    ) -> web.StreamResponse:
        response = await _event_stream(request)
        job, quiet_since_s = request.match_info["id"], time.monotonic()
        while True:
            live = self._is_live(job)
            told = 0
            if position < stream.end:
                told, position = await self._tell(request, response, stream, position)
                quiet_since_s = time.monotonic()
            elif not live:
                break
            elif time.monotonic() - quiet_since_s > PING_EVERY_S:
                await _send(request, response, b": still here\n\n")
                quiet_since_s = time.monotonic()
            await asyncio.sleep(STREAM_EVERY_S if told < ITEMS_AT_ONCE else 0)
            if request.transport is None:  # whoever asked is gone: not told by what is not sent
                raise ConnectionResetError("nobody follows any more")
        return await self._ended(request, response)

    async def _tell(
        self, request: web.Request, response: web.StreamResponse, stream: LineStream, position: int
    ) -> tuple[int, int]:
        """How many were sent, and where to go on. One piece of one stream in a round of the loop:
        a thousand of them keep nobody waiting."""
        async with self._telling:
            found, position = stream.since(position, ITEMS_AT_ONCE)
            told, content = len(found), b"".join(map(_sent, found))
            del found  # who reads nothing has a piece here, as bytes
            await asyncio.sleep(0)
        await _send(request, response, content)
        return told, position

    async def _ended(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        last = self._service.known(request.match_info["id"])
        await _send(request, response, f"event: end\ndata: {json.dumps(last)}\n\n".encode())
        await response.write_eof()
        return response


async def _event_stream(request: web.Request) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    if request.transport is not None:
        it = request.transport.get_extra_info("socket")
        it.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BYTES)
    return response


async def _send(request: web.Request, response: web.StreamResponse, content: bytes) -> None:
    """Raises ConnectionResetError where nobody takes it: then the connection is ended."""
    try:
        async with asyncio.timeout(TAKEN_WITHIN_S):
            await response.write(content)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # closing it would wait for what is not taken
        raise ConnectionResetError(f"nothing was taken for {TAKEN_WITHIN_S:g} s") from None


def _bearer(request: web.Request) -> str:
    """The token that it is sent with; "" without one."""
    kind, _, token = request.headers.get("Authorization", "").strip().partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _follows(request: web.Request) -> bool:
    """Raises ConfigError."""
    return flag("follow", request.query.get("follow", "1"))


def _position(request: web.Request, stream: LineStream) -> int:
    """Where a stream goes on. Raises ConfigError."""
    last = _last_id(request)
    return 0 if last is None else stream.after(last)


def _last_id(request: web.Request) -> int | None:
    """Raises ConfigError."""
    last, name = request.headers.get("Last-Event-ID"), "Last-Event-ID"
    if not last:
        last, name = request.query.get("after"), "after"
    if last is None:
        return None
    if not (last.isascii() and last.isdecimal()) or len(last) > 18:
        raise ConfigError(f"{name}: expected a number, found {last!r:.80}")
    return int(last)


def _sent(item: Item) -> bytes:
    kind = f"event: {item.kind}\n" if item.kind else ""
    return f"{kind}id: {item.id}\ndata: {json.dumps(item.data)}\n\n".encode()


def _by(request: web.Request) -> str:
    return str(request[CALLER].name)


async def _body(request: web.Request, *known: str) -> dict[str, Any]:
    """As ``read_body``."""
    return await read_body(request, _by(request), *known)


async def _answered(answer: Future[str]) -> str:
    """Raises StoreFailed where the journal can't be written, InDoubt where it may have been; what
    the office raises."""
    told = asyncio.wrap_future(answer)
    told.add_done_callback(lambda told: told.cancelled() or told.exception())  # nobody may ask it
    try:
        return await asyncio.wait_for(asyncio.shield(told), ANSWER_TIMEOUT_S)
    except TimeoutError:
        if answer.cancel():
            raise StoreFailed(f"{UNWRITTEN}: nothing was done") from None
        raise InDoubt(f"{UNWRITTEN}: it may be done later, or not") from None


async def _json_of(
    request: web.Request, made: Callable[[], Any], crew: Crew = WORDS
) -> web.Response:
    """Of what may be large: made, and put in words, in a thread."""
    text = await crew.do(_by(request), lambda: json.dumps(made()))
    return web.Response(text=text, content_type="application/json")


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)
