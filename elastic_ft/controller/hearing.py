"""What lies in the controller's inbox, and what is done about each kind of it.

Core events, which the core is told; what workers and keepers say over their connections; and what
the controller's own threads have to say.
"""

from __future__ import annotations

import contextlib
import queue
import time
import typing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.inbox import Inbox
from elastic_ft.controller.observer import Observer
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER, Member, NodeId, WorkerId
from elastic_ft.core.hangs import Progress
from elastic_ft.core.state import State
from elastic_ft.errors import Superseded
from elastic_ft.faults import PointFault
from elastic_ft.transport.control import FaultFired, Heartbeat, Hello, NodeHealth, Note, Stood
from elastic_ft.transport.messages import MessageRefused, Numbered

# What handling a message may raise for what is in it.
CONNECTION_ENDED = "its connection ended"
UNREADABLE = (MessageRefused, LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
EVENTS = frozenset(typing.get_args(ev.Event))
OF_STEPS = frozenset({ev.StepApplied, ev.StepHeld, Heartbeat, NodeHealth})  # flat, and frequent
JOURNALS_OWN = frozenset({"at_s", "seq", "event", "generation", "reason"})


@dataclass(frozen=True, slots=True)
class Said:
    """What came over a worker's, or a keeper's, connection.

    ``sender``, ``number``: as it is numbered (``transport.outbox``); "", 0: it is not.
    """

    member: Member
    message: Any
    sender: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """Over such a connection came what could not be read."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The job can't go on for this."""

    error: BaseException


@dataclass(slots=True)
class Hearing:
    """The ``on_...`` methods are for the readers of connections, and only fill the inbox; the
    others are for the controller's thread.

    Attributes:
        step: tells the core an event, and how it was said (None: by no member).
        state: the core's, as it is now.
        hang_up: ends a member's connection.
        fired: indices of ``faults`` that have fired.
        is_steady: steps go by: what workers tell of them can wait a little.
        kept: bytes that each node's keeper has, as it last said.
        damaged: URLs of checkpoints that were found to be, once the end was decided, and why.
        heard: of each sender, the number up to which its messages were journalled.
    """

    inbox: Inbox
    step: Callable[[ev.Event, Said | None], None]
    state: Callable[[], State]
    observer: Observer
    progress: Progress
    inquiries: Inquiries
    hang_up: Callable[[WorkerId], None]
    faults: Sequence[PointFault]
    fired: set[int]
    is_steady: bool = False
    kept: dict[NodeId, int] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    heard: dict[str, int] = field(default_factory=dict)

    # ------------------------------------------------------------------ any thread

    def on_hello(self, hello: Hello) -> None:
        """Before all that it says."""
        now_s = time.time()
        if hello.owner and hello.keeper is not None:
            self.inbox.put(ev.KeeperReturned(now_s, hello.keeper))
        elif hello.owner:
            self.inbox.put(ev.WorkerReturned(now_s, hello.member.worker, hello.generation))

    def on_message(self, hello: Hello, message: Any) -> None:
        if isinstance(message, Hello):
            self.on_hello(message)
            return
        if isinstance(message, Numbered):
            said = Said(hello.member, message.message, hello.sender, message.number)
        else:
            said = Said(hello.member, message)
        if self.is_steady and type(said.message) in OF_STEPS:
            self.inbox.put_aside(said)
        else:
            self.inbox.put(said)

    def on_refused(self, member: Member, reason: str) -> None:
        self.inbox.put(RefusedMessage(member, reason))

    def on_connection_end(self, member: Member, silent_s: float) -> None:
        now, why = time.time(), CONNECTION_ENDED
        if member.worker.startswith(KEEPER):
            self.inbox.put(ev.KeeperLost(now, member.node))
        else:
            self.inbox.put(ev.WorkerLost(now, member.worker, why, round(silent_s, 4)))

    def on_store(self, served: Future[Any]) -> None:
        """The TCPStore is there, or can't be."""
        if (error := served.exception()) is not None:
            self.inbox.put(Failed(error))

    # ------------------------------------------------------- the controller's thread

    def handle(self, item: Any) -> None:
        """Whatever lay in the inbox."""
        HANDLERS[type(item)](self, item)

    def _keeper_lost(self, event: ev.KeeperLost) -> None:
        self.kept.pop(event.node, None)
        self.step(event, None)

    def _hear(self, said: Said) -> None:
        """Once. What is said may be wrong in ways that no type can tell."""
        if said.number and said.number <= self.heard.get(said.sender, 0):
            return  # told again, and journalled before
        message = said.message
        if type(message) not in OF_STEPS:  # these tell of progress, or come with what does
            self._sign_of_life(said.member)
        try:
            if type(message) in EVENTS:
                self.step(message, said)
            else:
                LISTENERS[type(message)](self, message, said)
        except UNREADABLE as error:
            if type(message) in EVENTS:
                raise  # the core's own trouble
            self.refuse(said.member, f"{type(message).__name__}: {type(error).__name__}: {error}")
        if said.number:  # after it is in the journal: a snapshot of it says so
            self.heard[said.sender] = said.number

    def _sign_of_life(self, member: Member) -> None:
        if member.worker.startswith(KEEPER):
            self.progress.keeper_beat(member.node, time.monotonic())
        else:
            self.progress.heard(member.worker, time.monotonic())

    def _failed(self, failed: Failed) -> None:
        raise failed.error

    def _superseded(self, error: Superseded) -> None:
        raise error

    def hear_late(self, item: Any) -> None:
        """The end is decided; what is found out of checkpoints is said all the same."""
        if isinstance(item, ev.CheckpointDamaged):
            self.damaged[item.url] = item.reason
            generation, fields = self.state().generation, {"step": item.step, "url": item.url}
            self.observer.journal("checkpoint_refused", generation, item.reason, fields)
        elif isinstance(item, Note):
            self._note(item)

    def hear_late_one(self) -> None:
        """Waits a moment for one."""
        with contextlib.suppress(queue.Empty):
            self.hear_late(self.inbox.get(0.02))

    def refuse(self, member: Member, reason: str) -> None:
        """Nothing that a worker says may end the job: it is its last word."""
        fields = {"worker": member.worker}
        self.observer.journal("message_refused", self.state().generation, reason, fields)
        self.hang_up(member.worker)

    def _heartbeat(self, beat: Heartbeat, said: Said) -> None:
        self.inquiries.reached(beat.worker, beat.point)
        now = time.monotonic()
        mark = (beat.step, beat.place, beat.points, beat.layers_left)
        self.progress.beat(beat.worker, *mark, now_s=now)

    def _node_health(self, message: NodeHealth, said: Said) -> None:
        self.progress.keeper_beat(message.node, time.monotonic())
        self.kept[message.node] = message.keeper_memory
        self.observer.health(message)

    def _note(self, note: Note, said: Said | None = None) -> None:
        if clash := JOURNALS_OWN & note.fields.keys():
            raise MessageRefused(f"a note with the journal's own fields: {sorted(clash)}")
        self.observer.journal(note.event, note.generation, note.reason, note.fields, said)

    def _fault_fired(self, message: FaultFired, said: Said) -> None:
        fault = self.faults[message.index]
        self.fired.add(message.index)
        self.observer.journal(
            "fault_fired",
            self.state().generation,
            f"{fault.action} at {fault.point}",
            {k: v for k, v in asdict(fault).items() if v is not None and k != "generation"}
            | {
                "worker": message.worker,
                "index": message.index,
                "at_step": message.step,
                "fired_at_s": message.at_s,
            },
            said,
        )


# Of what workers and keepers say, beside events.
LISTENERS: dict[type, Callable[[Hearing, Any, Said], object]] = {
    Heartbeat: Hearing._heartbeat,
    NodeHealth: Hearing._node_health,
    Note: Hearing._note,
    Stood: lambda me, message, _: me.inquiries.answer(message),
    FaultFired: Hearing._fault_fired,
}
# Of what lies in the inbox.
HANDLERS: dict[type, Callable[[Hearing, Any], object]] = {
    **dict.fromkeys(EVENTS, lambda me, event: me.step(event, None)),
    ev.KeeperLost: Hearing._keeper_lost,
    Said: Hearing._hear,
    RefusedMessage: lambda me, message: me.refuse(message.member, message.reason),
    Note: Hearing._note,
    Superseded: Hearing._superseded,
    Failed: Hearing._failed,
}
