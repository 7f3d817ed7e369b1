"""The start of a controller where workers of an earlier one live: it goes on where that was."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from elastic_ft.config import Job
from elastic_ft.controller.connections import Connections
from elastic_ft.controller.continuity import Continuity
from elastic_ft.controller.executor import Executor
from elastic_ft.controller.hearing import Hearing
from elastic_ft.controller.host import Host
from elastic_ft.controller.inheritance import Inheritance, NotAdoptable, missing
from elastic_ft.controller.observer import Observer
from elastic_ft.controller.standing import DueTimer, Heritage, Standing
from elastic_ft.controller.takeover import FOR_ONE_START, Takeover, TooLate
from elastic_ft.controller.timers import Timers
from elastic_ft.controller.watchdog import Watchdog
from elastic_ft.core import commands as cmd
from elastic_ft.core import events as ev
from elastic_ft.core.assignment import WorkerId
from elastic_ft.core.state import State
from elastic_ft.observe.run_folder import RunFolder


@dataclass(slots=True)
class Heir:
    """In the controller's thread. What it needs is the controller's.

    Attributes:
        survivors: workers and keepers that live, as the host says.
        heritage: where the controller before was, once this one goes on from there.
    """

    job: Job
    host: Host
    folder: RunFolder
    takeover: Takeover
    connections: Connections
    observer: Observer
    executor: Executor
    hearing: Hearing
    timers: Timers
    watchdog: Watchdog
    continuity: Continuity
    survivors: frozenset[WorkerId] = frozenset()
    heritage: Heritage | None = None
    _began_s: float = 0.0
    _made_up: dict[str, int] | None = None

    def look(self) -> bool:
        """Whether anybody lives."""
        self.survivors, self._began_s = self.host.survivors(), time.monotonic()
        return bool(self.survivors)

    def find(self) -> bool:
        """Whether this controller can go on where the one before was. The run folder is ours."""
        if not self.survivors:
            return False
        inheritance = Inheritance(self.job, self.folder, self.observer)
        try:
            heritage = inheritance.find(self.job.model_dump(mode="json", exclude=FOR_ONE_START))
            self._in_time(heritage)
            self._made_up = inheritance.repair(heritage)
        except (NotAdoptable, TooLate) as error:
            self._tell_not_adopted(error)
            return False
        self.heritage = heritage
        return True

    @property
    def ends_unsaved(self) -> bool:
        """The job that it goes on with has ended, and not with its last step."""
        finish = self.heritage.state.finish if self.heritage is not None else None
        return finish is not None and finish.status != "completed"

    def _in_time(self, heritage: Heritage) -> None:
        """Raises TooLate. Who saves and leaves by now can't be adopted, and nobody would call."""
        late_s = time.time() - self.takeover.adoptable_until_s(heritage.last_s)
        if late_s > 0:
            raise TooLate(f"nobody was in charge for too long, by {late_s:.0f} s")

    def _tell_not_adopted(self, why: Exception) -> None:
        reason = f"workers that live are not adopted, they save and end: {why}"
        fields = {"survivors": sorted(self.survivors)}
        self.observer.journal("not_adopted", 0, reason, fields)

    def take_over(self, address: str, killed: tuple[str, ...]) -> bool:
        """The job is this controller's, who can be called at ``address`` from now on. False: the
        store was away for too long, and if for longer than survivors wait, there is no heritage."""
        heritage = self.heritage
        assert heritage is not None
        standing, in_time = heritage.standing, partial(self._in_time, heritage)
        self.takeover.recorded = self.folder.last_step()  # should the claim come to nothing
        if self.ends_unsaved:
            address = ""  # they save and end at once, and nobody has to call for that
        try:
            if not self.takeover.claim(killed, address, standing.run, in_time):
                return False
        except TooLate as error:
            self.heritage = None
            self._tell_not_adopted(error)
            return False
        trouble = self.folder.forget_ended()
        self.takeover.run_id = standing.run
        self.continuity.go_on(standing.terms)
        self.hearing.heard.update(standing.heard)
        self.executor.fired |= standing.fired
        self.executor.data_read.update(standing.data_read)
        self.watchdog.request = standing.request
        self.observer.go_on(heritage.accounts, standing.startup, heritage.state)
        if trouble:
            self.observer.journal("checkpoint_warning", heritage.state.generation, trouble, {})
        return True

    def tell_begun(self, number: int, generation: int) -> None:
        """There is nobody to go on from. ``number``: the controller's."""
        host, pid = os.uname().nodename, os.getpid()
        fields = {"controller": number, "host": host, "pid": pid}
        reason = f"controller {number}, on {host}, process {pid}, is in charge"
        self.observer.journal("controller_started", generation, reason, fields)

    def news(self, number: int) -> Iterator[ev.Event]:
        """What the core is told first. ``number``: the controller's. The host has been started."""
        heritage, now_s = self.heritage, time.time()
        assert heritage is not None and self._made_up is not None
        state, standing = heritage.state, heritage.standing
        for timer in standing.timers:
            left_s = max(0.0, timer.due_s - now_s)
            self.timers.start(cmd.StartTimer(timer.timer, timer.generation, left_s))
        for node, until_s in standing.avoided.items():
            if until_s > now_s:
                self.executor.avoid_node(node, until_s - now_s)
        where = f"on {os.uname().nodename}"
        took_s = round(time.monotonic() - self._began_s, 4)
        until_s = self.takeover.in_charge_until_s(heritage.last_s)
        made_up, away_s = self._made_up, round(max(0.0, now_s - until_s), 3)
        reason = (
            f"controller {number} {where}, process {os.getpid()}, found {len(self.survivors)} "
            f"workers and keepers alive, {state.phase}; nobody was in charge for {away_s:.1f} s, "
            f"{heritage.told} events were told again"
        )
        fields = {"controller": number, "host": os.uname().nodename, "pid": os.getpid()}
        fields |= {"adopted": sorted(self.survivors), "phase": state.phase, "took_s": took_s}
        fields["away_s"] = away_s
        fields |= {"told_again": heritage.told, "made_up": made_up}
        self.observer.journal("in_charge", state.generation, reason, fields)
        yield ev.ControllerChanged(now_s, number, where)
        for lost in missing(state, self.survivors):
            yield replace(lost, at_s=now_s)

    def standing(self, run: str, state: State) -> Standing:
        """Of this controller, for the next one."""
        heard = self.hearing.heard
        return Standing(
            run=run,
            heard={sender: n for sender, n in heard.items() if sender not in state.gone},
            timers=[DueTimer(*due) for due in self.timers.pending()],
            avoided=self.executor.avoided,
            fired=set(self.executor.fired),
            data_read=self.executor.data_read,
            terms=self.continuity.as_json(),
            request=self.watchdog.request,
            **self.observer.as_json(),
        )
