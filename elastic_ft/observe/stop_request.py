"""Someone outside asks a job to end: a file in its run folder that names the run which is to.

The next run of the job is not meant: where another controller follows, it is asked again. Whoever
may write the run folder may ask.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from elastic_ft.errors import ConfigError, JobFailed, StoreFailed
from elastic_ft.observe import alive, handover
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import owners
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.store import Store, StoreError, open_store

NAME, NOW = "stop.json", "stop-now.json"
POLL_S = 0.2
FOLLOWS_S = 20.0  # for another start to claim the job that it was given: it imports torch
MAY_PASS = (FailureKind.UNREACHABLE, FailureKind.BUSY)  # an outage
WITH_CHECKPOINT, AT_ONCE = "elastic-ft stop", "elastic-ft stop --now"  # in the journal


def stop(run_url: str, now: bool, say: Callable[[str], object], timeout_s: float) -> str:
    """Asks whoever has the job, and waits for its end. Returns how it ended, in words.

    Raises ConfigError where nobody has it; JobFailed where nobody alive obeys in time; StoreFailed.
    """
    stopping = _Stopping(run_url, now, say)
    vigil, pause, until_s = alive.Vigil(run_url), threading.Event(), time.monotonic() + timeout_s
    while not (ended := stopping.look()):
        if not stopping.is_followed and (dead := vigil.look()):
            raise JobFailed(f"{run_url}: nothing is to be stopped: {dead}")
        if time.monotonic() > until_s:
            raise JobFailed(f"{run_url}: not stopped after {timeout_s:g} s; {stopping.stands()}")
        pause.wait(POLL_S)
    return ended


class _Stopping:
    """A request to whoever has the job, made again of whoever follows. A store that is away may
    come back: it is tried again."""

    def __init__(self, run_url: str, now: bool, say: Callable[[str], object]) -> None:
        self._url, self._now, self._say = run_url, now, say
        self._store = open_store(run_url, deadline_s=alive.READ_DEADLINE_S)
        self._asked = self._away = self._gave = ""
        self._gave_until_s = 0.0

    @property
    def is_followed(self) -> bool:
        """Whether the run that was looked at has given the job to another, which is to come."""
        return self._gave != ""

    def look(self) -> str:
        """How the job has ended; "" if it has not. Raises ConfigError where it had before;
        StoreFailed where nothing can be read from the start, and waiting is no help."""
        try:
            ended = self._look()
        except StoreFailed as error:
            may_pass = isinstance(error, StoreError) and error.kind in MAY_PASS
            if not self._asked and not may_pass:
                raise
            if not self._away:
                self._say(f"the run folder's store is away, and is tried again: {error}")
            self._away = str(error)
            return ""
        self._away = ""
        return ended

    def _look(self) -> str:
        owner, ended = owners.newest(self._store)
        if owner is None:
            raise ConfigError(f"{self._url}: not a run folder: no controller was ever here")
        if ended and self._awaits_next(owner.run):
            return ""
        self._gave = ""
        if ended and not self._asked:
            raise ConfigError(f"{self._url}: the job has ended: {_end(self._url)}")
        if not ended and self._asked != owner.run:
            _ask(self._store, owner.run, self._now)
            self._asked = owner.run
            at_once = " at once" if self._now else ""
            self._say(f"run {owner.run}, on {owner.host}, is asked to stop{at_once}")
        return _end(self._url) if ended else ""

    def _awaits_next(self, run: str) -> bool:
        """Whether who has been given the job by ``run``, which has ended, may yet claim it. No
        result: somebody who begins has removed it, as nobody ends without. Raises StoreFailed."""
        result = RunReader(self._url).known_result()
        if result and not handover.is_given(result):
            return False
        now_s = time.monotonic()
        if self._gave != run:
            self._gave, self._gave_until_s = run, now_s + FOLLOWS_S
        return now_s < self._gave_until_s

    def stands(self) -> str:
        """What has become of the request."""
        if not self._asked:
            return f"it could not be asked: {self._away}"
        return "the request stands" + (f"; {self._away}" if self._away else "")


def ask_to_stop(run_url: str, now: bool, why: str = "") -> bool:
    """Of whoever has the job just now; returns at once. False: nobody has. Raises StoreFailed.

    ``why``: for its journal; "": somebody wants it so.
    """
    store = open_store(run_url)
    owner, _ = owners.newest(store)
    if owner is not None:
        _ask(store, owner.run, now, why)
    return owner is not None


def _ask(store: Store, run: str, now: bool, why: str = "") -> None:
    said = {"run": run} | ({"why": why} if why else {})
    for name in (NAME, NOW) if now else (NAME,):
        store.put(name, json.dumps(said).encode())


def _end(run_url: str) -> str:
    """In words. Raises StoreFailed."""
    result = RunReader(run_url).known_result()
    if not result:
        return "without a result"
    return f"{result['status']}: {result['reason'] or 'all steps are done'}"
