"""How things stood after an object of the service's journal: the next service goes on from there.

    snapshots/00001500.json      after that object: the core's state, and what else is told of jobs
    orders/00000000-300.jsonl    jobs as they were submitted: by the first one's place, and how many

All of it follows from the journal, which alone counts: what can't be read here is told again from
there. An order never changes, so it is written once, and snapshots name the files of theirs.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic_ft.core.sharing.asks import SharingTerms, Wish
from elastic_ft.core.sharing.ledger import Sharing
from elastic_ft.core.table import Table
from elastic_ft.core.typed import decoder, fields_of
from elastic_ft.errors import ConfigError, StoreFailed, one_line
from elastic_ft.observe.snapshots import as_plain_values, decode_as
from elastic_ft.service.job_orders import JobOrder, with_shared_parts
from elastic_ft.service.share_standing import Decision, JobEnd, ShareStanding
from elastic_ft.storage.kinds import FailureKind
from elastic_ft.storage.shards import parallel
from elastic_ft.storage.store import Store, StoreError

log = logging.getLogger(__name__)
FOLDER, ORDERS = "snapshots", "orders"
OURS = re.compile(r"(\d{8,})\.json")
KEPT = 2  # the one before, should the newest not be readable
READ_THREADS = 16
FORM = 1  # to be raised where a part gets another meaning
AWAY = (FailureKind.UNREACHABLE, FailureKind.BUSY)  # then the journal can't be read either


@dataclass(frozen=True, slots=True)
class ShareSnapshot:
    """Attributes:
    number, nonce: of the journal's object after which things stood so.
    lines: of the journal by then.
    terms: what was decided last was decided by these.
    """

    number: int
    nonce: str
    lines: int
    terms: SharingTerms
    standing: ShareStanding


class Unreadable(Exception):
    """A snapshot that is none, or is of another version. One line."""


class StandingSnapshots:
    """Written by one thread at a time, which nobody waits for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._orders: list[str] = []  # keys of what is written, in order
        self._ordered = 0  # jobs in them
        self._others: set[int] = set()  # numbers of those that are of another journal
        self._writing: threading.Thread | None = None
        self._newest = 0  # number of the one that was written, or read, last

    # ------------------------------------------------------------------------------- it is read

    def newest(self, is_of_journal: Callable[[int, str], bool]) -> ShareSnapshot | None:
        """The newest that can be read and is of this journal. Raises StoreFailed."""
        for number in reversed(self._numbers()):
            try:
                found, orders = self._read(number)
            except Unreadable as error:
                log.warning("%s is not used: %s", _snapshot_key(number), error)
                continue
            if is_of_journal(found.number, found.nonce):
                self._orders, self._ordered = orders, len(found.standing.orders)
                self._newest = found.number
                return found
            self._others.add(number)
            log.warning("%s is not used: it is of another journal", _snapshot_key(number))
        return None

    def _numbers(self) -> list[int]:
        names = (OURS.fullmatch(key.rpartition("/")[2]) for key in self._store.list(FOLDER))
        return sorted(int(name[1]) for name in names if name is not None)

    def _read(self, number: int) -> tuple[ShareSnapshot, list[str]]:
        """Raises Unreadable, StoreFailed."""
        try:
            found = json.loads(self._store.get(_snapshot_key(number)))
            if (form := found["form"]) != FORM:
                raise Unreadable(f"it is of form {form!r:.20}, and this version reads {FORM}")
            keys = [str(key) for key in found["orders"]]
            contents = parallel(self._store.get, keys, READ_THREADS)
            orders = [order for each in contents for order in _orders_in(each)]
            return _kept(found, number, {order.id: order for order in orders}), keys
        except StoreError as error:
            if error.kind in AWAY:
                raise
            raise Unreadable(str(error)) from None
        except (ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreadable(one_line(error)) from None

    # ---------------------------------------------------------------------------- it is written

    def begin_to_write(self, kept: ShareSnapshot) -> bool:
        """False while the one before is still being written: then later."""
        if self._writing is not None and self._writing.is_alive():
            return False
        self._writing = threading.Thread(
            target=self._write, args=[kept], name="snapshot", daemon=True
        )
        self._writing.start()
        return True

    def finish(self, kept: ShareSnapshot) -> None:
        """Returns once this last one is written, if it is news, or has failed."""
        if self._writing is not None:
            self._writing.join()
        if kept.number != self._newest:
            self._write(kept)

    def _write(self, kept: ShareSnapshot) -> None:
        try:
            self._write_orders(kept.standing.orders)
            self._others.discard(kept.number)
            self._store.put(_snapshot_key(kept.number), _content(kept, self._orders))
            self._newest = kept.number
            while self._others:  # else they would count as newer
                self._store.delete(_snapshot_key(min(self._others)))
                self._others.remove(min(self._others))
            for number in self._numbers()[:-KEPT]:
                self._store.delete(_snapshot_key(number))
        except StoreFailed as error:
            log.warning("no snapshot after %d lines of the journal: %s", kept.lines, error)
        except Exception:  # a bug: the journal has it all
            log.exception("no snapshot after %d lines of the journal", kept.lines)

    def _write_orders(self, orders: Table[str, JobOrder]) -> None:
        new = list(orders.values())[self._ordered :]
        if not new:
            return
        key = f"{ORDERS}/{self._ordered:08d}-{len(new)}.jsonl"
        self._store.put(key, "".join(json.dumps(fields_of(o)) + "\n" for o in new).encode())
        self._orders, self._ordered = [*self._orders, key], self._ordered + len(new)


def _snapshot_key(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"


def _orders_in(content: bytes) -> list[JobOrder]:
    """Raises ValueError, TypeError. Read as one text, so that names of keys, which all have alike,
    are there once; what is in a job is looked at where it is parsed."""
    found = json.loads(b"[%s]" % b",".join(content.splitlines()))
    orders = [JobOrder(**line) for line in found]
    for order in orders:
        texts = (order.id, order.name, order.by, order.request)
        if not (all(type(text) is str for text in texts) and type(order.job) is dict):
            raise ValueError(f"{order.id!r:.80} is no job as it was submitted")
    return [replace(order, job=with_shared_parts(order.job)) for order in orders]


def _content(kept: ShareSnapshot, orders: list[str]) -> bytes:
    standing = kept.standing
    content = {
        "form": FORM,
        "nonce": kept.nonce,
        "lines": kept.lines,
        "terms": asdict(kept.terms),
        "sharing": as_plain_values(standing.sharing),
        "orders": orders,
        "ended": {job: fields_of(end) for job, end in standing.ended.items()},
        "began_s": dict(standing.began_s),
        "decisions": {job: [*map(fields_of, all_)] for job, all_ in standing.decisions.items()},
        "hurried": sorted(standing.hurried),
        "wishes": {job: fields_of(wish) for job, wish in standing.wishes.items()},
        "counts": dict(standing.counts),
    }
    return json.dumps(content).encode()


def _kept(found: dict[str, Any], number: int, orders: dict[str, JobOrder]) -> ShareSnapshot:
    """Raises ConfigError, KeyError, ValueError, TypeError: none is half read."""
    wishes = decoder(dict[str, Wish])(found["wishes"])
    if wishes.keys() != orders.keys():
        raise ValueError(f"{len(wishes)} jobs, and {len(orders)} orders")
    standing = ShareStanding(
        decode_as(Sharing, found["sharing"]),
        Table(orders),
        Table(decoder(dict[str, JobEnd])(found["ended"])),
        Table(decoder(dict[str, float])(found["began_s"])),
        Table(decoder(dict[str, tuple[Decision, ...]])(found["decisions"])),
        Table({order.request: order.id for order in orders.values()}),
        frozenset(decoder(tuple[str, ...])(found["hurried"])),
        Table(wishes),
        Table(decoder(dict[str, int])(found["counts"])),
    )
    terms = decoder(SharingTerms)(found["terms"])
    return ShareSnapshot(number, str(found["nonce"]), int(found["lines"]), terms, standing)
