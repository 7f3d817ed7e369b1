"""A running job, as its run folder alone shows it."""

from __future__ import annotations

import queue
import threading
import time

from elastic_ft.cli.progress import say
from elastic_ft.cli.terminal import Ending
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.observe import stop_request
from elastic_ft.observe.alive import READ_DEADLINE_S, Vigil
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import owners
from elastic_ft.storage.store import open_store

LOOK_S = 0.5  # at a run folder, whether its job has ended


class Followed:
    """A job of which there is the run folder alone. A store that is away for a while ends nothing,
    and keeps no caller of ``poll`` waiting."""

    def __init__(self, url: str) -> None:
        self._url, self._store = url, open_store(url, deadline_s=READ_DEADLINE_S)
        self._vigil, self._asked, self._is_away = Vigil(url), 0, False
        self._found: queue.SimpleQueue[Ending | Exception] = queue.SimpleQueue()
        self._watch = threading.Thread(target=self._look_always, name="followed", daemon=True)

    def poll(self, timeout_s: float) -> Ending | None:
        if self._watch.ident is None:
            self._watch.start()
        try:
            found = self._found.get(timeout=max(timeout_s, LOOK_S))
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def look(self) -> Ending | None:
        """How it has ended; None if it has not. Raises StoreFailed, StorageError; ConfigError where
        this is no run folder."""
        owner, ended = owners.newest(self._store)
        if owner is None:
            raise ConfigError(f"{self._url}: not a run folder: no controller was ever here")
        if ended:
            RunReader(self._url).known_result()  # who is told of the end reads it
            return Ending(0)
        dead = self._vigil.look()
        return Ending(1, f"{self._url}: {self._last_words() or dead}") if dead else None

    def stop(self) -> None:
        self._asked += 1
        stop_request.ask_to_stop(self._url, now=self._asked > 1)

    def _last_words(self) -> str:
        """Of a controller that could say why it failed."""
        try:
            last = next(reversed(RunReader(self._url).events()), {})
        except ConfigError:  # it can't be read: that nobody is alive is known all the same
            return ""
        return str(last["reason"]) if last.get("event") == "controller_failed" else ""

    def _look_always(self) -> None:
        try:
            while (found := self._look_through_outages()) is None:
                time.sleep(LOOK_S)
        except Exception as error:
            self._found.put(error)
        else:
            self._found.put(found)

    def _look_through_outages(self) -> Ending | None:
        try:
            found = self.look()
        except StoreFailed as error:
            if not self._is_away:
                self._is_away = True
                say(f"the run folder can't be read, and is looked at again: {error}")
            dead = self._vigil.look()
            return Ending(1, f"{self._url}: {dead}") if dead else None
        if self._is_away:
            self._is_away = False
            say("the run folder can be read again")
        return found
