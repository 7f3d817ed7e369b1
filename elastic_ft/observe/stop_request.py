"""Someone outside asks a job to end: a file in its run folder that names the run which is to.

The next run of the job is not meant: where another controller follows, it is asked again. Whoever
may write the run folder may ask.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from elastic_ft.errors import ConfigError, JobFailed
from elastic_ft.observe import alive
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store, open_store

NAME, NOW = "stop.json", "stop-now.json"
POLL_S = 0.2
WITH_CHECKPOINT, AT_ONCE = "elastic-ft stop", "elastic-ft stop --now"  # in the journal


def stop(run_url: str, now: bool, say: Callable[[str], object], timeout_s: float) -> str:
    """Asks whoever has the job, and waits for its end. Returns how it ended, in words.

    Raises ConfigError where nobody has it; JobFailed where nobody alive obeys in time; StoreFailed.
    """
    store = open_store(run_url)
    owner, ended = owners.newest(store)
    if owner is None:
        raise ConfigError(f"{run_url}: not a run folder: no controller was ever here")
    if ended:
        raise ConfigError(f"{run_url}: the job has ended: {_end(run_url)}")
    asked, vigil, pause = "", alive.Vigil(run_url), threading.Event()
    until_s = time.monotonic() + timeout_s
    while not ended:
        if asked != owner.run:
            asked = owner.run
            _ask(store, asked, now)
            say(f"run {asked}, on {owner.host}, is asked to stop{' at once' if now else ''}")
        if dead := vigil.look():
            raise JobFailed(f"{run_url}: nothing is to be stopped: {dead}")
        if time.monotonic() > until_s:
            raise JobFailed(f"{run_url}: not stopped after {timeout_s:g} s; the request stands")
        pause.wait(POLL_S)
        owner, ended = owners.newest(store)
        assert owner is not None
    return _end(run_url)


def ask_to_stop(run_url: str, now: bool) -> bool:
    """Of whoever has the job just now; returns at once. False: nobody has. Raises StoreFailed."""
    store = open_store(run_url)
    owner, _ = owners.newest(store)
    if owner is not None:
        _ask(store, owner.run, now)
    return owner is not None


def _ask(store: Store, run: str, now: bool) -> None:
    for name in (NAME, NOW) if now else (NAME,):
        store.put(name, json.dumps({"run": run}).encode())


def _end(run_url: str) -> str:
    result = RunReader(run_url).result()
    if not result:
        return "without a result"
    return f"{result['status']}: {result['reason'] or 'all steps are done'}"
