"""A service's sign of life in its folder: who would start another there, on whatever machine, sees
that it is renewed.

What counts is that a sign follows another while one looks: clocks of two machines may differ. One
that stands still makes none; it is taken over, and ends once it goes on (``storage.owners``).
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from elastic_ft.core.typed import decoder
from elastic_ft.errors import ConfigError, StoreFailed
from elastic_ft.observe.lines import local_path
from elastic_ft.storage.owners import Claim, Owner
from elastic_ft.storage.store import Store, if_there

log = logging.getLogger(__name__)
NAME = "alive.json"
EVERY_S = 2.0
STILL_S, STILL_REMOTE_S = 15.0, 30.0  # without a new sign: it is dead
LOOK_EVERY_S = 0.5
LAST_WORD_S = 10.0  # for the store to take it


@dataclass(frozen=True, slots=True)
class ServiceSign:
    """Attributes:
    run: as ``owners.Owner`` has it.
    number: of this sign; each has another.
    since_s: unix time of the service's own machine; ``up_s``: how long it has run.
    """

    run: str
    number: int
    host: str
    pid: int
    url: str
    since_s: float
    up_s: float


class SignsOfLife:
    """Leaves one again and again. ``url``: where the service serves, "" while it does not."""

    def __init__(self, store: Store, run: str, url: Callable[[], str]) -> None:
        self._store, self._run, self._url = store, run, url
        self._began_s, self._since_s = time.monotonic(), time.time()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="sign", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, claim: Claim) -> None:
        """No more signs, and the folder is told that this service has ended: nobody waits for the
        next sign. Not for longer than ``LAST_WORD_S``: a store that is away has a next one wait."""
        self._over.set()
        last = threading.Thread(target=self._end, args=[claim], name="last-word", daemon=True)
        last.start()
        last.join(LAST_WORD_S)

    def _end(self, claim: Claim) -> None:
        try:
            claim.ended()
        except StoreFailed as error:
            log.warning("the folder is not told that this service has ended: %s", error)

    def _renew(self) -> None:
        number, host, pid = 0, os.uname().nodename, os.getpid()
        while not self._over.is_set():
            number, up_s = number + 1, time.monotonic() - self._began_s
            sign = ServiceSign(self._run, number, host, pid, self._url(), self._since_s, up_s)
            try:
                self._store.put(NAME, json.dumps(asdict(sign)).encode())
            except StoreFailed as error:
                log.warning("no sign of life can be left: %s", error)
            self._over.wait(EVERY_S)


def sign_in(store: Store) -> ServiceSign | None:
    """None if there is none that can be understood. Raises StoreFailed."""
    content = if_there(lambda: store.get(NAME))
    try:
        sign: ServiceSign = decoder(ServiceSign)(json.loads(content or b""))
        datetime.fromtimestamp(sign.since_s, UTC)  # a time that can be told
    except (ValueError, TypeError, KeyError, OverflowError, OSError, RecursionError):
        return None
    return sign


def refuse_living(store: Store, owner: Owner, folder: str) -> None:
    """Returns once it is known that ``owner`` is dead. Raises ConfigError as soon as it is known
    that it lives; StoreFailed."""
    first, pause = sign_in(store), threading.Event()
    still_s = STILL_S if local_path(folder) is not None else STILL_REMOTE_S
    until_s = time.monotonic() + still_s
    while time.monotonic() < until_s:
        pause.wait(LOOK_EVERY_S)
        sign = sign_in(store)
        if sign is not None and sign != first and sign.run == owner.run:
            raise ConfigError(
                f"--folder: the service of {folder} is alive{_where(sign)}: stop that one, "
                "or say --take-over: then it ends, and its jobs on another cluster are started "
                "again here, from what they have saved"
            )


def _where(sign: ServiceSign) -> str:
    since = datetime.fromtimestamp(sign.since_s, UTC)
    at = f" at {sign.url}," if sign.url else ""
    return (
        f"{at} on {sign.host}, and has run for {sign.up_s:.0f} s "
        f"(since {since:%Y-%m-%d %H:%M:%S} UTC by its clock)"
    )
