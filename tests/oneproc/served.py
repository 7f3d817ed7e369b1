"""A service without a cluster, behind a port of its own; and what tests hand in to it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from elastic_ft.core.sharing.asks import QueueTerms, SharingTerms
from elastic_ft.errors import Superseded
from elastic_ft.service.access import Rights
from elastic_ft.service.api import Api
from elastic_ft.service.cluster_watch import Sight
from elastic_ft.service.service import Service
from elastic_ft.service.service_actor import runner_of
from elastic_ft.service.service_client import Client

JOB: dict[str, Any] = {
    "name": "tiny",
    "steps": 10,
    "model": {"preset": "decoder-1m"},
    "data": {"url": "stdlib:"},
}
TERMS = SharingTerms({"default": QueueTerms(), "research": QueueTerms(ceiling=2)})
WAIT_S = 90.0


class Served:
    """A service of ``folder`` behind a port of the kernel's choice, until it is left."""

    def __init__(
        self,
        folder: Path | str,
        users: dict[str, Rights] | None = None,
        tls: Any = None,
        terms: SharingTerms = TERMS,
        look: Callable[[], Sight] = Sight,
    ) -> None:
        self._tls, kind = tls, "https" if tls else "http"
        self.superseded = threading.Event()
        self.service = Service(  # those of one folder follow each other, as lives of one actor do
            str(folder), terms, no_cluster, self._leave, look=look, actor="a"
        )
        self.service.start()
        self._loop = asyncio.new_event_loop()
        self.api = Api(self.service, users or {}, print)
        self._runner = runner_of(self.api.application())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(WAIT_S)
        self.url = f"{kind}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _open(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._tls).start()

    def _leave(self, why: Superseded) -> None:
        self.superseded.set()

    def connections(self) -> int:
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    def client(self, token_file: Path | None = None) -> Client:
        return Client(self.url, token_file=token_file, away_s=0.0)

    def close(self) -> None:
        self.service.close()
        for hands in (self.service._pool, self.service._idle):
            hands.shutdown(cancel_futures=True)  # none is at work still when a test's patches end
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(WAIT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)


def no_cluster(job: Any, run_url: str) -> None:
    raise AssertionError("no job has room on a cluster without nodes")


def post(served: Served, content: bytes, path: str = "jobs", **headers: str) -> Any:
    said = {"Content-Type": "application/json"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    request = urllib.request.Request(f"{served.url}/api/v1/{path}", content, said, method="POST")
    return urllib.request.urlopen(request, timeout=WAIT_S)


def told(folder: Path, steps: int) -> None:
    """A run folder of so many committed steps."""
    folder.mkdir(parents=True)
    lines = [
        json.dumps({"step": step, "loss": 1.0, "generation": 1}) for step in range(1, steps + 1)
    ]
    (folder / "steps.jsonl").write_text("".join(f"{line}\n" for line in lines))


class ServedApart:
    """A service in a process of its own, which may stand still.

    Attributes:
        pid: its process's.
    """

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", __name__, str(folder)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def stand_still(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)  # each of its threads: until then it may answer

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.go_on()
        self._process.communicate(timeout=WAIT_S)


def _serve_apart(folder: str) -> None:
    served = Served(folder)
    print(served.url, flush=True)
    sys.stdin.read()  # until whoever started it wants no more of it, or is gone
    served.close()


if __name__ == "__main__":
    _serve_apart(sys.argv[1])
