"""A start beside a controller that lives: it is asked to hand the job over, and waited for.

Taking over without asking is safe, too (``storage.owners``), and costs the steps since the newest
checkpoint. One that is asked ends at the next step boundary, with a checkpoint of that step.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable

from elastic_ft.observe import alive
from elastic_ft.observe.lines import local_path
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store, open_store

NAME = "handover.json"
POLL_S = 0.2
TIMEOUT_S = 150.0  # a clean stop has 120 s (core.policy.Policy.stop_timeout_s)
SEEN_S, SEEN_REMOTE_S = 3.5, 12.0  # within which one that lives renews its sign


def await_handover(
    run_url: str, say: Callable[[str], object], timeout_s: float = TIMEOUT_S
) -> None:
    """Returns once nobody alive has the job, or after ``timeout_s``. Changes nothing but to ask.

    Args:
        say: told what happens, a line each; nothing if nobody lives.

    Raises StoreFailed; StorageError where the owner's object can't be understood.
    """
    store = open_store(run_url)
    owner, ended = owners.newest(store)
    if owner is None or ended or not _lives(run_url):
        return
    say(f"run {owner.run} of this job is alive on {owner.host}: it is asked to hand over")
    store.put(NAME, json.dumps({"run": owner.run}).encode())
    began_s, vigil, pause = time.monotonic(), alive.Vigil(run_url), threading.Event()
    while not _has_ended(store, owner.run):
        if dead := vigil.look():
            say(f"run {owner.run} did not hand over: {dead}")
            return
        if time.monotonic() - began_s > timeout_s:
            say(f"run {owner.run} did not hand over within {timeout_s:g} s: it is taken over")
            return
        pause.wait(POLL_S)
    say(f"run {owner.run} has handed over, after {time.monotonic() - began_s:.1f} s")


def asked_of(content: bytes) -> str:
    """The run that is to hand over. Raises ValueError."""
    try:
        found = json.loads(content)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("run"), str):
        raise ValueError(f"{NAME}: expected run, a name; found {content[:80]!r}")
    return str(found["run"])


def _lives(run_url: str) -> bool:
    """Whether its sign is renewed while one looks: clocks of two machines may differ."""
    first = alive.find(run_url)
    local = local_path(run_url) is not None
    old_s = alive.STILL_S if local else alive.STILL_REMOTE_S
    if first is None or first.gone or time.time() - first.at_s > old_s:
        return False
    patience_s = SEEN_S if local else SEEN_REMOTE_S
    deadline_s, pause = time.monotonic() + patience_s, threading.Event()
    while time.monotonic() < deadline_s:
        if alive.find(run_url) not in (None, first):
            return True
        pause.wait(POLL_S)
    return False


def _has_ended(store: Store, run: str) -> bool:
    owner, ended = owners.newest(store)
    return ended or owner is None or owner.run != run
