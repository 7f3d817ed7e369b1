"""The page, its files, and the picture of a job that it draws (``observe.page``)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from elastic_ft.observe.page import POLICY, TYPES, static
from elastic_ft.observe.run_watch import RunWatch

WATCHED_MAX = 32  # runs that somebody has looked at of late: the others are read anew


class PageRoutes:
    """Args:
    run_url: the run folder of a job.
    looked: what comes of a look at a request's job, which may take long.
    """

    def __init__(
        self,
        run_url: Callable[[str], str],
        looked: Callable[[web.Request, Callable[[], str]], Awaitable[str]],
    ) -> None:
        self._run_url, self._looked = run_url, looked
        self._watches: OrderedDict[str, RunWatch] = OrderedDict()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/", self._index),
            web.get("/jobs/{id}", self._index),
            web.get("/page/{name}", self._file),
            web.get("/api/v1/jobs/{id}/view", self._view),
        ]

    async def _index(self, request: web.Request) -> web.Response:
        return _answer("index.html")

    async def _file(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in TYPES:
            raise web.HTTPNotFound(text=f"no file {name!r:.80}")
        return _answer(name)

    async def _view(self, request: web.Request) -> web.Response:
        url = self._run_url(request.match_info["id"])
        watch = self._watches.pop(url, None) or RunWatch(url)
        self._watches[url] = watch
        if len(self._watches) > WATCHED_MAX:
            self._watches.popitem(last=False)
        text = await self._looked(request, lambda: json.dumps(watch.look()))
        answer = web.Response(text=text, content_type="application/json")
        answer.enable_compression()
        return answer


def _answer(name: str) -> web.Response:
    headers = {
        "Content-Type": TYPES[name],
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return web.Response(body=static(name), headers=headers)
