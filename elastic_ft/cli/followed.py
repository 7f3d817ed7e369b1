"""A running job, as its run folder alone shows it."""

from __future__ import annotations

import time

from elastic_ft.cli.terminal import Ending
from elastic_ft.errors import ConfigError
from elastic_ft.observe import stop_request
from elastic_ft.observe.alive import Vigil
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store

LOOK_S = 0.5  # at a run folder, whether its job has ended


class Followed:
    """A job of which there is the run folder alone."""

    def __init__(self, url: str) -> None:
        self._url, self._store = url, open_store(url)
        self._vigil, self._asked = Vigil(url), 0

    def poll(self, timeout_s: float) -> Ending | None:
        time.sleep(max(timeout_s, LOOK_S))
        owner, ended = owners.newest(self._store)
        if owner is None:
            raise ConfigError(f"{self._url}: not a run folder: no controller was ever here")
        if ended:
            return Ending(0)
        dead = self._vigil.look()
        if not dead:
            return None
        last = next(reversed(RunReader(self._url).events()), {})
        failed = last.get("event") == "controller_failed"
        return Ending(1, f"{self._url}: {last['reason'] if failed else dead}")

    def stop(self) -> None:
        self._asked += 1
        stop_request.ask_to_stop(self._url, now=self._asked > 1)
