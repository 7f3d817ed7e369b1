"""A store that is watched, and whose machine may be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from elastic_ft.observe.lines import SEGMENTS
from elastic_ft.observe.segments import NUMBERS


class Crash(BaseException):
    """The machine is gone."""


class Watched:
    """A store's backend that counts what is put, and dies after so many changes."""

    def __init__(self, backend: Any, dies_after: int | None = None) -> None:
        self._backend, self.left = backend, dies_after
        self.puts: Counter[str] = Counter()
        self.got: Counter[str] = Counter()
        self.put_bytes = self.changes = 0
        self.fails: str | None = None  # the key whose next write is refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def _changed(self, key: str) -> None:
        if key.removeprefix(f"{SEGMENTS}/").partition("/")[0] in NUMBERS:
            self.changes += 1
            if self.changes == self.left:
                raise Crash

    def _put(self, key: str, size: int) -> None:
        if key == self.fails:
            self.fails = None
            raise PermissionError("not now")
        self.puts[key] += 1
        self.put_bytes += size

    def put(self, key: str, parts: Sequence[Any], timeout_s: float) -> None:
        self._put(key, sum(map(len, parts)))
        self._backend.put(key, parts, timeout_s)
        self._changed(key)

    def create(self, key: str, data: bytes, timeout_s: float) -> bool:
        self._put(key, len(data))
        created = bool(self._backend.create(key, data, timeout_s))
        self._changed(key)
        return created

    def get(self, key: str, start: int | None, end: int | None, timeout_s: float) -> Any:
        self.got[key] += 1
        return self._backend.get(key, start, end, timeout_s)

    def delete(self, key: str, timeout_s: float) -> None:
        self._backend.delete(key, timeout_s)
        self._changed(key)
