"""The detached actor in which the service lives, at one port for all its lives."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

import ray
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from elastic_ft.config import Job
from elastic_ft.errors import StoreFailed, Superseded
from elastic_ft.hosts.ray.lives import is_restarted_actor
from elastic_ft.hosts.ray.names import NAMESPACE
from elastic_ft.hosts.ray.started_by import KEY
from elastic_ft.hosts.ray.warm_nodes import WarmNodes
from elastic_ft.observe.lines import local_path
from elastic_ft.service.api import Api
from elastic_ft.service.served_at import ANYWHERE, HowToServe, bound, service_url
from elastic_ft.service.service import Service
from elastic_ft.storage.mounts import plain_path
from elastic_ft.storage.store import if_there, open_store
from elastic_ft.transport.title import set_title

log = logging.getLogger(__name__)
T = TypeVar("T")
NAME = "elastic-ft-service"  # one per cluster
PORT_FILE = "service.json"
OPEN_TIMEOUT_S = 90.0  # a store that is away included
AGAIN_S = 2.0  # before a store that is away is asked again
CALLS = 16
SILENT_S = 75.0  # of a connection without a request, or with half of one's head: it is ended


class ServiceActor:
    """Made again by Ray when it dies: everything is in its folder."""

    def __init__(self, options: HowToServe) -> None:
        set_title("ef-service")
        self._options = options
        self._itself = ray.get_runtime_context().current_actor
        self._service = Service(
            options.folder,
            options.terms,
            self._submit,
            self._leave,
            actor=options.actor,
            take_over=options.take_over and not self._is_restarted(),
        )
        self._warm = WarmNodes(lambda: self._service.hosts)
        self._loop = asyncio.new_event_loop()
        self._ended = threading.Event()
        self.url = ""
        self._insist(self._service.start)
        opened: Future[None] = Future()
        threading.Thread(target=self._serve, args=[opened], name="http", daemon=True).start()
        threading.Thread(target=_import_trainer, name="imports", daemon=True).start()
        try:
            opened.result(None if self._is_restarted() else OPEN_TIMEOUT_S)
        except TimeoutError:
            raise StoreFailed(f"it does not serve after {OPEN_TIMEOUT_S:g} s") from None
        if options.warm:
            self._warm.start()

    def _insist(self, action: Callable[[], T]) -> T:
        """Its answer. Of one that Ray has made again however long its store is away: an actor that
        can't be made is not made once more. Raises what it raises."""
        return insisted(action, self._is_restarted())

    def _submit(self, job: Job, run_url: str) -> None:
        submit_on_ray(job, run_url, self._warm.executable() if self._options.warm else "")

    def where(self) -> dict[str, Any]:
        return {"url": self.url, "folder": self._service.folder, "pid": os.getpid()}

    def _serve(self, opened: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            api = Api(self._service, self._options.users, self._leave)
            how = replace(self._options, port=self._options.port or self._earlier_port())
            opening = open_service(api, how, self._is_restarted(), self._note_address)
            self._loop.run_until_complete(opening)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(None)
        self._loop.run_forever()

    def _note_address(self, port: int) -> None:
        own = ray.util.get_node_ip_address() if self._options.host in ANYWHERE else ""
        url = service_url(own or self._options.host, port, bool(self._options.tls_cert))
        store, said = open_store(self._service.folder), {"url": url, "port": port}
        self._insist(lambda: store.put(PORT_FILE, json.dumps(said).encode()))
        self.url = self._service.url = url

    def _is_restarted(self) -> bool:
        return is_restarted_actor()

    def _earlier_port(self) -> int:
        store = open_store(self._service.folder)
        content = self._insist(lambda: if_there(lambda: store.get(PORT_FILE)))
        try:
            return int(json.loads(content or b"")["port"])
        except (ValueError, KeyError, TypeError):
            return 0

    def _leave(self, why: Superseded | None = None) -> None:
        """For good: jobs go on."""
        if self._ended.is_set():
            return
        self._ended.set()
        if why is not None:
            log.error("the service ends: %s", why)
        try:
            self._warm.close()
            if why is None:
                self._service.let_go()
            self._service.close(in_good_order=why is None)
        finally:  # it takes in nothing any more
            ray.kill(self._itself)


async def open_service(
    api: Api, how: HowToServe, is_restarted: bool, note: Callable[[int], object]
) -> None:
    """``note``: told the port, in another thread. No method: an actor that has one such is another
    kind, whose calls run in a loop."""
    tls = how.tls()
    runner = runner_of(api.application())
    await runner.setup()
    port = await bound(runner, how.host, how.port, tls, is_restarted)
    await asyncio.to_thread(note, port)


def insisted(action: Callable[[], T], is_restarted: bool) -> T:
    """The answer of ``action``: of a service that was there before, however long its store is away.
    Raises what it raises."""
    while True:
        try:
            return action()
        except StoreFailed as error:
            if not is_restarted:
                raise
            log.warning("the service begins again, and its folder is away: %s", error)
        time.sleep(AGAIN_S)


def runner_of(application: web.Application) -> web.AppRunner:
    """Has no patience with who connects and says nothing: descriptors are few."""
    log_of_server = logging.getLogger("aiohttp.server")
    log_of_server.addFilter(_is_no_junk)
    return web.AppRunner(
        application, access_log=None, keepalive_timeout=SILENT_S, logger=log_of_server
    )


def _is_no_junk(record: logging.LogRecord) -> bool:
    """What is no HTTP is answered so, and leaves no page in the log, whoever sends it how often."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def submit_on_ray(job: Job, run_url: str, executable: str) -> None:
    """As ``hands.Submit``. ``executable``: that its processes are started with; "": Python."""
    from ray.train import RunConfig

    from elastic_ft.hosts.ray.trainer import ElasticTrainer

    folder = plain_path(run_url)
    url = run_url if folder is None else str(folder)
    parent, _, name = url.rpartition("/")
    environment = {KEY: executable} if executable else {}
    config = RunConfig(name=name, storage_path=parent, worker_runtime_env=environment)
    ElasticTrainer(job, run_config=config).start()


def _import_trainer() -> None:
    """Torch takes seconds: not those of the first job."""
    import elastic_ft.hosts.ray.trainer  # noqa: F401


def start_actor(options: HowToServe, this_node: bool) -> Any:
    """Asks for the service's actor, if there is none. ``this_node``: it is to be reached here.

    Raises UsageError.
    """
    from elastic_ft.hosts.ray.controller_place import controller_places
    from elastic_ft.hosts.ray.ray_private import RAY_NODE_ID_KEY

    folder = local_path(options.folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    here = {"label_selector": {RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}}
    where = here if this_node else controller_places(options.folder).options
    actor_class = ray.remote(
        num_cpus=0,
        max_concurrency=CALLS,
        max_restarts=-1,
        lifetime="detached",
        name=NAME,
        namespace=NAMESPACE,
        get_if_exists=True,
        **where,
    )(ServiceActor)
    return actor_class.remote(options)
