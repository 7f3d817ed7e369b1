"""The connection between a controller and its workers: core events up, core commands down.

One connection per worker, admitted with the job's key (``transport.handshake``). Its end is the
first sign of a worker's death, and of a controller's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from elastic_ft.config import Job
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER, Assignment, Keeper, Member, WorkerId
from elastic_ft.core.shares import Share, shares
from elastic_ft.core.terms import is_data_terms
from elastic_ft.faults import PointFault
from elastic_ft.transport.handshake import HANDSHAKE_S
from elastic_ft.transport.messages import Encoded, MessageRefused, Messages, Numbered, Packed
from elastic_ft.transport.reception import Reception
from elastic_ft.transport.tls import JobKey, new_key
from elastic_ft.transport.wire import Channel, dial

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 30.0  # a controller that a thousand workers call at once is no error
LOOK_UP_S = 1.0  # who waits for a welcome looks so often whether it still should
WELCOME_TIMEOUT_S = 300.0  # the controller needs its TCPStore for it, and imports torch for that

PULSES_PER_TIMEOUT = 4  # of elastic.heartbeat_timeout_s
SEND_TIMEOUT_S = 3.0  # for the other end to take what was sent to it
# ---------------------------------------------------------------- messages beside core's own


@dataclass(frozen=True, slots=True)
class Hello:
    """A worker's, or a keeper's, first message.

    Attributes:
        life: of its process: numbers of its messages (``transport.outbox``) begin anew with it.
        owner: number of the controller that it had before; 0: this is its first one.
        generation: the newest that it has heard of.
        keeper: where it serves, if it is one that had a controller before.
    """

    member: Member
    life: str = ""
    owner: int = 0
    generation: int = 0
    keeper: Keeper | None = None

    @property
    def sender(self) -> str:
        """Whose numbers these are: ids of workers are never used again, keepers start again."""
        worker = self.member.worker
        return f"{worker}/{self.life}" if worker.startswith(KEEPER) else worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """The controller's answer: all that a worker needs to know."""

    job: Job
    run: str  # of the controller that started the job's processes; part of all they write
    checkpoint_url: str
    store: tuple[str, int]  # address of the TCPStore through which groups form
    faults: tuple[PointFault, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)  # that the run reads; none known: {}
    owner: int = 0  # this controller's number at the checkpoint URL (``storage.owners``)
    successor_s: float = 0.0  # how long the next one is looked for when this is gone; 0: none comes
    heard: int = 0  # of this sender's numbered messages, all up to this one
    begun: bool = False  # nobody makes the state of step 0 any more


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Up to this number, those of ``sender`` are where the next controller can read them."""

    sender: str
    number: int


@dataclass(frozen=True, slots=True)
class Farewell:
    """The controller ends, and meant to: nobody comes after it."""


@dataclass(frozen=True, slots=True)
class Pulse:
    """To everybody, now and then: the controller does its work."""


@dataclass(frozen=True, slots=True)
class Form:
    assignment: Share
    extra: dict[str, Any] | None = None  # of the host, for the worker's ``on_generation`` hook
    fired: frozenset[int] = frozenset()  # faults that have fired
    checkpointed_step: int = 0  # of the newest committed checkpoint


def forms(
    assignment: Assignment,
    extras: Mapping[WorkerId, dict[str, Any]],
    fired: frozenset[int] = frozenset(),
    checkpointed_step: int = 0,
) -> Iterator[tuple[WorkerId, Form]]:
    """What each participant is sent; what is everyone's is packed once."""
    source: Any = None
    keepers: Any = None
    for worker, share in shares(assignment):
        if source is None:
            source, keepers = Packed(share.source), Packed(share.keepers)
        packed = replace(share, source=source, keepers=keepers)
        yield worker, Form(packed, extras.get(worker), fired, checkpointed_step)


def to_each(command: cmd.PauseWorkers | cmd.StopAtBoundary) -> Encoded:
    """As it is sent to all of its workers: none needs to know who the others are."""
    return Encoded(replace(command, workers=()))


@dataclass(frozen=True, slots=True)
class Heartbeat:
    worker: WorkerId
    step: int
    place: int  # points that the training thread has reached in this step
    points: int  # points reached in all, background work included
    point: str
    layers_left: int = -1  # passes of layers that its GPU has yet to end; -1: not known


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """What a node's keeper sees of it, in bytes."""

    node: str
    keeper_memory: int  # snapshots that the keeper owns
    node_memory_free: int
    node_disk_free: int


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the journal that decides nothing."""

    worker: WorkerId
    generation: int
    event: str
    reason: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inspect:
    """To a worker that seems to hang, and to its node's keeper: where does it stand?"""

    worker: WorkerId
    pid: int


