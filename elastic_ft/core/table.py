"""An immutable mapping of which changed copies are cheap. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from math import isqrt
from typing import Any, TypeVar

K = TypeVar("K")
V = TypeVar("V")

LATE_MIN = 32  # changes kept apart in any case


class _Gone:
    """In place of a value: the key is there no more."""


_GONE: Any = _Gone()
_NONE: Any = object()  # the key is not among the late changes


class Table(Mapping[K, V]):
    """A dict that is never changed: ``put`` and ``without`` return changed copies.

    What is large is shared by all of them; what was changed since lies apart and is copied, and
    joins the rest once it has grown to the square root of that. So a change costs O(sqrt n), n of
    them O(n sqrt n): the core handles an event of each of n workers. Order is that of a dict.
    """

    __slots__ = ("_base", "_late", "_size")

    def __init__(self, base: Mapping[K, V] | None = None) -> None:
        self._base: dict[K, V] = {} if base is None else dict(base)
        self._late: dict[Any, Any] = {}
        self._size = len(self._base)

    def put(self, key: K, value: V) -> Table[K, V]:
        was = self._late.get(key, _NONE)
        if was is _GONE:  # then it comes last, as in a dict
            self._settle()
        is_new = was is _GONE or (was is _NONE and key not in self._base)
        late = self._late.copy()
        late[key] = value
        return self._changed(late, self._size + is_new)

    def without(self, keys: Iterable[K]) -> Table[K, V]:
        """Keys that are not there are none of it."""
        there = [key for key in dict.fromkeys(keys) if key in self]
        if not there:
            return self
        late = {**self._late, **dict.fromkeys(there, _GONE)}
        return self._changed(late, self._size - len(there))

    def _changed(self, late: dict[Any, Any], size: int) -> Table[K, V]:
        new: Table[K, V] = Table.__new__(Table)
        new._base, new._late, new._size = self._base, late, size
        if len(late) > max(LATE_MIN, isqrt(len(self._base))):
            new._settle()
        return new

    def _settle(self) -> dict[K, V]:
        """All of it in one dict. What it maps stays the same, for other threads, too: ``_late`` is
        read first, for what it had is in ``_base`` before it is empty."""
        if late := self._late:
            whole = {**self._base, **late}
            if len(whole) != self._size:
                whole = {key: value for key, value in whole.items() if value is not _GONE}
            self._base = whole
            self._late = {}
        return self._base

    # ------------------------------------------------------------------- as a mapping

    def __getitem__(self, key: K) -> V:
        if self._late and (value := self._late.get(key, _NONE)) is not _NONE:
            if value is _GONE:
                raise KeyError(key)
            found: V = value
            return found
        return self._base[key]

    def get(self, key: K, default: Any = None) -> Any:
        if self._late and (value := self._late.get(key, _NONE)) is not _NONE:
            return default if value is _GONE else value
        return self._base.get(key, default)

    def __contains__(self, key: object) -> bool:
        if self._late and (value := self._late.get(key, _NONE)) is not _NONE:
            return value is not _GONE
        return key in self._base

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        return iter(self._settle())

    def keys(self) -> KeysView[K]:
        return self._settle().keys()

    def values(self) -> ValuesView[V]:
        return self._settle().values()

    def items(self) -> ItemsView[K, V]:
        return self._settle().items()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and self._settle() == dict(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Table({self._settle()!r})"

    def __reduce__(self) -> Any:
        return Table, (self._settle(),)
