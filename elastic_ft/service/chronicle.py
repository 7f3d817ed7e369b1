"""The service's journal: numbered objects, each of some lines, each created by one winner.

A number that another service has taken means that this one has been superseded, or that the one
before it has written a last time: whoever has the folder (``storage.owners``) reads on, the other
ends. The journal is its own fence, whatever the store (``Store.put_if_absent``). Nothing is ever
deleted: who asked for what stays known.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import secrets
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from elastic_ft.errors import StorageError, StoreFailed, Superseded
from elastic_ft.storage.shards import parallel
from elastic_ft.storage.store import Store, if_there

log = logging.getLogger(__name__)
FOLDER = "journal"
OURS = re.compile(r"\d{8,}\.jsonl")
SORTED_MAX = 99_000_000  # numbers up to which names sort as they do
READ_THREADS = 16
AGAIN_S = (0.2, 1.0, 5.0)
Entry = dict[str, Any]
T = TypeVar("T")


class NumberTaken(Exception):
    """Another service has written the object that was to be the next."""


class Chronicle:
    """Attributes:
    store: of the service's folder.
    trouble: why nothing can be written just now; empty where it can.
    """

    def __init__(self, store: Store) -> None:
        self.store, self._next, self._nonce = store, 1, ""
        self._ended = threading.Event()
        self.trouble = ""

    @property
    def newest(self) -> tuple[int, str]:
        """Number and nonce of the object up to which this one has read or written."""
        return self._next - 1, self._nonce

    def is_at(self, number: int, nonce: str) -> bool:
        """Whether that object is there, and is of this journal. Raises StoreFailed."""
        content = if_there(lambda: self.store.get(_key(number)))
        try:
            return content is not None and json.loads(content.split(b"\n")[0])["nonce"] == nonce
        except (ValueError, KeyError, TypeError):
            return False

    def go_on_after(self, number: int, nonce: str) -> None:
        """What came before is known."""
        self._next, self._nonce = number + 1, nonce

    def read(self) -> list[Entry]:
        """The lines that were not read yet. Raises StoreFailed; StorageError where one is none of
        ours."""
        unread, where = self._unread(), f"{self.store.url}/{FOLDER}"
        if _missing(unread, self._next):  # of a list that was made while others wrote?
            unread = self._unread()
            if gap := _missing(unread, self._next):
                raise StorageError(f"{where}: {_key(gap)} is not there, and later ones are")
        contents = parallel(self.store.get, [_key(each) for each in unread], READ_THREADS)
        try:
            lines = [json.loads(text) for found in contents for text in found.splitlines()]
        except ValueError as error:
            raise StorageError(f"{where}: not a service's journal: {error}") from None
        self._next = 1 + max(unread, default=self._next - 1)
        self._nonce = [self._nonce, *(str(line["nonce"]) for line in lines if "nonce" in line)][-1]
        return [line for line in lines if "nonce" not in line]

    def _unread(self) -> list[int]:
        """Numbers. What else lies there (a copy, a folder's mark) is none of ours."""
        after = _key(self._next - 1) if self._next < SORTED_MAX else ""
        names = (key.rpartition("/")[2] for key in self.store.list(FOLDER, after))
        numbers = (int(name.partition(".")[0]) for name in names if OURS.fullmatch(name))
        return sorted(number for number in numbers if number >= self._next)

    def append(self, entries: list[Entry]) -> None:
        """Returns once they are there for good, however long that takes. Raises NumberTaken: there
        are lines that were not read; Superseded where the service ends meanwhile."""
        key, nonce = _key(self._next), secrets.token_hex(8)
        lines = [{"nonce": nonce}, *entries]
        content = "".join(json.dumps(line) + "\n" for line in lines).encode()

        def put() -> None:
            if not self.store.put_if_absent(key, content) and self.store.get(key) != content:
                raise NumberTaken(key)

        self.insist(put)
        self._next, self._nonce = self._next + 1, nonce

    def insist(self, action: Callable[[], T]) -> T:
        """Its answer, however long the store is away. Raises what it raises, Superseded where the
        service ends meanwhile."""
        for tries in itertools.count():
            try:
                found = action()
                self.trouble = ""
                return found
            except StoreFailed as error:
                self.trouble = str(error)
                log.warning("the journal can't be had, tried again: %s", error)
            if self._ended.wait(AGAIN_S[min(tries, len(AGAIN_S) - 1)]):
                break
        raise Superseded("the service ends")

    def close(self) -> None:
        """Nobody waits for the store any more."""
        self._ended.set()


def _key(number: int) -> str:
    return f"{FOLDER}/{number:08d}.jsonl"


def _missing(numbers: list[int], first: int) -> int | None:
    """The first between ``first`` and the last of them. A stray one may be a date."""
    expected = enumerate(numbers, first)
    return next((number for number, found in expected if number != found), None)
