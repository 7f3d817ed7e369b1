"""A start beside a controller that lives: it is asked to hand the job over, and waited for.

Taking over without asking is safe, too (``storage.owners``), and costs the steps since the newest
checkpoint. One that is asked ends at the next step boundary, with a checkpoint of that step. Where
the controller is gone and workers train on, the next one comes within seconds: it is asked then.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil

from elastic_ft.errors import JobFailed, StoreFailed
from elastic_ft.observe import alive
from elastic_ft.observe.lines import local_path
from elastic_ft.observe.run_reader import RunReader
from elastic_ft.storage import owners
from elastic_ft.storage.store import Store, open_store

NAME = "handover.json"
REASON = "another start of the job takes over"  # in the journal
WHY_MAX = 300
POLL_S = 0.2
READ_DEADLINE_S = 10.0  # a store that is away is waited for by others
TIMEOUT_S = 150.0  # a clean stop has 120 s (core.policy.Policy.stop_timeout_s)
NEXT_S = 60.0  # for a controller to follow on one that is gone: it imports torch
SEEN_S, SEEN_REMOTE_S = 3.5, 12.0  # within which one that lives renews its sign
CLOCKS_S = 120.0  # by which the clock of another machine may be slow


def is_given(result: Mapping[str, Any]) -> bool:
    """Whether a run with this result.json has ended because another start takes the job over."""
    reason = str(result.get("reason") or "")
    return result.get("status") == "stopped" and reason.startswith(REASON)


def await_handover(
    run_url: str,
    say: Callable[[str], object],
    timeout_s: float = TIMEOUT_S,
    next_s: float = 0.0,
    stopped: Callable[[], str] = lambda: "",
) -> None:
    """Returns once nobody alive has the job, or after ``timeout_s``. Changes nothing but to ask;
    and where it is broken off, what was asked is withdrawn.

    Args:
        say: told what happens, a line each; nothing if nobody lives.
        next_s: for how long a controller is waited for that follows on one that is gone, where
            workers of this machine train on.
        stopped: why nobody is to wait any more; "" while one is.

    Raises JobFailed once it is ``stopped``; StoreFailed; StorageError where the owner's object
    can't be understood.
    """
    store = open_store(run_url, deadline_s=READ_DEADLINE_S)
    owner, ended = owners.newest(store)
    if owner is None or ended or not (_lives(run_url) or _is_followed(run_url, say, next_s)):
        return
    owner, ended = owners.newest(store)  # the one that has followed
    if owner is None or ended:
        return
    say(f"run {owner.run} of this job is alive on {owner.host}: it is asked to hand over")
    store.put(NAME, json.dumps({"run": owner.run}).encode())
    try:
        _await_end(store, owner, run_url, say, timeout_s, stopped)
    except BaseException:  # an interrupt, too
        with contextlib.suppress(StoreFailed):  # then it ends, though nobody follows
            store.delete(NAME)
        raise


def _await_end(
    store: Store,
    owner: owners.Owner,
    run_url: str,
    say: Callable[[str], object],
    timeout_s: float,
    stopped: Callable[[], str],
) -> None:
    """As ``await_handover``, of one that was asked."""
    began_s, vigil, pause = time.monotonic(), alive.Vigil(run_url), threading.Event()
    while not _has_ended(store, owner.run):
        if why := stopped():
            raise JobFailed(
                f"{why}, while run {owner.run} of this job, on {owner.host}, was asked to hand "
                "over: it is no longer, and goes on unless it has obeyed"
            )
        if dead := vigil.look():
            say(f"run {owner.run} did not hand over: {dead}")
            return
        if time.monotonic() - began_s > timeout_s:
            say(f"run {owner.run} did not hand over within {timeout_s:g} s: it is taken over")
            return
        pause.wait(POLL_S)
    say(f"run {owner.run} has handed over, after {time.monotonic() - began_s:.1f} s")


def asked_of(content: bytes) -> tuple[str, str]:
    """The run that is to hand over, or to stop, and why, if that is said. Raises ValueError."""
    try:
        found = json.loads(content)
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("run"), str):
        raise ValueError(f"{NAME}: expected run, a name; found {content[:80]!r}")
    why = "".join(c for c in str(found.get("why", ""))[:WHY_MAX] if c.isprintable())
    return str(found["run"]), why


def _lives(run_url: str) -> bool:
    """Whether its sign is renewed while one looks: clocks of two machines may differ."""
    first = alive.last_sign(run_url)
    local = local_path(run_url) is not None
    old_s = alive.STILL_S if local else alive.STILL_REMOTE_S
    if first is None or first.gone:
        return False
    if time.time() - first.at_s > old_s + (0.0 if first.is_of_here else CLOCKS_S):
        return False
    patience_s = SEEN_S if local else SEEN_REMOTE_S
    deadline_s, pause = time.monotonic() + patience_s, threading.Event()
    while time.monotonic() < deadline_s:
        if alive.last_sign(run_url) not in (None, first):
            return True
        pause.wait(POLL_S)
    return False


def _is_followed(run_url: str, say: Callable[[str], object], within_s: float) -> bool:
    """Whether another controller comes, for workers of this machine that train on."""
    before = alive.last_sign(run_url)
    if not within_s or before is None or not before.followed:
        return False
    if not (left := _workers_here(run_url)):
        return False
    say(
        f"no controller of this job is alive, {len(left)} of its workers are: the next one is "
        f"waited for, up to {within_s:g} s; elastic-ft attach {run_url} would show the job"
    )
    until_s, pause = time.monotonic() + within_s, threading.Event()
    while time.monotonic() < until_s and any(map(is_alive, left)):
        sign = alive.last_sign(run_url)
        if sign is not None and sign.in_charge and sign != before and not sign.gone:
            return True
        pause.wait(POLL_S)
    return False


def _workers_here(run_url: str) -> list[psutil.Process]:
    """Of the newest generation: those of this machine that live. A pid may be another's by now."""
    lines = [one for one in RunReader(run_url).events() if one["event"] == "generation_formed"]
    found = []
    for member in lines[-1]["members"] if lines else ():
        if member["host"] == os.uname().nodename and psutil.pid_exists(member["pid"]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(member["pid"])
                if process.create_time() < lines[-1]["at_s"] and is_alive(process):
                    found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def _has_ended(store: Store, run: str) -> bool:
    owner, ended = owners.newest(store)
    return ended or owner is None or owner.run != run
