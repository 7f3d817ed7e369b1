"""Who is silent, who hangs, who asks from outside: looked at a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic_ft.controller.connections import Connections
from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.host import Host
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.publisher import Publisher
from elastic_ft.core import events as ev
from elastic_ft.core.hangs import Progress
from elastic_ft.core.state import State
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.control import PULSES_PER_TIMEOUT, Pulse

WATCH_EVERY_S = 0.25
ACCOUNT_EVERY_S = 1.0


@dataclass(slots=True)
class Watchdog:
    """Tells of what nobody else would: that something does not happen.

    Attributes:
        state: the core's, as it is now.
        due_s: when it looks again, on the monotonic clock.
    """

    state: Callable[[], State]
    host: Host
    connections: Connections
    observer: Observer
    run_folder: RunFolder
    publisher: Publisher
    inquiries: Inquiries
    progress: Progress
    heartbeat_timeout_s: float
    due_s: float = 0.0
    _account_due_s: float = 0.0
    _pulse_due_s: float = 0.0

    def look(self) -> Iterator[ev.Event]:
        """Each event is to be handled before the next one is looked for."""
        now = time.monotonic()
        if now < self.due_s:
            return
        if (absent_s := now - self.due_s) > WATCH_EVERY_S:
            self.progress.overlook(absent_s)
        self.due_s = now + WATCH_EVERY_S
        self.run_folder.check_owner()
        yield from self._requests()
        if now >= self._account_due_s:
            self._account_due_s = now + ACCOUNT_EVERY_S
            self.publisher.look()
            self.observer.account()
        if now >= self._pulse_due_s:
            self._pulse_due_s = now + self.heartbeat_timeout_s / PULSES_PER_TIMEOUT
            self.connections.server.send_all(Pulse())
        yield from self._silent_keepers(now)
        yield from self._hung_workers(now)

    def _requests(self) -> Iterator[ev.Event]:
        """Someone outside may ask for another number of workers, or to hand the job over."""
        state = self.state()
        if state.phase == "ended":
            return
        try:
            asked = self.run_folder.new_request()
            hand_over = self.run_folder.is_asked_to_hand_over() and not state.stopping
        except (OSError, ValueError) as error:
            fields = {"workers": 0, "request": ""}
            self.observer.journal("resize_refused", state.generation, str(error), fields)
            return
        if asked is not None:
            yield ev.ResizeRequested(time.time(), asked.workers, asked.request)
        if hand_over:
            yield ev.StopRequested(time.time(), "another start of the job takes over")

    def _silent_keepers(self, now: float) -> Iterator[ev.Event]:
        """Stopped, swapped out, cut off: it may come back, but as nobody's keeper."""
        for node, silent in self.progress.silent_keepers(self.state(), now).items():
            name = ev.KEEPER + node
            self.connections.server.dismiss(
                name, ev.ReleaseWorker(name, f"{silent.reason}: it was replaced")
            )
            self.host.kill_keeper(node)
            yield ev.KeeperLost(time.time(), node, silent.reason)

    def _hung_workers(self, now: float) -> Iterator[ev.Event]:
        state = self.state()
        if state.phase not in ("running", "pausing", "forming"):
            return
        self.observer.metrics.silent(self.progress.still_s(state, now))
        judgement = self.progress.judge(state, now)
        self.inquiries.ask(state.ready[worker] for worker in judgement.hung)
        for worker, hung in judgement.hung.items():
            silent_s = round(now - hung.since_s, 4)
            yield ev.WorkerHung(time.time(), worker, hung.reason, silent_s)
        if judgement.stuck and state.assignment is not None:
            self.progress.forget()
            yield ev.NobodyMoves(time.time(), state.assignment.generation, judgement.stuck)
