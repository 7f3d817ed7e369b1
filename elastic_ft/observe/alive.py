"""Whether anybody runs a job: the sign of life that its controller leaves in the run folder.

A sign that is renewed is a controller that lives, whatever the clocks of two machines say. One of
this machine whose process is gone is dead at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elastic_ft.core.typed import decoder
from elastic_ft.errors import MALFORMED, ElasticError
from elastic_ft.observe.lines import local_path

if TYPE_CHECKING:
    from elastic_ft.storage.store import Store

NAME = "alive.json"
EVERY_S = 1.0
GONE_S = 3.0  # without a new sign, of a process of this machine that is not there
STILL_S, STILL_REMOTE_S = 15.0, 30.0  # without a new sign; a remote folder is some seconds behind
PIDS = 1 << 31
READ_DEADLINE_S = 10.0  # of a store that does not answer
AWAY_S = 600.0  # a sign that can't be read, or is not there, says then that nobody is waited for


@dataclass(frozen=True, slots=True)
class Sign:
    at_s: float  # unix time of the controller's machine
    host: str
    pid: int
    in_charge: bool = False  # it has the job; before, it may wait for the checkpoint store
    followed: bool = False  # where it ends, another one comes for its workers
    within_s: float = 0.0  # of its end, with no sign before; 0: who starts that one makes signs

    @property
    def is_of_here(self) -> bool:
        """Whether it is of this machine."""
        return self.host == os.uname().nodename

    @property
    def gone(self) -> bool:
        """Whether it was a process of this machine, and that is no more."""
        return self.is_of_here and not psutil.pid_exists(self.pid)

    def patience_s(self, still_s: float, age_s: float = 0.0) -> float:
        """Without a new sign, until nobody is alive.

        Args:
            still_s: for one whose process can't be looked at.
            age_s: of the sign by now, which counts for the one that follows.
        """
        return max(GONE_S if self.gone else still_s, self.within_s - max(0.0, age_s))


class Alive:
    """Leaves a sign again and again, also while its controller waits for a store.

    Args:
        followed: whether another controller comes where this one ends.
        within_s: as in ``Sign``.

    Attributes:
        in_charge: set once its controller has the job.
    """

    in_charge = False

    def __init__(self, folder: Path, followed: bool = False, within_s: float = 0.0) -> None:
        self._folder, self._over, self._followed = folder, threading.Event(), followed
        self._within_s = within_s if followed else 0.0
        self._thread = threading.Thread(target=self._renew, name="alive", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(EVERY_S)

    def _renew(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # a full disk: the journal's next line says so
                leave_sign(self._folder, self.in_charge, self._followed, self._within_s)
            if self._over.wait(EVERY_S):
                return


def leave_sign(
    folder: Path, in_charge: bool = False, followed: bool = False, within_s: float = 0.0
) -> None:
    """This process lives now."""
    swap = folder / f"{NAME}.tmp"
    swap.write_text(_sign(in_charge, followed, within_s))
    swap.replace(folder / NAME)


def show(run_url: str) -> None:
    """The same, wherever the run folder is, of one that is not in charge, and sees to it that
    somebody is. Raises OSError, StoreFailed."""
    from elastic_ft.storage.store import open_store  # commands begin without it

    if (folder := local_path(run_url)) is not None:
        leave_sign(folder, followed=True)
    else:
        open_store(run_url).put(NAME, _sign(False, True).encode())


def _sign(in_charge: bool, followed: bool, within_s: float = 0.0) -> str:
    sign = Sign(time.time(), os.uname().nodename, os.getpid(), in_charge, followed, within_s)
    return json.dumps(asdict(sign))


def last_sign(run_url: str) -> Sign | None:
    """The last sign; None if there is none that can be read."""
    try:
        return Signs(run_url).last()
    except (OSError, ElasticError):  # who waits looks again
        return None


class Signs:
    """Of one run folder, wherever that is."""

    def __init__(self, run_url: str) -> None:
        self._url = run_url
        self._store: Store | None = None

    def last(self) -> Sign | None:
        """None if there is none that can be understood. Raises OSError, StoreFailed, StorageError
        where that can't be said."""
        try:
            return _understood(self._content())
        except MALFORMED:
            return None

    def _content(self) -> bytes:
        if (folder := local_path(self._url)) is not None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return (folder / NAME).read_bytes()
            return b""
        from elastic_ft.storage.store import if_there, open_store

        if self._store is None:
            self._store = open_store(self._url, deadline_s=READ_DEADLINE_S)
        store = self._store
        return if_there(lambda: store.get(NAME)) or b""


def _understood(content: bytes) -> Sign:
    """Raises ValueError, OverflowError and more for what no controller writes."""
    sign: Sign = decoder(Sign)(json.loads(content))
    datetime.fromtimestamp(sign.at_s, UTC)  # a time that can be told
    if not 0 < sign.pid < PIDS:
        raise ValueError(sign.pid)
    return replace(sign, within_s=min(max(0.0, sign.within_s), AWAY_S))


def nobody(sign: Sign) -> str:
    """That no controller is alive, in words."""
    when = datetime.fromtimestamp(sign.at_s, UTC)
    ago_s = max(0.0, time.time() - sign.at_s)
    where = f"process {sign.pid} on {sign.host}"
    return (
        f"no controller is alive: its last sign of life was {ago_s:.0f} s ago "
        f"({when:%Y-%m-%d %H:%M:%S} UTC, {where}); elastic-ft resume goes on from there"
    )


def seems_dead(run_url: str) -> str:
    """For who does not wait: why the controller of a run without an end is taken for dead."""
    sign = last_sign(run_url)
    if sign is None:
        return ""
    age_s = time.time() - sign.at_s
    still_s = STILL_S if local_path(run_url) is not None else STILL_REMOTE_S
    return nobody(sign) if age_s > sign.patience_s(still_s) else ""


class Vigil:
    """Watches for a sign that stays the same, while something is waited for."""

    def __init__(self, run_url: str) -> None:
        self._signs = Signs(run_url)
        self._still_s = STILL_S if local_path(run_url) is not None else STILL_REMOTE_S
        self._sign: Sign | None = None
        self._age_s = 0.0  # of the first sign, as it was read: by two clocks
        self._since_s = self._next_look_s = self._read_at_s = time.monotonic()
        self._away = ""  # why it can't be read

    def look(self) -> str:
        """Why the controller is dead, in words; empty while it may live. While the sign can't be
        read it may, for up to AWAY_S; then it has as long as ever to be renewed."""
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + EVERY_S
            self._read()
        now_s = time.monotonic()
        if self._away:
            past_s = now_s - self._read_at_s
            why = f"its sign of life can't be read for {past_s:.0f} s now: {self._away}"
            return f"whether a controller is alive is not known: {why}" if past_s > AWAY_S else ""
        if self._sign is None:
            still_s = now_s - self._since_s
            why = f"no controller has made a sign of life for {still_s:.0f} s; elastic-ft resume"
            return f"{why} goes on from there" if still_s > AWAY_S else ""
        patience_s = self._sign.patience_s(self._still_s, self._age_s)
        return nobody(self._sign) if now_s - self._since_s > patience_s else ""

    def _read(self) -> None:
        try:
            sign = self._signs.last()
        except (OSError, ElasticError) as error:
            self._away = " ".join(str(error).split())
            return
        now_s = time.monotonic()
        if self._away or (sign is not None and sign != self._sign):
            self._since_s = now_s
            self._age_s = time.time() - sign.at_s if sign and self._sign is None else 0.0
        self._sign, self._away, self._read_at_s = sign or self._sign, "", now_s
