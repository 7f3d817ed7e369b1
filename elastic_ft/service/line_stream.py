"""Lines of a stream, kept in memory: the newest as they are, those before them packed."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KEPT_MAX = 50_000  # lines of a file
PACKED = 500  # lines that are packed together: of a step some 25 B each, 450 as they are


@dataclass(frozen=True, slots=True)
class Item:
    """One event of a stream. ``kind``: "": the usual one."""

    id: int
    data: dict[str, Any]
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Pack:
    """``PACKED`` items. ``low``, ``high``: the least and the greatest of their ids."""

    low: int
    high: int
    content: bytes

    def items(self) -> list[Item]:
        return [Item(*fields) for fields in json.loads(zlib.decompress(self.content))]


def _packed(items: list[Item]) -> Pack:
    ids = [item.id for item in items]
    text = json.dumps([(item.id, item.data, item.kind) for item in items])
    return Pack(min(ids), max(ids), zlib.compress(text.encode()))


class LineStream:
    """Items by position, from the first that is kept. One writes, any number read."""

    def __init__(self) -> None:
        # packs, what comes after them, position of the first: one value, who reads has all of it
        self._kept: tuple[tuple[Pack, ...], list[Item], int] = (), [], 0

    def add(self, item: Item) -> None:
        packs, items, first = self._kept
        items.append(item)
        if len(items) < PACKED:
            return
        packs = (*packs, _packed(items))
        if (len(packs) + 1) * PACKED > KEPT_MAX:  # with those that come before the next pack
            half = len(packs) // 2
            packs, first = packs[half:], first + half * PACKED
        self._kept = packs, [], first

    def __len__(self) -> int:
        packs, items, _ = self._kept
        return len(packs) * PACKED + len(items)

    @property
    def end(self) -> int:
        """The position of the next one."""
        packs, items, first = self._kept
        return first + len(packs) * PACKED + len(items)

    def since(self, position: int, most: int = sys.maxsize) -> tuple[list[Item], int]:
        """Those from ``position`` on, ``most`` of them at most, and where to go on."""
        packs, items, first = self._kept
        start = max(0, position - first)
        found = list[Item]()
        for pack in packs[start // PACKED :]:
            if len(found) >= most:
                break
            found += pack.items()[0 if found else start % PACKED :]
        if len(found) < most:
            found += items[max(0, start - len(packs) * PACKED) :]
        del found[most:]
        return found, max(position, first) + len(found)

    def data(self, position: int) -> list[dict[str, Any]]:
        """Of the usual ones from ``position`` on."""
        return [item.data for item in self.since(position)[0] if not item.kind]

    def after(self, last_id: int) -> int:
        """The position after the item of that id; of the first if there was none such."""
        packs, items, first = self._kept
        items = items[:]
        for at in range(len(packs), -1, -1):
            mine = items if at == len(packs) else _if_has(packs[at], last_id)
            for index in range(len(mine) - 1, -1, -1):
                if mine[index].id == last_id and not mine[index].kind:
                    return first + at * PACKED + index + 1
        newest = items or (packs[-1].items() if packs else [])
        if not newest or last_id > newest[-1].id:
            return 0
        return first + self._first_beyond(packs, items, last_id)

    @staticmethod
    def _first_beyond(packs: tuple[Pack, ...], items: list[Item], last_id: int) -> int:
        def later(mine: list[Item], at: int) -> Iterator[int]:
            return (at + index for index, item in enumerate(mine) if item.id > last_id)

        for at, pack in enumerate(packs):
            if pack.high > last_id:
                return next(later(pack.items(), at * PACKED))
        return next(later(items, len(packs) * PACKED), 0)


def _if_has(pack: Pack, id: int) -> list[Item]:
    return pack.items() if pack.low <= id <= pack.high else []
