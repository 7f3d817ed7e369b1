"""The controller: inbox -> journal -> ``core.membership.step`` -> executor. It decides nothing.

    event = inbox.get()
    journal(event)                                # written before it is acted on
    state, commands = step(state, event, policy)
    for command in commands: execute(command)     # its outcome comes back as an event

``Controller`` says which thread does what, and what is written in which order.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_ft.controller.ending import ControllerEnding
from elastic_ft.controller.hearing import CONNECTION_ENDED, UNREADABLE, Said
from elastic_ft.controller.observer import is_formed
from elastic_ft.controller.opening import ControllerOpening
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.membership import step as decide
from elastic_ft.core.state import State, Turn
from elastic_ft.errors import JobFailed, StoreFailed, Superseded
from elastic_ft.observe.handover import await_handover
from elastic_ft.observe.metrics import Metrics

log = logging.getLogger(__name__)
STEPS_EVERY_S = 0.1  # while nothing else happens, what workers tell of their steps is looked at
RELEASED_S = 5.0  # for workers to end by themselves, before the host kills them
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)  # of the run folder
LINES = frozenset({cmd.RecordStep, cmd.Journal})  # commands that are done by writing one


class Controller(ControllerOpening, ControllerEnding):
    """Runs one job on a host, from its newest good checkpoint to its end.

    One thread, that of ``run``, has the core's state and does all that is done here. It never waits
    for anything but its inbox. Other threads only put something into that, or are handed work whose
    outcome comes back through it: a reader per connection (``transport.control``), the host's, the
    publisher's (everything in the checkpoint store once the job runs), the run folder's (a remote
    one is mirrored), the metrics' server. ``post`` and ``stop`` are for any thread.

    Of each event, in this order: it goes to inbox.jsonl (``Observer.record``); the core decides;
    the lines are written out, if a command follows from them; the commands are executed, in the
    core's order (``Executor``), which writes events.jsonl, steps.jsonl and the ledger; accounts and
    metrics are brought up to date (``Observer.on``). result.json comes last of all.
    """

    @property
    def metrics(self) -> Metrics:
        return self._observer.metrics

    @property
    def on_step(self) -> Callable[[dict[str, Any]], None] | None:
        """Called in the controller's thread with each line of steps.jsonl."""
        return self._observer.on_step

    @on_step.setter
    def on_step(self, called: Callable[[dict[str, Any]], None] | None) -> None:
        self._observer.on_step = called

    @property
    def owner(self) -> int:
        """This controller's number among all that the job has had, once it has taken it over."""
        return self._publisher.claim.number

    @property
    def stands_s(self) -> float:
        """Since it last looked into its inbox, which it does ten times a second."""
        return time.monotonic() - self._turned_at_s

    # ------------------------------------------------------------------- outside

    def stop(self, reason: str) -> None:
        """Asks for a clean stop: the running step, a checkpoint, the end. Twice: at once."""
        self._stop_reason = self._stop_reason or reason
        self.post(ev.StopRequested(time.time(), reason))
        self.run_folder.hurry()  # where the job has just ended, nobody hears of that event

    def run(self) -> dict[str, Any]:
        """Runs the job to its end. Returns what is in result.json.

        A job that is complete is not run again, and its result stays. Raises ConfigError if it
        would go on from a later step than its last.
        """
        try:
            return self._run_unless_complete()
        finally:
            self._alive.stop()
            self._report.stop()
            self._publisher.close()  # again, where the run has come to its end

    def _run_unless_complete(self) -> dict[str, Any]:
        if ended := self._complete():
            return ended
        if not (self._is_adoptable and self._heir.look()):
            with contextlib.suppress(StoreFailed):  # else it is waited for, once the folder is ours
                self._takeover.resumable()  # before anything is touched
                # A controller that lives ends with a checkpoint: not a step of it is lost.
                url = self.run_folder.url
                await_handover(url, log.info, stopped=lambda: self._stop_reason)
            if ended := self._complete():  # by the one that was asked
                return ended
        try:
            return self._run()
        except Exception as error:
            self._failed(error)
            raise

    def _run(self) -> dict[str, Any]:
        try:
            found = self._open()
        except BaseException as error:
            self._is_superseded = isinstance(error, Superseded)
            self._close()  # whatever it had opened
            raise
        if found is None:
            return self._give_up()
        try:
            self._begin(found)
            while self._finish is None:
                self._turn()
            self._connections.await_workers_end(RELEASED_S, self._hearing.hear_late_one)
            self._ended_at_s = time.time()
        except OSError as error:
            if error.errno not in UNWRITABLE and not self.run_folder.was_removed(error):
                raise
            what = f"the run folder can't be written: {error.strerror}: {self.run_folder.path}"
            last = Turn(self.state, self.policy, time.time()).last_good()
            self._close()
            saved = self._takeover.saved_in_words(self._newest())
            raise JobFailed(f"{what}; {last}{saved}") from error
        except Superseded:
            self._is_superseded = True
            raise
        finally:
            self._close()
        return self._result(self._finish)

    # ------------------------------------------------------------------- the inbox

    def _turn(self) -> None:
        """All that was told since the last one; timers that are due; a look at who hangs."""
        self._turned_at_s = time.monotonic()
        self._listen(self._patience_s(self._watchdog.due_s))
        if self._timers.is_due:
            self._listen(0.0)  # what came before the deadline counts, also while others were heard
        self._observer.show(self.state)
        if self._finish is not None:
            return
        self._inquiries.look()
        for fired in self._timers.take_due():
            self._handle(replace(fired, at_s=time.time()))
        for event in self._watchdog.look():
            self._step(event)
        self._hearing.is_steady = is_steady(self.state)

    def _patience_s(self, watch_due_s: float) -> float:
        """For how long nothing is to be done, if nothing is told."""
        now = time.monotonic()
        until_s = min(max(watch_due_s, now), now + STEPS_EVERY_S)
        for due_s in (self._timers.next_s, self._inquiries.due_s):
            until_s = until_s if due_s is None else min(until_s, due_s)
        return max(0.0, until_s - now)

    def _listen(self, patience: float) -> None:
        """Does what all that came asks for; waits up to ``patience`` seconds where nothing has."""
        with self.run_folder.together():
            told = self._inbox.take(patience)
            self._kills.awake()
            for message in told:
                if self._finish is None:
                    self._handle(message)
                else:
                    self._hearing.hear_late(message)

    # -------------------------------------------------------------------- each event

    def _step(self, event: ev.Event, said: Said | None = None) -> None:
        """``said``: how it came, if over the wire."""
        if self._finish is not None:
            return
        now_s, before = time.time(), self.state
        self._observer.snapshot(now_s, before, self.policy, self._standing)
        self._observer.record(event, now_s, before, said)
        self._take_note(event)
        try:
            self.state, commands = decide(before, event, self.policy)
        except UNREADABLE as error:
            if said is None:
                raise
            why = f"{type(event).__name__}: {type(error).__name__}: {error}"
            self._hearing.refuse(said.member, why)
            return
        if isinstance(event, ev.TimerFired):  # who reached no safe point in time
            late = [c.worker for c in commands if isinstance(c, cmd.KillWorker)]
            self._inquiries.ask(before.ready[worker] for worker in late if worker in before.ready)
        if any(type(command) not in LINES for command in commands):
            self.run_folder.flush()  # first the record, then what follows from it
            if self._is_adoptable and any(type(command) in cmd.LASTING for command in commands):
                self._durability.now()
        self._observer.decides(now_s, event, self.state)
        for command in commands:
            self._execute(command)
        self._look_into(before, event)
        self._observer.on(now_s, event, commands, before, self.state)
        if is_formed(before, self.state) and self.state.assignment is not None:
            self._progress.forget()
            self.host.formed(self.state.assignment)

    def _take_note(self, event: ev.Event) -> None:
        """Of what is none of the core's business."""
        if isinstance(event, ev.StepApplied):
            self._progress.applied(event.worker, event.step, time.monotonic())
            if self.state.ranks.get(event.worker) == 0:
                self._progress.measured(event.took_s, len(self.state.ranks))
        elif isinstance(event, ev.WorkerLost):
            self._note_end(event)
        elif isinstance(event, ev.WorkerReady):
            self._executor.data_read[event.member.worker] = event.data
        elif isinstance(event, ev.StopRequested):
            self._publisher.hurry()

    def _note_end(self, event: ev.WorkerLost) -> None:
        """The end of a connection comes first, and does not say what ended the process."""
        if event.worker in self.state.ready:
            if event.cause == CONNECTION_ENDED:
                self._unexplained.add(event.worker)
        elif event.worker in self._unexplained and event.cause != CONNECTION_ENDED:
            self._unexplained.discard(event.worker)
            if not event.asked:  # by killing it
                fields = {"worker": event.worker}
                generation = self.state.generation
                self._observer.journal("worker_ended", generation, event.cause, fields)

    def _execute(self, command: cmd.Command) -> None:
        self._executor.execute(command, self.state)

    def _look_into(self, before: State, event: ev.Event) -> None:
        """Who stood where, when a generation broke."""
        is_broken = self.state.abort and self.state.generation > before.generation
        if is_broken and before.ranks and before.phase in ("running", "forming"):
            self._inquiries.broke(before, self.state, event, self._progress.marks)
        elif isinstance(event, ev.WorkerLost):
            self._inquiries.lost(event.worker)


def is_steady(state: State) -> bool:
    """A generation trains, and its first step is committed: who waits for that waits no longer."""
    if state.phase != "running" or state.assignment is None:
        return False
    return state.committed > state.assignment.source.step