@dataclass(frozen=True, slots=True)
class Stood:
    """Where a worker's training thread stood. Empty: that is not known.

    Attributes:
        by: who says so.
        frames: of its stack, innermost first.
        process: what the kernel says of the process.
        last: nothing more will be said.
    """

    worker: WorkerId
    by: Literal["worker", "keeper"]
    step: int = 0
    point: str = ""
    frames: tuple[str, ...] = ()
    process: dict[str, Any] = field(default_factory=dict)
    last: bool = False


@dataclass(frozen=True, slots=True)
class FaultFired:
    worker: WorkerId
    index: int
    step: int
    at_s: float


# ------------------------------------------------------------------- who may be sent what

TO_CONTROLLER = Messages(
    Hello,
    Heartbeat,
    NodeHealth,
    Note,
    Stood,
    FaultFired,
    ev.WorkerReady,
    ev.CollectiveFailed,
    ev.WorkerRaised,
    ev.Paused,
    ev.Resumed,
    ev.Restoring,
    ev.SourceRefused,
    ev.StepApplied,
    ev.StepHeld,
    ev.ShardsWritten,
    ev.ShardsFailed,
    ev.WorkerDone,
    ev.KeeperReady,
    ev.KeeperHolds,
    ev.Unkept,
    numbered=True,
)
TO_WORKER = Messages(  # and to keepers
    Welcome,
    Pulse,
    Acknowledged,
    Farewell,
    Form,
    Inspect,
    cmd.PauseWorkers,
    cmd.StopAtBoundary,
    cmd.ReleaseWorker,
    cmd.Bench,
    cmd.UseKeeper,
    cmd.TakeCheckpoint,
    cmd.DropKept,
)

NUMBERS = ("loss", "lr", "grad_norm", "tokens", "step_time_s")  # of a step's metrics


def check_sender(member: Member, message: Any) -> None:
    """Raises MessageRefused where a worker speaks for another one, a keeper for another node, or
    says what can't be: nothing of it is journalled, and none of it can end the controller."""
    if member.worker.startswith(KEEPER):
        claimed, own = getattr(message, "node", member.node), member.node
    else:
        named = message.member if isinstance(message, ev.WorkerReady) else message
        claimed, own = getattr(named, "worker", member.worker), member.worker
    kind = type(message).__name__
    if claimed != own:
        raise MessageRefused(f"a {kind} of {str(claimed)[:40]!r}, sent by {member.worker}")
    if isinstance(message, ev.WorkerReady) and not is_data_terms(message.data):
        raise MessageRefused(f"a {kind} of {member.worker} whose data is {message.data!r:.80}")
    if isinstance(message, ev.StepApplied) and (odd := _odd_metric(message.metrics)):
        raise MessageRefused(f"a {kind} of {member.worker} with {odd}")


def _odd_metric(metrics: dict[str, Any]) -> str:
    """The first of the numbers of a step that is none, or below 0 and no loss; "" if all are."""
    for name in NUMBERS:
        if (value := metrics.get(name)) is None:
            continue
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (value < 0 and name != "loss"):
            return f"{name} = {value!r:.40}"
    return ""


# ------------------------------------------------------------------------------- both ends


def connect(
    address: tuple[str, int],
    key: JobKey,
    hello: Hello,
    dial_s: float = CONNECT_TIMEOUT_S,
    welcome_s: float = WELCOME_TIMEOUT_S,
    *,
    unheard_s: float = 0.0,
    is_over: Callable[[], bool] = lambda: False,
) -> tuple[Channel, Welcome]:
    """Connects a worker.

    Args:
        unheard_s: ``Channel.end_when_unheard`` while the welcome is awaited; 0: not known yet.
        is_over: asked again and again meanwhile; True ends the wait.

    Raises OSError, EOFError, WrongKey or WrongVersion.
    """
    channel = dial(address, key, TO_WORKER, dial_s)
    if unheard_s:
        channel.end_when_unheard(unheard_s)
    channel.send(hello)
    until_s = time.monotonic() + welcome_s
    try:
        while True:
            _await_word(channel, until_s, is_over)
            welcome = channel.receive(HANDSHAKE_S)  # it has begun to come
            if not isinstance(welcome, (Pulse, Acknowledged)):
                break  # these are for all, and so for those who are about to be welcomed
    except EOFError:
        channel.close()
        raise
    if not isinstance(welcome, Welcome):
        channel.close()
        raise MessageRefused(f"{type(welcome).__name__} instead of a welcome")
    channel.end_when_unheard(welcome.job.elastic.heartbeat_timeout_s)
    return channel, welcome


def _await_word(channel: Channel, until_s: float, is_over: Callable[[], bool]) -> None:
    """Raises EOFError where none comes ``until_s``, or it ``is_over`` before."""
    while not channel.has_come(min(LOOK_UP_S, max(0.0, until_s - time.monotonic()))):
        if time.monotonic() >= until_s:
            raise EOFError("no welcome in time")
        if is_over():
            raise EOFError("no welcome, and another one has the job now")


