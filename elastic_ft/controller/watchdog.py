"""Who is silent, who hangs, who asks from outside: looked at a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elastic_ft.controller.connections import Connections
from elastic_ft.controller.diagnosis import Inquiries
from elastic_ft.controller.kills import Kills
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.publisher import Publisher
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import KEEPER
from elastic_ft.core.hangs import Progress
from elastic_ft.core.state import State
from elastic_ft.observe import handover, stop_request
from elastic_ft.observe.run_folder import RunFolder
from elastic_ft.transport.control import PULSES_PER_TIMEOUT, Pulse

WATCH_EVERY_S = 0.25
ACCOUNT_EVERY_S = 1.0
STOPS = {
    handover.NAME: handover.REASON,
    stop_request.NAME: stop_request.WITH_CHECKPOINT,
    stop_request.NOW: stop_request.AT_ONCE,
}


@dataclass(slots=True)
class Watchdog:
    """Tells of what nobody else would: that something does not happen.

    Attributes:
        state: the core's, as it is now.
        use_places: the host's.
        due_s: when it looks again, on the monotonic clock.
        request: the last one for another number of workers.
    """

    state: Callable[[], State]
    kills: Kills
    connections: Connections
    observer: Observer
    run_folder: RunFolder
    publisher: Publisher
    inquiries: Inquiries
    progress: Progress
    heartbeat_timeout_s: float
    use_places: Callable[[dict[str, int]], None]
    due_s: float = 0.0
    request: str = ""
    _account_due_s: float = 0.0
    _pulse_due_s: float = 0.0
    _at_once: bool = False  # it was asked for, and told

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
        """Someone outside may ask for another number of workers, or to end, for whatever reason."""
        state, folder = self.state(), self.run_folder
        if state.phase == "ended":
            return
        try:
            asked = folder.new_request()
            asked_by = {name: folder.asked(name) for name in STOPS}
        except (OSError, ValueError) as error:
            fields = {"workers": 0, "request": ""}
            self.observer.journal("resize_refused", state.generation, str(error), fields)
            return
        if asked is not None and (not asked.request or asked.request != self.request):
            self.request = asked.request
            if asked.places:
                self.use_places(asked.places)
            yield ev.ResizeRequested(time.time(), asked.workers, asked.request)
        stops = [why or STOPS[name] for name, why in asked_by.items() if why is not None]
        if stops and not state.stopping:
            yield ev.StopRequested(time.time(), stops[0])
        elif asked_by[stop_request.NOW] is not None and not self._at_once:
            self._at_once = True
            yield ev.StopRequested(time.time(), stop_request.AT_ONCE)

    def _silent_keepers(self, now: float) -> Iterator[ev.Event]:
        """Stopped, swapped out, cut off: it may come back, but as nobody's keeper."""
        for node, silent in self.progress.silent_keepers(self.state(), now).items():
            name = KEEPER + node
            self.connections.server.dismiss(
                name, cmd.ReleaseWorker(name, f"{silent.reason}: it was replaced")
            )
            self.kills.keeper(node)
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
