"""A keeper, from outside: a worker's line to it, and the shards that ended workers left there."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from elastic_ft.core.assignment import Holding, Keeper, Source, Tier, WorkerId
from elastic_ft.core.sharding import Box
from elastic_ft.errors import ElasticError, StateDamaged, StateUnreadable
from elastic_ft.keeper import protocol
from elastic_ft.keeper.buffer import Schema
from elastic_ft.transport.control import SEND_TIMEOUT_S
from elastic_ft.transport.handshake import WrongKey, WrongVersion
from elastic_ft.transport.tls import JobKey
from elastic_ft.transport.wire import Channel, dial

DIAL_TIMEOUT_S = 5.0
Guarding = Callable[[Channel], AbstractContextManager[object]]
T = TypeVar("T")


class KeeperGone(ElasticError):
    """The keeper can't be reached any more, or does not answer."""


class KeeperRefused(ElasticError):
    """The keeper could not do what it was asked. The message says why; ``damaged``: as Refusal."""

    def __init__(self, message: str, damaged: bool = False) -> None:
        super().__init__(message)
        self.damaged = damaged

    def __reduce__(self) -> tuple[type[KeeperRefused], tuple[str, bool]]:
        return KeeperRefused, (str(self), self.damaged)


@dataclass(frozen=True, slots=True)
class KeeperDeadlines:
    """With a keeper that may be stopped.

    Attributes:
        dial_s: to be reached, and to admit us: less than a pause may take.
        answer_s: well under the form timeout, so that a refusal comes while it counts.
    """

    dial_s: float = DIAL_TIMEOUT_S
    answer_s: float = 20.0


class KeeperClient:
    """A worker's line to its node's keeper; thread-safe. Raises KeeperGone, KeeperRefused.

    Nothing here waits for a keeper that is stopped for longer than its deadline, and nothing waits
    for what another thread asks.
    """

    def __init__(
        self,
        keeper: Keeper,
        key: JobKey,
        worker: WorkerId,
        patience: KeeperDeadlines = KeeperDeadlines(),
    ) -> None:
        self._keeper, self._key, self._patience = keeper, key, patience
        self._asking = threading.Lock()  # answers come in the order of questions
        self._open: set[Channel] = set()
        self._channel = _dial(keeper, key, patience)
        self._channel.send(protocol.Attach(worker, os.getpid()))

    def allocate(self, nbytes: int) -> tuple[str, mmap.mmap]:
        """A buffer of the keeper's, mapped here: (path, memory)."""
        with self._asking:
            path = _ask(
                self._channel,
                protocol.Allocate(nbytes),
                protocol.Allocated,
                self._patience.answer_s,
            ).path
        fd = os.open(path, os.O_RDWR)
        try:
            return path, mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)

    def tell(self, message: protocol.Unseal | protocol.Sealed | protocol.Free) -> None:
        """In order, and before this returns in the keeper's hands: it outlives a kill.

        Raises KeeperGone if the line has ended: what is in its memory is of no use to others.
        """
        if not self._channel.send(message):
            raise KeeperGone(f"the line to {self._keeper.name} has ended")

    def upload(self, request: protocol.Upload) -> tuple[dict[str, Any], ...]:
        """Blocks until it is written, on a connection of its own."""
        with closing(_dial(self._keeper, self._key, self._patience)) as channel:
            self._open.add(channel)
            try:
                return _ask(channel, request, protocol.Uploaded, request.timeout_s).entries
            finally:
                self._open.discard(channel)

    def close(self) -> None:
        """Whoever waits for an answer gets KeeperGone."""
        for channel in (self._channel, *self._open):
            channel.close()


class LeftShard:
    """A shard that an ended worker left with ``keeper``: what it is, and its bytes on request."""

    is_far = False  # asked before the store

    def __init__(
        self,
        keeper: Keeper,
        key: JobKey,
        worker: WorkerId,
        source: Source,
        shard: str,
        guard: Guarding = nullcontext,
        patience: KeeperDeadlines = KeeperDeadlines(),
    ) -> None:
        """``guard``: holds each connection, and ends it where this generation is broken off."""
        self.holder, self._keeper, self._key = keeper.left_by(worker), keeper, key
        self._guard, self._patience = guard, patience
        of = Holding(source.step, source.space, shard, Tier.KEEPER, source.generation)
        self._shard = (worker, of)
        self.schema: Schema = self._request(
            protocol.Describe(*self._shard), protocol.Described
        ).schema

    def read(self, parts: Iterable[tuple[str, Box]]) -> bytes:
        """The bytes of ``parts``, one after the other, then DIGEST_BYTES of their digest."""
        return self._request(protocol.Read(*self._shard, tuple(parts)), protocol.Content).payload

    def _request(self, message: protocol.Describe | protocol.Read, answer: type[T]) -> T:
        """Raises StateDamaged, naming the keeper, where it says so; StateUnreadable where it does
        not answer, or can't."""
        try:
            dialled = closing(_dial(self._keeper, self._key, self._patience))
            with dialled as channel, self._guard(channel):
                return _ask(channel, message, answer, self._patience.answer_s)
        except KeeperGone as error:
            raise StateUnreadable(f"{self.holder}: {error}", self.holder) from error
        except KeeperRefused as error:
            said = f"{self.holder}: {error}"
            if error.damaged:
                raise StateDamaged(said, self.holder, self._shard[1].shard) from error
            raise StateUnreadable(said, self.holder) from error


def _dial(keeper: Keeper, key: JobKey, patience: KeeperDeadlines) -> Channel:
    within_s = patience.dial_s
    try:
        channel = dial(keeper.address, key, protocol.FROM_KEEPER, within_s)
    except (OSError, EOFError, WrongKey, WrongVersion) as error:
        why = f"{type(error).__name__}: {error}"
        raise KeeperGone(f"{keeper.name} can't be reached in {within_s:g} s: {why}") from error
    channel.limit(min(SEND_TIMEOUT_S, within_s))
    return channel


def _ask(channel: Channel, message: Any, expected: type[T], timeout_s: float) -> T:
    channel.send(message)
    try:
        answer = channel.receive(timeout_s)
    except EOFError as error:
        raise KeeperGone(f"no answer from the keeper: {error}") from None
    if isinstance(answer, protocol.Refusal):
        raise KeeperRefused(answer.reason, answer.damaged)
    if not isinstance(answer, expected):
        raise KeeperGone(f"the keeper answers with {type(answer).__name__}")
    return answer