class ControlServer:
    """Accepts workers and reads them, a thread each; what they say goes to ``on_message``.

    ``on_refused``: told of a message that can't be read; it was its sender's last. ``key``:
    of the job; None: a new one, with a certificate if ``tls``, as the job file's ``network.tls``.
    Raises ConfigError where that, or ``ports``, can't be had.
    """

    def __init__(
        self,
        host: str,
        welcome: Callable[[Hello], Welcome],
        on_message: Callable[[Hello, Any], None],
        on_end: Callable[[Member, float], None],
        on_refused: Callable[[Member, str], None] = lambda member, reason: None,
        ports: range | None = None,
        *,
        tls: bool = False,
        key: JobKey | None = None,
    ) -> None:
        self.key = key or new_key(tls=tls)
        self._reception = Reception("control", host, self.key, TO_CONTROLLER, self._serve, ports)
        self._welcome, self._on_message, self._on_end = welcome, on_message, on_end
        self._on_refused = on_refused
        self._channels: dict[WorkerId, Channel] = {}
        self._heard: dict[WorkerId, float] = {}
        self._welcomed: set[Channel] = set()  # a welcome is the first that anybody hears
        self._lives: dict[WorkerId, str] = {}
        self._dismissed: dict[str, Any] = {}  # lives, and the last that each is told
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return self._reception.port

    def start(self) -> None:
        self._reception.start()

    def _serve(self, channel: Channel) -> None:
        try:
            hello = channel.receive(HANDSHAKE_S)
        except EOFError:
            return
        if not isinstance(hello, Hello):
            return
        member = hello.member
        channel.limit(SEND_TIMEOUT_S)  # who is stopped must not stop the controller
        with self._lock:
            last = self._dismissed.get(hello.life)
            if last is None:
                self._channels[member.worker] = channel
                self._lives[member.worker] = hello.life
                self._heard[member.worker] = time.monotonic()
        try:
            self._greet(channel, hello)
            if last is not None:  # it did not hear that
                channel.send(last)
            else:
                self._on_message(hello, hello)
                self._read(channel, hello)
        except MessageRefused as error:
            self._on_refused(member, str(error))
        except EOFError:
            pass  # its end is what ``on_end`` tells
        self._welcomed.discard(channel)
        channel.close()
        with self._lock:  # a keeper that calls again is heard after this end, or instead of it
            if self._channels.get(member.worker) is channel:
                del self._channels[member.worker]
                self._on_end(member, self.silent_s(member.worker))

    def _greet(self, channel: Channel, hello: Hello) -> None:
        """Raises EOFError where it can't be welcomed."""
        try:
            channel.send(self._welcome(hello))
            self._welcomed.add(channel)
        except Exception as error:
            who = hello.member.worker
            log.warning("%s can't be welcomed: %s: %s", who, type(error).__name__, error)
            raise EOFError(str(error)) from error

    def _read(self, channel: Channel, hello: Hello) -> None:
        member = hello.member
        while True:
            message = channel.receive()
            if self._channels.get(member.worker) is not channel:
                return  # dismissed, or it has started again: this was its last life
            check_sender(member, message.message if isinstance(message, Numbered) else message)
            self._heard[member.worker] = time.monotonic()
            self._on_message(hello, message)

    def send(self, worker: WorkerId, message: Any) -> bool:
        with self._lock:
            channel = self._channels.get(worker)
        return channel in self._welcomed and channel.send(message)

    def send_all(self, message: Any) -> None:
        """To workers and keepers alike."""
        encoded = Encoded(message)
        with self._lock:
            channels = [*self._channels.values()]
        for channel in channels:
            channel.send(encoded)

    def dismiss(self, worker: WorkerId, message: Any) -> None:
        """Ends its connection, ``message`` being the last it gets, also if it calls again. Nothing
        of it counts any more, and its end is no news."""
        with self._lock:
            channel = self._channels.pop(worker, None)
            if channel is not None:
                self._dismissed[self._lives[worker]] = message
        if channel is not None:
            channel.send(message)
            channel.close()

    def hang_up(self, worker: WorkerId) -> None:
        """Ends its connection, which is told as its end."""
        with self._lock:
            channel = self._channels.get(worker)
        if channel is not None:
            channel.close()

    def silent_s(self, worker: WorkerId) -> float:
        """Seconds since the worker's last message."""
        return time.monotonic() - self._heard.get(worker, time.monotonic())

    def connected(self) -> tuple[WorkerId, ...]:
        with self._lock:
            return tuple(self._channels)

    def close(self) -> None:
        """Ends every connection and the threads that read them. Idempotent."""
        self._reception.close()
