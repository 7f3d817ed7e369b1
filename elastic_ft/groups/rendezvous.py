"""What the participants of a generation tell each other before there is a group: over the store."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

import torch.distributed as dist

from elastic_ft.core.typed import Undecodable, decoder
from elastic_ft.errors import GroupBroken, one_line
from elastic_ft.transport.messages import MessageRefused, Packed, pack, unpack

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Everyones:
    """Values by participant, each different one once, with how many in a row have it."""

    values: tuple[bytes, ...]
    runs: tuple[tuple[int, int], ...]  # number of the value, participants

    @staticmethod
    def of(listed: list[bytes]) -> _Everyones:
        numbers: dict[bytes, int] = {}
        found = [numbers.setdefault(value, len(numbers)) for value in listed]
        runs = tuple((number, len([*some])) for number, some in groupby(found))
        return _Everyones(tuple(numbers), runs)

    def listed(self) -> list[bytes]:
        return [self.values[number] for number, count in self.runs for _ in range(count)]


class Rendezvous:
    """All participants of one generation, by the store's prefix of it. They are numbered.

    Attributes:
        participant: this one's number.
        participants: how many there are.
        store: None before it is connected, and after the teardown.
    """

    def __init__(self, participant: int, participants: int, meet_timeout_s: float) -> None:
        self.participant, self.participants = participant, participants
        self._meet_timeout_s = meet_timeout_s
        self.store: dist.Store | None = None

    def barrier(self, name: str, timeout_s: float | None = None) -> None:
        """Waits until every participant is here. Over the store: it works before any group does.

        ``timeout_s``: as of ``exchange``.
        """
        with self._store_for(f"barrier {name}") as store:
            if store.add(f"{name}/count", 1) == self.participants:
                store.set(f"{name}/all", b"1")
            self._await(f"{name}/all", timeout_s=timeout_s)

    def exchange(self, name: str, value: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Returns every participant's value, in participant order.

        The first one collects them, so that all the others read one value: equal ones once.
        ``timeout_s``: for all to be here; None where they only have to meet.
        """
        with self._store_for(f"exchange {name}") as store:
            store.set(f"{name}/{self.participant}", value)
            if self.participant == 0:
                everyones = _Everyones.of(self._collect(name, timeout_s))
                store.set(f"{name}/all", pack(Packed(everyones)))
            self._await(f"{name}/all", timeout_s=timeout_s)
            return decoder(_Everyones)(unpack(store.get(f"{name}/all"))).listed()

    def _collect(self, name: str, timeout_s: float | None) -> list[bytes]:
        assert self.store is not None
        keys = [f"{name}/{peer}" for peer in range(self.participants)]
        self._await(*keys, timeout_s=timeout_s)
        return [self.store.get(key) for key in keys]

    def _await(self, *keys: str, timeout_s: float | None = None) -> None:
        assert self.store is not None
        timeout_s = self._meet_timeout_s if timeout_s is None else timeout_s
        self.store.wait([*keys], datetime.timedelta(seconds=timeout_s))

    def exchange_values(self, name: str, value: T, timeout_s: float | None = None) -> list[T]:
        """Every participant's data class, in participant order; of equal ones, the same."""
        raw = self.exchange(name, pack(value), timeout_s)
        try:
            decode = decoder(type(value))  # type: ignore[arg-type]
            known = {each: decode(unpack(each)) for each in set(raw)}
        except (MessageRefused, Undecodable) as error:
            raise GroupBroken(f"exchange {name}: {error}") from error
        return [known[each] for each in raw]

    def publish(self, name: str, make: Callable[[], bytes]) -> None:
        """The first to come puts what ``make`` returns into the store, for all."""
        with self._store_for(f"publishing {name}") as store:
            if store.add(f"{name}/said", 1) == 1:
                store.set(name, make())

    def published(self, name: str) -> bytes:
        """What was published, before an ``exchange``, by whoever knows ``name``."""
        with self._store_for(f"reading {name}") as store:
            self._await(name)
            return bytes(store.get(name))

    @contextlib.contextmanager
    def _store_for(self, what: str) -> Iterator[dist.Store]:
        """Raises GroupBroken for whatever goes wrong."""
        assert self.store is not None
        try:
            yield self.store
        except Exception as error:
            raise GroupBroken(f"{what}: {one_line(error)}") from error
