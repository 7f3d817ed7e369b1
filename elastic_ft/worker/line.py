"""A worker's line to its controller: what it hears, does at once, and keeps for the safe point.

One thread reads, and breaks off collectives when told to (it is the watchdog); one beats. Neither
touches the model. What the worker makes of a message is decided by ``core.follower``. Where a
controller is gone training goes on, and the next one is looked for (``transport.lifeline``): the
line has ended once there is none.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from elastic_ft.core import commands as cmd
from elastic_ft.core import follower as fo
from elastic_ft.core.assignment import Member
from elastic_ft.core.events import Restoring, StepApplied
from elastic_ft.errors import GroupBroken
from elastic_ft.faults import Points
from elastic_ft.groups.groups import Groups
from elastic_ft.transport.control import Form, Heartbeat, Inspect, Note, Stood, Welcome
from elastic_ft.transport.lifeline import Lifeline
from elastic_ft.transport.messages import MessageRefused
from elastic_ft.transport.stacks import stack_of
from elastic_ft.transport.wire import CutOff
from elastic_ft.worker.outside import Outside
from elastic_ft.worker.tools import Flags

log = logging.getLogger(__name__)
HEARTBEATS_PER_TIMEOUT = 8
FRAMES_SHOWN = 6
CUT_OFF = 75  # exit code of a worker that can't reach its controller (EX_TEMPFAIL)
BYTES_TOLD_PER_FORMING = 4
LOOP_SILENT_S = 30.0  # a train loop that takes longer to iterate over train() is named
RELEASE_TIMEOUT_S = 3600.0  # with nothing heard: the connection's end is the usual way out


class ControllerLost(GroupBroken):
    """The controller is gone: nobody can commit a step or form a generation any more."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What the line asks of its worker, from the thread that reads.

    Attributes:
        standing: identifier of the thread that trains.
        use_keeper: returns at once.
        look: from the thread that beats, with each heartbeat; returns at once.
        on_change: another controller has the job.
    """

    standing: Callable[[], int]
    use_keeper: Callable[[cmd.UseKeeper], None]
    on_change: Callable[[Welcome], None]
    look: Callable[[], None] = lambda: None


class ControllerLine:
    """Attributes:
    flags: what the running generation is asked; set here, read by its loop, new for each.
    cut_off: the controller is there, perhaps, and can't be reached.
    restoring: groups or their state are still to come: bytes of it are told.
    iterated: someone has begun to iterate over the worker's steps.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        member: Member,
        points: Points,
        hooks: Hooks,
        pause_timeout_s: float,
    ) -> None:
        self.flags, self.cut_off = Flags(), False
        self.restoring = self.iterated = False
        self._lifeline, self._worker = lifeline, member.worker
        self._points, self._hooks = points, hooks
        self._elastic, self._pause_timeout_s = lifeline.welcome.job.elastic, pause_timeout_s
        self._news = threading.Condition()  # guards the next two
        self._follower = fo.Follower()
        self._groups: Groups | None = None  # that a pause breaks off
        self._bytes_told = (0, 0)  # of which generation, how many had come
        self._tell_bytes_at_s = 0.0
        self._closed = threading.Event()

    def start(self) -> None:
        self._lifeline.start(self._hooks.on_change)
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    def send(self, message: Any) -> bool:
        """Raises ControllerLost where what is told of steps is made durable by nobody."""
        within_s = self._elastic.suspend_timeout_s
        if type(message) is StepApplied and not self._lifeline.await_room(within_s):
            why = f"no controller has made durable what it was told, for {within_s:g} s"
            log.error("%s ends: %s", self._worker, why)
            raise ControllerLost(why)
        return self._lifeline.send(message)

    def note(self, event: str, reason: str, **fields: Any) -> None:
        """A line for the journal."""
        self.send(Note(self._worker, self._points.generation, event, reason, fields))

    def stop(self) -> None:
        """Its threads end, each when it next looks. What others have to say can still be sent."""
        self._closed.set()
        self._lifeline.stop()

    def close(self) -> None:
        self._lifeline.close()

    # -------------------------------------------------------------- what the worker asks

    def rest(self) -> tuple[fo.Reaction, ...]:
        """At the safe point: waits until there is something to do there, and returns it.

        Raises ControllerLost.
        """
        with self._news:
            while True:
                self._follower, actions = fo.rest(self._follower)
                if fo.Leave(lost=True) in actions:
                    raise ControllerLost(fo.CONTROLLER_GONE)
                if self._follower.current:  # with the lock: none of its own is to be missed
                    self.flags = Flags(stop=self.flags.stop)
                if actions:
                    return actions
                if not self._news.wait(RELEASE_TIMEOUT_S):
                    raise ControllerLost(f"nothing heard for {RELEASE_TIMEOUT_S:g} s")

    def enter(self, groups: Groups) -> None:
        """These are formed next: whatever ends their generation breaks them off."""
        with self._news:
            self._groups, self.restoring = groups, True
            if why := self._follower.why_broken_off:
                groups.abort(why)

    def break_off(self, groups: Groups, why: str) -> None:
        """Ranks of their generation have parted. Nothing is done where it is over."""
        with self._news:
            if self._groups is not groups or groups.aborted:
                return
            groups.abort(why)
        self.note("ranks_part", why, worker=self._worker)

    def leave(self) -> None:
        """No group is left."""
        with self._news:
            self._groups = None

    @property
    def is_over(self) -> bool:
        return self._follower.is_over

    def await_over(self, timeout_s: float = RELEASE_TIMEOUT_S) -> bool:
        """Returns whether nothing more is to come of this generation, as soon as that is known."""
        with self._news:
            return self._news.wait_for(lambda: self.is_over, timeout_s)

    # ------------------------------------------------------------------- the one that reads

    def _read(self) -> None:
        try:
            while True:
                self._on_message(self._lifeline.receive())
        except EOFError as error:
            self._on_end(error)
        except Exception as error:  # with nobody who reads it would train on for ever
            log.exception("what the controller says can't be done")
            self._on_end(EOFError(f"{type(error).__name__}: {error}"))

    def _on_message(self, message: Any) -> None:
        match message:
            case cmd.PauseWorkers():
                self._on_pause_workers(message)
            case Form():
                self._hear(fo.BeginGeneration(message.assignment.generation, message))
            case cmd.Bench() | cmd.ReleaseWorker():
                self._hear(message)
            case cmd.UseKeeper():
                self._hooks.use_keeper(message)
            case cmd.TakeCheckpoint():
                self.flags.checkpoint = True
            case cmd.StopAtBoundary():
                self.flags.stop = True
            case Inspect():
                self._tell_where(self._frames())

    def _hear(self, message: fo.Heard) -> None:
        with self._news:
            self._follower, actions = fo.hear(self._follower, message)
            for action in actions:
                if isinstance(action, fo.PauseAtBoundary):
                    self.flags.pause = True
                elif isinstance(action, fo.BreakOff) and self._groups is not None:
                    self._groups.abort(action.reason)
            self._news.notify_all()

    def _on_pause_workers(self, message: cmd.PauseWorkers) -> None:
        frames = self._frames() if message.abort else ()
        self._hear(message)
        if message.abort:
            self._tell_where(frames)

    def _on_end(self, error: EOFError) -> None:
        self.cut_off = isinstance(error, CutOff)
        if isinstance(error, MessageRefused):
            log.error("what the controller says can't be read: %s", error)
        self._hear(fo.LineEnded())
        if self.cut_off and not self._closed.wait(self._pause_timeout_s):
            # The training thread waits for what can't be reached either.
            log.error("cut off, and this ends; at %s", " <- ".join(self._frames()[:FRAMES_SHOWN]))
            os._exit(CUT_OFF)

    def _frames(self) -> tuple[str, ...]:
        return stack_of(self._hooks.standing())

    def _tell_where(self, frames: tuple[str, ...]) -> None:
        step, point = self._points.step, self._points.last
        self.send(Stood(self._worker, "worker", step, point, frames))

    # ------------------------------------------------------------------- the one that beats

    def _beat(self) -> None:
        every_s = self._elastic.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT
        tell_at_s = time.monotonic() + LOOP_SILENT_S
        outside = Outside(
            self._points,
            self._hooks.standing,
            self._elastic.hang_timeout_s,
            lambda why: self.note("between_steps", why, worker=self._worker),
        )
        told, points = False, self._points
        while not self._closed.wait(every_s):
            outside.look()
            self._hooks.look()
            place, left = points.place, points.layers_left()
            self.send(Heartbeat(self._worker, points.step, place, points.count, points.last, left))
            self._tell_bytes()
            if not self.iterated and not told and time.monotonic() > tell_at_s:
                told = True
                reason = f"{LOOP_SILENT_S:g} s on, the train loop has not begun to iterate over "
                reason += "elastic_ft.train(): nothing is trained"
                self.note("loop_without_steps", reason, worker=self._worker)

    def _tell_bytes(self) -> None:
        """While the state comes, forming is not given up."""
        groups = self._groups
        if groups is None or not self.restoring or time.monotonic() < self._tell_bytes_at_s:
            return
        known = (groups.generation, groups.bytes_received)
        if groups.bytes_received and known != self._bytes_told:
            self._bytes_told = known
            every_s = self._elastic.form_timeout_s / BYTES_TOLD_PER_FORMING
            self._tell_bytes_at_s = time.monotonic() + every_s
            self.send(Restoring(time.time(), self._worker, *known))
